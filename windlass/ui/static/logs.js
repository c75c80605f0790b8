// The logs of all ranks as one, or of one rank; searched on the server.

import { get, throttled } from "./api.js";
import { h, replace } from "./dom.js";
import { count } from "./format.js";

export class Logs {
  constructor(id) {
    this.id = id;
    this.list = h("ol", { class: "log", tabindex: "0", "aria-label": "Log lines" });
    this.source = h("select", { onchange: () => this.load() }, h("option", { value: "" }, "all ranks"));
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search in logs" });
    this.follow = h("input", { type: "checkbox", checked: true });
    this.note = h("p", { class: "none", role: "status" });
    let typing;
    this.search.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.load(), 250);
    });
    this.grow = throttled(() => (this.follow.checked ? this.load() : null), 1500);
    const bar = h("div", { class: "bar" }, h("h2", {}, "Logs"), h("label", {}, "of", this.source), this.search, h("label", {}, this.follow, "follow"));
    this.element = h("div", {}, bar, this.list, this.note);
  }

  async load() {
    const asked = (this.asked = Symbol("newest"));
    const words = this.search.value.trim();
    const { lines, sources, cut, size } = await get("logs", { id: this.id, source: this.source.value || null, search: words || null });
    if (this.asked !== asked) return;
    this.size = size;
    this.showSources(sources);
    replace(this.list, lines.map((line) => lineOf(line, words)));
    const older = cut ? " Older ones are in the files of logs/." : "";
    this.note.textContent = lines.length ? `${count(lines.length)} ${lines.length === 1 ? "line" : "lines"}${words ? ` with “${words}”` : ""}.${older}` : words ? "No line has these words." : "Nothing was logged yet.";
    if (this.follow.checked && !words) this.list.scrollTop = this.list.scrollHeight;
  }

  showSources(sources) {
    const known = [...this.source.options].slice(1).map((option) => option.value);
    if (known.join() === sources.join()) return;
    const chosen = this.source.value;
    replace(this.source, h("option", { value: "" }, "all ranks"), sources.map((source) => h("option", { value: source }, source)));
    this.source.value = sources.includes(chosen) ? chosen : "";
  }
}

// The time and the rank that a line begins with have columns of their own.
const BEGINNING = /^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)\S* (?:rank \d+ )?/;

function lineOf({ source, text, tone }, words) {
  const [beginning, day, time] = text.match(BEGINNING) ?? ["", null, ""];
  return h("li", { data: { tone } }, h("time", { title: day }, time), h("span", {}, source), h("span", {}, marked(text.slice(beginning.length), words)));
}

function marked(text, words) {
  if (!words) return text;
  const parts = [];
  const low = text.toLowerCase();
  const wanted = words.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0 && parts.length < 100; at = low.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
