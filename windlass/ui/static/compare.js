// Several runs: their curves over each other, the settings in which they differ, and what each came to.

import { get, throttled, watch } from "./api.js";
import { Charts, runColour, swatch } from "./charts.js";
import { h, replace, runLink, stateMark } from "./dom.js";
import { count, number } from "./format.js";
import { differenceTable } from "./runfile.js";

export const MOST_COMPARED = 16; // by the server, too
const RESULTS = [
  ["Steps", (summary) => count(summary.steps)],
  ["Loss", (summary) => number(summary.loss)],
  ["Validation loss", (summary) => number(summary.validation_loss)],
  ["Tokens/s", (summary) => count(summary.tokens_per_s)],
  ["Restarts", (summary) => String(summary.restarts)],
];

export async function showComparison(main, picked) {
  if (picked.length < 2) throw new Error("Pick at least two runs in the list.");
  const ids = picked.slice(0, MOST_COMPARED);
  document.title = "Compare · windlass";
  document.getElementById("crumbs").textContent = ids.join(", ");
  const charts = new Charts(ids);
  const legend = h("ul", { class: "legend" });
  const results = h("div", { class: "card scroll", tabindex: "0", role: "group", "aria-label": "Results" });
  const settings = h("div", { class: "card" });
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, ids.length < picked.length ? `The first ${ids.length} of ${picked.length} runs` : `${ids.length} runs`)),
    legend,
    h("section", { "aria-label": "Curves" }, charts.element),
    h("section", { "aria-label": "Results" }, h("div", { class: "bar" }, h("h2", {}, "Results")), results),
    h("section", { "aria-label": "Settings" }, h("div", { class: "bar" }, h("h2", {}, "Settings that differ")), settings),
  );
  const states = new Map();
  const showLegend = () => {
    replace(legend, ids.map((id, index) => h("li", {}, swatch(runColour(index)), runLink(id), states.has(id) ? stateMark(states.get(id)) : null)));
  };
  const load = async () => {
    const [comparison] = await Promise.all([get("compare", { id: ids }), charts.load()]);
    replace(results, resultTable(ids, comparison.summaries));
    replace(settings, differenceTable(comparison.settings, ids));
  };
  showLegend();
  await load();
  const refresh = throttled(load, 2000);
  watch(ids, (changed) => {
    for (const [key, row] of Object.entries(changed)) if (key.startsWith("row ")) states.set(key.slice(4), row?.state ?? "gone");
    showLegend();
    refresh();
  });
}

function resultTable(ids, summaries) {
  const losses = summaries.map((summary) => summary.validation_loss ?? summary.loss ?? Infinity);
  const best = losses.indexOf(Math.min(...losses));
  const head = h("tr", {}, h("th", { scope: "col" }, "Run"), RESULTS.map(([name]) => h("th", { class: "number", scope: "col" }, name)));
  const rows = ids.map((id, index) =>
    h("tr", {}, h("td", {}, swatch(runColour(index)), " ", runLink(id), index === best ? h("span", { class: "soft" }, " lowest loss") : null), RESULTS.map(([, text]) => h("td", { class: "number" }, text(summaries[index])))),
  );
  return h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
}
