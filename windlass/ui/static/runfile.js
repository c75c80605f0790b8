// The resolved run file, and in which settings it differs from another run's.

import { get } from "./api.js";
import { h, replace } from "./dom.js";

export class RunFile {
  constructor(id) {
    this.id = id;
    this.other = h("select", { onchange: () => this.load() }, h("option", { value: "" }, "no other run"));
    this.body = h("div", { class: "card" });
    this.unset = h("input", { type: "checkbox", onchange: () => this.load() });
    const bar = h("div", { class: "bar" }, h("h2", {}, "Run file"), h("label", {}, this.unset, "keys that are not set"), h("label", {}, "against", this.other));
    this.element = h("div", {}, bar, this.body);
  }

  async load() {
    if (this.other.options.length === 1) {
      const { runs } = await get("runs");
      const others = runs.filter((run) => run.folder && run.id !== this.id);
      this.other.append(...others.map((run) => h("option", { value: run.id }, run.name)));
    }
    const against = this.other.value;
    const { text, differences } = await get("runfile", { id: this.id, against: against || null });
    const shown = this.unset.checked ? text : text.replace(/^.*: null\n/gm, "");
    replace(this.body, against ? differenceTable(differences, [this.id, against]) : h("pre", { class: "file", tabindex: "0", role: "group", "aria-label": "The run file" }, shown));
  }
}

export function differenceTable(differences, names) {
  const keys = Object.keys(differences);
  if (!keys.length) return h("p", { class: "none" }, "The settings are the same.");
  const head = h("tr", {}, h("th", { scope: "col" }, "Setting"), names.map((name) => h("th", { scope: "col" }, name)));
  const rows = keys.map((key) => h("tr", {}, h("td", { class: "mono" }, key), differences[key].map((value) => h("td", { class: "mono" }, shown(value)))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Settings that differ" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return String(Number(value.toPrecision(6))); // 3e-5, not 0.000029999999999999997
  return typeof value === "string" ? value : JSON.stringify(value);
}
