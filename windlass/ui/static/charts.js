// Curves of one or several runs: one chart for each metric, all with the same range, zoomed by dragging or by keys.

import { get } from "./api.js";
import { colour, h, replace } from "./dom.js";
import { clock, count, duration, gibTicks, number, percent, percentTicks, plainTicks, secondTicks, short } from "./format.js";

const seconds = (value) => duration(value);
const METRICS = [
  { name: "loss", title: "Loss", format: (value) => number(value), also: "validation_loss" },
  { name: "validation_loss", title: "Validation loss", format: (value) => number(value) },
  { name: "grad_norm", title: "Gradient norm", format: (value) => number(value, 3) },
  { name: "learning_rate", title: "Learning rate", format: (value) => number(value, 3) },
  { name: "tokens_per_s", title: "Tokens per second", format: (value) => (value < 1e6 ? count(value) : short(value)) },
  { name: "mfu", title: "MFU", format: percent, ticks: percentTicks },
  { name: "memory_gib", title: "Memory, peak", format: (value) => `${number(value, 3)} GiB`, ticks: gibTicks },
  { name: "step_s", title: "Step time", format: seconds, ticks: secondTicks },
  { name: "data_s", title: "Waiting for data", format: seconds, ticks: secondTicks },
  { name: "checkpoint_s", title: "Standing still for saves", format: seconds, ticks: secondTicks },
];
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const AXES = { step: "steps", tokens: "tokens", time: "time of day" };
const WIDE = "loss"; // has a row of its own
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat(); // between ticks
const DENSE = 250; // points, from which on lines are thin
const SPARSE = 12; // and below which each is marked
const HEIGHT = 190;
const WIDE_HEIGHT = 300;

export const runColour = (index) => COLOURS[index % COLOURS.length];

export class Charts {
  constructor(ids) {
    this.ids = ids;
    this.axis = "step";
    this.smooth = 0;
    this.logarithmic = false;
    this.range = null; // of the axis, where somebody has zoomed
    this.charts = new Map();
    this.grid = h("div", { class: "charts" });
    this.none = h("p", { class: "none" });
    this.status = h("span", { class: "hidden", role: "status" });
    this.back = h("button", { type: "button", disabled: true, onclick: () => this.zoom(null) }, "Whole run");
    this.element = h("div", {}, this.tools(), this.grid, this.none, this.status);
    new ResizeObserver(() => this.fit()).observe(this.grid);
    for (const media of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
      matchMedia(media).addEventListener("change", () => this.redraw());
    }
    document.addEventListener("windlass-theme", () => this.redraw());
  }

  tools() {
    const axis = h("select", { onchange: (event) => this.setAxis(event.target.value) });
    for (const [value, text] of Object.entries(AXES)) axis.append(h("option", { value }, text));
    const smooth = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
    const amount = h("output", {}, "off");
    smooth.addEventListener("input", () => {
      this.smooth = Number(smooth.value);
      amount.textContent = this.smooth ? this.smooth.toFixed(2) : "off";
      this.load();
    });
    const logarithmic = h("input", { type: "checkbox", onchange: (event) => this.setLogarithmic(event.target.checked) });
    return h(
      "div",
      { class: "bar" },
      h("h2", {}, "Curves"),
      h("label", {}, "over", axis),
      h("label", {}, "smoothing", smooth, amount),
      h("label", {}, logarithmic, "log scale"),
      this.back,
    );
  }

  setAxis(axis) {
    this.axis = axis;
    this.range = null;
    this.destroy();
    this.load();
  }

  setLogarithmic(on) {
    this.logarithmic = on;
    this.redraw();
  }

  zoom(range) {
    this.range = range;
    this.back.disabled = !range;
    const words = range ? `Zoomed to ${AXES[this.axis]} ${short(range[0])} to ${short(range[1])}` : "The whole run is shown";
    this.status.textContent = words;
    for (const chart of this.charts.values()) if (chart.plot) this.setScale(chart.plot);
    this.load();
  }

  setScale(plot) {
    const xs = plot.data[0];
    if (!xs.length) return;
    const [min, max] = this.range ?? [xs[0], xs[xs.length - 1]];
    if (max > min) plot.setScale("x", { min, max });
  }

  // Fetches the curves of every run for the range in sight, as many points as there are pixels for.
  async load() {
    const asked = (this.asked = Symbol("newest"));
    const [from, to] = this.range ?? [null, null];
    const answers = await Promise.all(
      this.ids.map((id) => this.fetch({ id, axis: this.axis, smooth: this.smooth || null, from, to }).catch(() => null)), // a run may be gone
    );
    if (this.asked !== asked) return; // somebody has zoomed since
    this.answers = answers.map((answer, index) => answer ?? this.answers?.[index] ?? null); // of one that is gone: what was read
    this.show();
  }

  async fetch(parameters) {
    const width = this.grid.clientWidth || 900;
    const columns = Math.max(1, Math.floor(width / 390));
    const [wide, narrow] = await Promise.all([
      get("series", { ...parameters, points: Math.round(width), metric: WIDE }),
      get("series", { ...parameters, points: Math.round(width / columns), metric: METRICS.map((one) => one.name).filter((name) => name !== WIDE) }),
    ]);
    return { ...narrow, curves: { ...wide.curves, ...narrow.curves } };
  }

  show() {
    const missing = [];
    for (const metric of METRICS) {
      const curves = this.answers.map((answer) => answer?.curves[metric.name]);
      const known = curves.some((curve) => curve?.x.length && (metric.name !== "checkpoint_s" || curve.y.some((value) => value > 0)));
      const chart = this.charts.get(metric.name);
      if (!known) {
        missing.push(metric.title);
        if (!this.range && chart) this.remove(metric.name);
        continue;
      }
      this.draw(metric, curves);
    }
    const some = this.charts.size;
    const text = some ? `Not measured: ${missing.join(", ")}.` : "No steps yet: curves appear with the first one.";
    this.none.textContent = missing.length ? text : "";
  }

  remove(name) {
    const chart = this.charts.get(name);
    chart.plot?.destroy();
    chart.figure.remove();
    this.charts.delete(name);
  }

  draw(metric, curves) {
    let chart = this.charts.get(metric.name);
    if (!chart) {
      chart = this.makeFigure(metric);
      this.charts.set(metric.name, chart);
      const order = METRICS.map((one) => one.name);
      const later = [...this.grid.children].find((other) => order.indexOf(other.dataset.metric) > order.indexOf(metric.name));
      this.grid.insertBefore(chart.figure, later ?? null);
    }
    const { tables, series } = this.tables(metric, curves);
    const data = uPlot.join(tables);
    const shape = JSON.stringify(series.map((one) => [one.label, one.kind]));
    if (chart.plot && chart.shape === shape) {
      chart.plot.setData(data, false);
      this.setScale(chart.plot);
      if (!this.range) chart.plot.setScale("y", {});
    } else {
      chart.plot?.destroy();
      chart.shape = shape;
      chart.plot = new uPlot(this.options(metric, series, chart), data, chart.box);
      this.setScale(chart.plot);
    }
    const isTwo = series.some((one) => one.label === "validation");
    replace(chart.key, isTwo ? [keyOf("c1", "training"), keyOf("c2", "validation")] : []);
    chart.describe = () => this.describe(metric, curves);
    if (chart.plot.cursor.idx === null || chart.plot.cursor.idx === undefined) chart.value.textContent = chart.describe();
  }

  // One table of points for each line: what was measured, and above it what is smoothed; of one run validations too.
  tables(metric, curves) {
    const tables = [];
    const series = [];
    curves.forEach((curve, index) => {
      if (!curve) return;
      const label = this.ids.length > 1 ? this.ids[index] : "training";
      tables.push([curve.x, curve.y]);
      const kind = curve.smooth ? "faint" : curve.x.length > DENSE ? "thin" : curve.x.length < SPARSE ? "dots" : "line";
      series.push({ label, kind, colour: runColour(index) });
      if (curve.smooth) {
        tables.push(curve.smooth);
        series.push({ label: `${label}, smooth`, kind: "line", colour: runColour(index) });
      }
      const other = metric.also && this.ids.length === 1 ? this.answers[index].curves[metric.also] : null;
      if (other?.x.length) {
        tables.push([other.x, other.y]);
        series.push({ label: "validation", kind: "dots", colour: "c2" });
      }
    });
    return { tables, series };
  }

  makeFigure(metric) {
    const value = h("span", { class: "value" });
    const key = h("span", { class: "key" });
    const box = h("div", { class: "plot", tabindex: "0", role: "img" });
    const figure = h(
      "figure",
      { class: "card", data: { metric: metric.name, wide: String(metric.name === WIDE) } },
      h("figcaption", {}, h("h3", {}, metric.title), key, value),
      box,
    );
    box.setAttribute("aria-label", `${metric.title}. Plus and minus zoom, arrows move, zero shows the whole run.`);
    box.addEventListener("keydown", (event) => this.key(event));
    return { figure, box, key, value, plot: null };
  }

  options(metric, series, chart) {
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const wide = metric.name === WIDE;
    const isTime = this.axis === "time";
    const logarithmic = this.logarithmic && ["loss", "validation_loss", "grad_norm", "learning_rate"].includes(metric.name);
    return {
      width: this.widthOf(chart),
      height: wide ? WIDE_HEIGHT : HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, sync: { key: "windlass" } },
      scales: { x: { time: isTime }, y: { distr: logarithmic ? 3 : 1, range: logarithmic ? undefined : spread } },
      axes: [
        { ...axis, size: 30, ...(isTime ? {} : { incrs: WHOLE, values: (_plot, values) => values.map((value) => short(value)) }) },
        { ...axis, size: 62, gap: 6, values: logarithmic ? (_plot, values) => values.map((value) => (value === null ? "" : metric.format(value))) : (_plot, values) => (metric.ticks ?? plainTicks)(values, stepOf(values)) },
      ],
      series: [{}, ...series.map((one) => lineOf(one))],
      hooks: {
        draw: [(plot) => this.drawRestarts(plot)],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.pointed(plot, metric, series, chart)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.zoom(null))],
      },
    };
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const left = plot.posToVal(plot.select.left, "x");
    const right = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoom([left, right]);
  }

  // The values under the pointer stand beside the title; without a pointer the newest one does.
  pointed(plot, metric, series, chart) {
    const { left } = plot.cursor;
    if (left === null || left === undefined || left < 0 || plot.cursor.idx === null) {
      chart.value.textContent = chart.describe ? chart.describe() : "";
      return;
    }
    const at = plot.cursor.idx; // where the dots are
    const parts = series.map((one, index) => `${series.length > 1 ? `${one.label} ` : ""}${metric.format(nearest(plot.data[index + 1], at))}`);
    const x = plot.data[0][at];
    const place = this.axis === "time" ? clock(x) : `${this.axis} ${count(x)}`;
    chart.value.textContent = `${place}: ${parts.join(" · ")}`;
  }

  describe(metric, curves) {
    const last = curves.map((curve) => (curve?.y.length ? metric.format(curve.y[curve.y.length - 1]) : "–"));
    return last.join(" · ");
  }

  drawRestarts(plot) {
    const context = plot.ctx;
    context.save();
    context.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    context.lineWidth = devicePixelRatio;
    this.answers.forEach((answer, index) => {
      context.strokeStyle = this.ids.length > 1 ? colour(runColour(index), 0.5) : colour("bad", 0.6);
      for (const at of answer?.restarts ?? []) {
        const x = plot.valToPos(at, "x", true);
        if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
        context.beginPath();
        context.moveTo(x, plot.bbox.top);
        context.lineTo(x, plot.bbox.top + plot.bbox.height);
        context.stroke();
      }
    });
    context.restore();
  }

  key(event) {
    const first = [...this.charts.values()][0]?.plot;
    if (!first || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = first.data[0];
    const whole = this.whole(xs);
    const [begin, end] = this.range ?? whole;
    const width = end - begin;
    const middle = (begin + end) / 2;
    const ranges = {
      "+": [middle - width / 4, middle + width / 4],
      "=": [middle - width / 4, middle + width / 4],
      "-": [middle - width, middle + width],
      ArrowLeft: [begin - width / 5, end - width / 5],
      ArrowRight: [begin + width / 5, end + width / 5],
    };
    if (event.key === "0" || event.key === "Escape") this.zoom(null);
    else if (ranges[event.key]) this.zoom(clipped(ranges[event.key], this.known ?? whole));
    else return;
    event.preventDefault();
  }

  whole(xs) {
    if (!this.range) this.known = [xs[0], xs[xs.length - 1]];
    return this.known ?? [xs[0], xs[xs.length - 1]];
  }

  widthOf(chart) {
    return Math.max(200, chart.figure.clientWidth - 24 || 360);
  }

  fit() {
    for (const [name, chart] of this.charts) {
      const width = this.widthOf(chart);
      if (chart.plot && chart.plot.width !== width) chart.plot.setSize({ width, height: name === WIDE ? WIDE_HEIGHT : HEIGHT });
    }
  }

  redraw() {
    this.destroy();
    if (this.answers) this.show();
  }

  destroy() {
    for (const chart of this.charts.values()) chart.plot?.destroy();
    this.charts.clear();
    replace(this.grid);
  }
}

export function swatch(name) {
  const mark = h("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = `var(--${name})`;
  return mark;
}

function keyOf(name, text) {
  return h("span", {}, swatch(name), text);
}

function lineOf({ label, kind, colour: name }) {
  const width = kind === "faint" || kind === "thin" ? 1 : 1.6;
  const stroke = colour(name, kind === "faint" ? 0.32 : 1);
  const points = kind === "dots" ? { show: true, size: 6, fill: stroke } : { show: false };
  return { label, stroke, width, spanGaps: true, points };
}

// Between the labels of an axis, without what floats leave at its end.
function stepOf(values) {
  return values.length > 1 ? Number((values[1] - values[0]).toPrecision(6)) : Math.abs(values[0]) || 1;
}

function spread(_plot, low, high) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  const room = (high - low || Math.abs(high)) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function clipped([begin, end], [low, high]) {
  const range = [Math.max(begin, low), Math.min(end, high)];
  return range[0] <= low && range[1] >= high ? null : range[1] > range[0] ? range : null;
}

// The value that is closest to a place: lines of several runs have points at different places.
function nearest(ys, at) {
  for (let distance = 0; distance < 200; distance++) {
    for (const index of [at - distance, at + distance]) {
      if (ys[index] !== null && ys[index] !== undefined) return ys[index];
    }
  }
  return null;
}
