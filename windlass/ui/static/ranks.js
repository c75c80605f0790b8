// A heat map: a row for each rank, a column for each few steps, redder where the others waited for it. And in words.

import { get } from "./api.js";
import { colour, h, replace } from "./dom.js";
import { count, duration, percent } from "./format.js";

const TALLEST = 420;
const RAMP = 120;
const HOT = 0.5; // the share of a step at which the colour is at its end

export class Ranks {
  constructor(id) {
    this.id = id;
    this.canvas = h("canvas", { class: "heat", role: "img" });
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => (this.under.textContent = this.summary ?? ""));
    this.under = h("p", { class: "soft", role: "status" });
    this.ramp = h("canvas", { width: RAMP, height: 1 });
    this.slow = h("div");
    this.scale = h("span", { class: "scale" }, "with the others", this.ramp, "half a step behind");
    this.axes = h("div", { class: "axes" });
    this.body = h("div", { class: "card" }, this.canvas, this.axes, this.under, this.slow);
    this.none = h("p", { class: "none" }, "No comparison of the ranks yet: they are compared every half minute.");
    this.element = h("div", {}, h("div", { class: "bar" }, h("h2", {}, "Ranks"), this.scale), this.body, this.none);
    document.addEventListener("windlass-theme", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async load() {
    this.map = await get("ranks", { id: this.id }).catch(() => null);
    const known = Boolean(this.map?.ranks);
    this.body.hidden = this.scale.hidden = !known;
    this.none.hidden = known;
    if (known) this.draw();
  }

  // Where there are more ranks than pixels, a row shows the slowest of its ranks: none is lost.
  draw() {
    if (!this.map?.ranks) return;
    const { ranks, steps } = this.map;
    this.cells = Uint8Array.from(atob(this.map.cells), (letter) => letter.charCodeAt(0));
    this.rows = Math.min(ranks, TALLEST);
    this.canvas.width = steps.length;
    this.canvas.height = this.rows;
    this.canvas.style.height = `${Math.min(TALLEST, Math.max(60, ranks * 16))}px`;
    const palette = makePalette();
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(steps.length, this.rows);
    for (let column = 0; column < steps.length; column++) {
      for (let row = 0; row < this.rows; row++) {
        image.data.set(palette[this.cells[column * ranks + this.slowestIn(row, column)]], 4 * (row * steps.length + column));
      }
    }
    context.putImageData(image, 0, 0);
    this.drawRamp(palette);
    replace(this.axes, [`step ${count(steps[0])}`, `rank 0 at the top, ${count(ranks - 1)} at the bottom`, `step ${count(steps.at(-1))}`].map((text) => h("span", {}, text)));
    this.describe();
  }

  slowestIn(row, column) {
    const { ranks } = this.map;
    const end = Math.ceil(((row + 1) * ranks) / this.rows);
    let slowest = Math.floor((row * ranks) / this.rows);
    for (let rank = slowest; rank < end && rank < ranks; rank++) {
      if (this.cells[column * ranks + rank] > this.cells[column * ranks + slowest]) slowest = rank;
    }
    return slowest;
  }

  drawRamp(palette) {
    const context = this.ramp.getContext("2d");
    const image = context.createImageData(RAMP, 1);
    for (let x = 0; x < RAMP; x++) image.data.set(palette[Math.round((255 * HOT * x) / RAMP)], 4 * x);
    context.putImageData(image, 0, 0);
  }

  describe() {
    const { ranks, slow, step_s: stepTimes } = this.map;
    const words = slow.length ? `the others wait for ${slow.length === 1 ? `rank ${slow[0].rank}` : `${slow.length} of them`}` : "none holds up the others";
    this.summary = `${count(ranks)} ranks, ${duration(stepTimes[stepTimes.length - 1])} a step; ${words}.`;
    this.under.textContent = this.summary;
    this.canvas.setAttribute("aria-label", `How far each rank is behind the others, over steps. ${this.summary}`);
    if (!slow.length) return replace(this.slow);
    const head = h("tr", {}, ["Rank", "Host", "Behind the others", "Of a step", "Since step"].map((title, index) => h("th", { class: index > 1 ? "number" : null, scope: "col" }, title)));
    const rows = slow.map((one) =>
      h("tr", {}, h("td", {}, `rank ${one.rank}`), h("td", {}, one.host), [duration(one.seconds), percent(one.share), count(one.since)].map((text) => h("td", { class: "number" }, text))),
    );
    return replace(this.slow, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }

  point(event) {
    const { ranks, steps, step_s: stepTimes, hosts } = this.map;
    const box = this.canvas.getBoundingClientRect();
    const place = (position, length, many) => Math.min(many - 1, Math.max(0, Math.floor((position / length) * many)));
    const column = place(event.clientX - box.left, box.width, steps.length);
    const rank = this.slowestIn(place(event.clientY - box.top, box.height, this.rows), column);
    const share = this.cells[column * ranks + rank] / 255;
    const host = hosts[rank] ? ` on ${hosts[rank]}` : "";
    this.under.textContent = `rank ${rank}${host}, step ${count(steps[column])}: ${duration(share * stepTimes[column])} behind the others, ${percent(share)} of a step`;
  }
}

// From the paper over amber to red.
function makePalette() {
  const stops = ["grid", "c2", "bad"].map((name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number));
  return Array.from({ length: 256 }, (_, value) => {
    const heat = Math.min(1, value / 255 / HOT);
    const [from, to, share] = heat < 0.5 ? [stops[0], stops[1], heat / 0.5] : [stops[1], stops[2], (heat - 0.5) / 0.5];
    return [...from.map((part, index) => Math.round(part + (to[index] - part) * share)), 255];
  });
}
