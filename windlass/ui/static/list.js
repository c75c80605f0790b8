// All runs, and the sweeps they belong to.

import { get, throttled, watch } from "./api.js";
import { h, replace, runLink, setText, stateMark } from "./dom.js";
import { ago, count, dollars, duration, number, percent } from "./format.js";

const MOST_ROWS = 1000;
const MOST_COMPARED = 16; // at once
const UNDER_WAY = ["running", "waiting"];
const COLUMNS = [
  { key: "name", title: "Run", cell: title, text: true, class: "title" },
  { key: "state", title: "State", cell: (run) => stateMark(run.state), text: true, class: "status" },
  { key: "target", title: "Target", cell: (run) => run.target, text: true },
  { key: "step", title: "Progress", cell: progress, class: "wide" },
  { key: "eta", title: "Left", cell: (run) => duration(run.eta), class: "number", optional: true },
  { key: "loss", title: "Loss", cell: (run) => number(run.loss), class: "number" },
  { key: "tokens_per_s", title: "Tokens/s", cell: (run) => count(run.tokens_per_s), class: "number" },
  { key: "mfu", title: "MFU", cell: (run) => percent(run.mfu), class: "number", optional: true },
  { key: "goodput", title: "Goodput", cell: (run) => percent(run.goodput), class: "number", hint: "time training ÷ time paid" },
  { key: "cost_usd", title: "Cost", cell: (run) => dollars(run.cost_usd), class: "number", optional: true, hint: "so far, at on-demand prices" },
  { key: "started", title: "Started", cell: (run) => ago(run.started), class: "number" },
];

export async function showList(main) {
  const page = new List(main);
  await page.load();
  watch([], (changed, gone) => page.change(changed, gone));
}

class List {
  constructor(main) {
    this.main = main;
    this.runs = new Map();
    this.rows = new Map(); // by id
    this.picked = new Set();
    this.refresh = throttled(() => this.load(), 5000);
    this.sort = { key: null, down: false };
    this.filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter by name, state or target", oninput: () => this.show() });
    this.compare = h("button", { type: "button", disabled: true, onclick: () => this.goCompare() }, "Compare");
    this.body = h("tbody");
    this.head = h("tr");
    this.heading = h("h1", {}, "Runs");
    this.sweeps = h("section", { hidden: true });
    this.problem = h("p", { class: "none", role: "status" });
    this.place = h("div", { class: "card runs" });
    this.none = h("p", { class: "none", role: "status" });
    this.table = h("table", {}, h("thead", {}, this.head), this.body);
    replace(main, h("div", { class: "bar" }, this.heading, this.filter, this.compare), this.place, this.problem, this.sweeps);
  }

  async load() {
    const { runs, sweeps, root, problem } = await get("runs");
    this.root = root;
    setText(this.problem, problem ?? "");
    this.runs = new Map(runs.map((run) => [run.id, run]));
    this.show();
    this.showSweeps(sweeps);
  }

  change(changed, gone) {
    for (const [key, row] of Object.entries(changed)) if (key.startsWith("row ")) this.runs.set(row.id, row);
    for (const key of gone) {
      this.runs.delete(key.slice(4));
      this.picked.delete(key.slice(4));
    }
    this.show();
    this.refresh(); // sweeps
  }

  show() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = [...this.runs.values()].filter((run) => words.every((word) => `${run.name} ${run.state} ${run.target}`.toLowerCase().includes(word)));
    runs.sort((a, b) => this.order(a, b));
    const running = runs.filter((run) => run.state === "running").length;
    setText(this.heading, running ? `Runs, ${running} running` : "Runs");
    if (!this.runs.size) {
      replace(this.place, this.nothing());
      return;
    }
    if (this.table.parentNode !== this.place) replace(this.place, this.table, this.none);
    setText(this.none, runs.length ? (runs.length > MOST_ROWS ? `The first ${count(MOST_ROWS)} of ${count(runs.length)} runs.` : "") : `No run matches “${this.filter.value}”.`);
    this.none.hidden = !this.none.textContent;
    this.showHead();
    this.showColumns();
    this.showRows(runs.slice(0, MOST_ROWS).map((run) => this.row(run)));
    this.showPicked();
  }

  // A column in which no run has a value is not shown: without GPUs there is no MFU, without prices no cost.
  showColumns() {
    const runs = [...this.runs.values()];
    const empty = COLUMNS.filter((column) => column.optional && !runs.some((run) => Number.isFinite(run[column.key])));
    this.table.dataset.without = empty.map((column) => column.key).join(" ");
  }

  // Rows stay the elements they are, so that the focus stays where it is.
  showRows(rows) {
    const same = rows.length === this.body.children.length && rows.every((row, index) => row === this.body.children[index]);
    if (!same) replace(this.body, rows);
  }

  nothing() {
    const command = h("pre", {}, "windlass init my.yaml\nwindlass run my.yaml");
    return h("div", { class: "empty" }, `No runs in ${this.root}/ yet.`, h("br"), command);
  }

  showHead() {
    if (this.head.children.length) {
      [...this.head.children].slice(1).forEach((cell, index) => cell.setAttribute("aria-sort", this.direction(COLUMNS[index].key)));
      return;
    }
    this.head.append(h("th", {}, h("span", { class: "hidden" }, "Pick to compare")));
    for (const column of COLUMNS) {
      const button = h("button", { type: "button", title: column.hint, onclick: () => this.sortBy(column.key) }, column.title);
      this.head.append(h("th", { class: column.class, data: { key: column.key }, scope: "col", "aria-sort": "none" }, button));
    }
  }

  direction(key) {
    return this.sort.key !== key ? "none" : this.sort.down ? "descending" : "ascending";
  }

  sortBy(key) {
    const same = this.sort.key === key;
    const numeric = !COLUMNS.find((column) => column.key === key).text && key !== "loss";
    this.sort = same && this.sort.down !== numeric ? { key: null, down: false } : { key, down: same ? !this.sort.down : numeric };
    this.show();
  }

  // What is under way first, then the newest; or by a column, with what has no value last.
  order(a, b) {
    const { key, down } = this.sort;
    if (key === null) {
      return UNDER_WAY.includes(b.state) - UNDER_WAY.includes(a.state) || (b.started ?? 0) - (a.started ?? 0) || a.name.localeCompare(b.name);
    }
    const [x, y] = [a[key] ?? null, b[key] ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    return (typeof x === "string" ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
  }

  row(run) {
    const cells = COLUMNS.map((column) => h("td", { class: column.class, data: { key: column.key } }, column.cell(run)));
    const known = this.rows.get(run.id);
    if (!known) {
      const row = h("tr", { data: { run: run.id } }, h("td", { class: "pick" }, this.pick(run)), cells);
      this.rows.set(run.id, row);
      return row;
    }
    cells.forEach((cell, index) => {
      const shown = known.children[index + 1];
      if (!cell.isEqualNode(shown)) shown.replaceChildren(...cell.childNodes);
    });
    return known;
  }

  pick(run) {
    const box = h("input", { type: "checkbox", disabled: !run.folder, "aria-label": `Pick ${run.name} to compare` });
    box.addEventListener("change", () => {
      if (box.checked) this.picked.add(run.id);
      else this.picked.delete(run.id);
      this.showPicked();
    });
    return box;
  }

  showPicked() {
    this.compare.disabled = this.picked.size < 2 || this.picked.size > MOST_COMPARED;
    this.compare.title = `Pick 2 to ${MOST_COMPARED} runs`;
    setText(this.compare, this.picked.size ? `Compare ${this.picked.size}` : "Compare");
  }

  goCompare() {
    location.href = `/compare?${new URLSearchParams([...this.picked].map((id) => ["id", id]))}`;
  }

  showSweeps(sweeps) {
    if (!sweeps.length) return;
    this.sweeps.hidden = false;
    const rows = sweeps.map((sweep) => {
      const names = Object.keys(sweep.runs).filter((name) => this.runs.has(name));
      const href = `/compare?${new URLSearchParams(names.slice(0, 16).map((id) => ["id", id]))}`;
      const done = names.filter((name) => this.runs.get(name).state === "finished").length;
      return h("tr", {}, h("td", {}, h("a", { href }, sweep.name)), h("td", {}, `${Object.keys(sweep.runs).length} runs, ${done} finished`), h("td", {}, bestOf(names, this.runs)));
    });
    const head = h("thead", {}, h("tr", {}, h("th", {}, "Sweep"), h("th", {}, "Runs"), h("th", {}, "Lowest loss")));
    replace(this.sweeps, h("div", { class: "bar" }, h("h2", {}, "Sweeps")), h("div", { class: "card scroll" }, h("table", {}, head, h("tbody", {}, rows))));
  }
}

function bestOf(names, runs) {
  const known = names.map((name) => runs.get(name)).filter((run) => Number.isFinite(run.loss));
  if (!known.length) return "–";
  const best = known.reduce((a, b) => (b.loss < a.loss ? b : a));
  return [runLink(best.id), ` ${number(best.loss)}`];
}

function title(run) {
  return [h("div", { class: "name" }, runLink(run.id, run.name)), run.reason ? h("div", { class: "why", title: run.reason }, run.reason) : null];
}

function progress(run) {
  if (run.step === null || run.step === undefined) return "–";
  const text = `${count(run.step)} of ${count(run.steps)}`;
  const loss = h("span", { class: "narrow" }, Number.isFinite(run.loss) ? `loss ${number(run.loss)}` : "");
  return [h("span", {}, text), loss, h("progress", { max: run.steps || 1, value: run.step, "aria-label": text })];
}
