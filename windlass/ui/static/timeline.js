// What happened: attempts as bars over time, saves and deaths as marks, and all of it in words.

import { h, replace, svg } from "./dom.js";
import { bytes, clock, count, duration, moment } from "./format.js";

const WIDTH = 1000;
const MOST_MARKS = 400;
const MOST_WORDS = 300;

export class Timeline {
  constructor() {
    this.track = h("div");
    this.list = h("ol", { class: "happened", tabindex: "0", "aria-label": "What happened, newest first" });
    this.saves = h("input", { type: "checkbox", onchange: () => this.showWords() });
    this.checkpoints = h("div", { class: "card scroll", tabindex: "0", role: "group", "aria-label": "Checkpoints" });
    const happened = h("div", { class: "card" }, this.track, this.list);
    const bar = h("div", { class: "bar" }, h("h2", {}, "Time line"), h("label", {}, this.saves, "with saves"));
    this.element = h("div", {}, bar, h("div", { class: "two" }, happened, this.checkpoints));
  }

  show(detail) {
    const version = JSON.stringify([detail.events.length, detail.attempts, detail.checkpoints, detail.row.state]);
    if (version === this.version && detail.row.state !== "running") return;
    this.detail = detail;
    this.drawTrack();
    if (version === this.version) return;
    this.version = version;
    this.showWords();
    this.showCheckpoints();
  }

  drawTrack() {
    const { attempts, events, row, time } = this.detail;
    if (!attempts.length) return replace(this.track, h("p", { class: "none" }, "Not started yet."));
    const isOver = !["running", "waiting"].includes(row.state);
    const first = attempts[0].began;
    const last = Math.max(first + 1, isOver ? Math.max(...attempts.map((one) => one.ended ?? one.began)) : time);
    const place = (when) => ((when - first) / (last - first)) * WIDTH;
    const failed = row.state === "failed";
    const bars = attempts.map((one, index) => {
      const begin = place(one.began);
      const width = Math.max(3, place(one.ended ?? last) - begin);
      const bad = one.ended && (index < attempts.length - 1 || failed);
      const words = `Attempt ${one.attempt}: ${duration((one.ended ?? last) - one.began)} from ${moment(one.began)}`;
      const label = width > 70 ? svg("text", { x: begin + 8, y: 37, class: "inside" }, `attempt ${one.attempt}`) : [];
      return svg("g", {}, svg("rect", { x: begin, y: 22, width, height: 22, rx: 4, class: bad ? "attempt bad" : "attempt" }, svg("title", {}, words)), label);
    });
    const marks = events
      .filter((one) => one.time && (one.tone === "save" || one.tone === "bad"))
      .slice(-MOST_MARKS)
      .map((one) => svg("line", { x1: place(one.time), x2: place(one.time), y1: one.tone === "bad" ? 14 : 48, y2: one.tone === "bad" ? 52 : 56, class: one.tone }, svg("title", {}, `${moment(one.time)}  ${one.text}`)));
    const words = `${attempts.length} ${attempts.length === 1 ? "attempt" : "attempts"} in ${duration(last - first)}`;
    const ends = [svg("text", { x: 0, y: 72 }, moment(first)), svg("text", { x: WIDTH, y: 72, "text-anchor": "end" }, isOver ? moment(last) : "now")];
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} 78`, class: "track", role: "img", "aria-label": words, preserveAspectRatio: "none" }, bars, marks, ends);
    this.fitText(picture);
    return replace(this.track, picture);
  }

  // The picture is stretched to its place; its words are not.
  fitText(picture) {
    requestAnimationFrame(() => {
      const stretch = picture.getBoundingClientRect().width / WIDTH || 1;
      for (const text of picture.querySelectorAll("text")) {
        const x = Number(text.getAttribute("x"));
        text.setAttribute("transform", `translate(${x} 0) scale(${1 / stretch} 1) translate(${-x} 0)`);
      }
    });
  }

  showWords() {
    const events = this.detail.events.filter((one) => this.saves.checked || one.tone !== "save");
    const rows = events.slice(-MOST_WORDS).reverse();
    const days = new Set(rows.map((one) => moment(one.time).slice(0, 10)));
    const shown = days.size > 1 ? moment : clock; // the day stands below the bars, too
    replace(this.list, rows.map((one) => h("li", { data: { tone: one.tone } }, h("time", { title: moment(one.time) }, shown(one.time)), h("span", {}, one.text))));
  }

  showCheckpoints() {
    const { checkpoints } = this.detail;
    if (!checkpoints.length) return replace(this.checkpoints, h("h3", {}, "Checkpoints"), h("p", { class: "none" }, "None in the run folder yet."));
    const head = h("tr", {}, ["Step", "Tier", "Size", "State"].map((title, index) => h("th", { class: index % 2 ? null : "number", scope: "col" }, title)));
    const rows = checkpoints.map((one) =>
      h("tr", {}, h("td", { class: "number" }, count(one.step)), h("td", {}, one.tier), h("td", { class: "number" }, bytes(one.bytes)), h("td", {}, one.complete ? "complete" : h("span", { class: "soft" }, "not complete"))),
    );
    return replace(this.checkpoints, h("h3", {}, "Checkpoints"), h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }
}
