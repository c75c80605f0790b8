// One run: where it stands, why it failed, its curves, ranks, time line, logs and run file.

import { get, throttled, watch } from "./api.js";
import { Charts } from "./charts.js";
import { h, replace, setText, stateMark } from "./dom.js";
import { ago, count, dollars, duration, number, percent, short } from "./format.js";
import { Logs } from "./logs.js";
import { Ranks } from "./ranks.js";
import { RunFile } from "./runfile.js";
import { Timeline } from "./timeline.js";

const UNDER_WAY = ["running", "waiting"];
const ALWAYS = ["Step", "Loss", "Tokens/s", "Started"]; // others are shown where they are known
const FACTS = [
  ["Step", (row) => (row.step === null || row.step === undefined ? "–" : `${brief(row.step)} / ${brief(row.steps)}`)],
  ["Left", (row) => duration(row.eta)],
  ["Took", (row, detail) => (UNDER_WAY.includes(row.state) ? "–" : duration(took(detail.attempts)))],
  ["Loss", (row) => number(row.loss)],
  ["Tokens/s", (row) => count(row.tokens_per_s), "the median of the newest 20 steps"],
  ["MFU", (row) => percent(row.mfu)],
  ["Goodput", (row) => percent(row.goodput), "time training ÷ time paid"],
  ["Attempt", (row) => row.attempt ?? "–"],
  ["Cost so far", (row) => dollars(row.cost_usd), "at on-demand prices"],
  ["Started", (row) => ago(row.started)],
];

function took(attempts) {
  const last = attempts?.at(-1);
  return last?.ended ? last.ended - attempts[0].began : null;
}

function brief(value) {
  return value >= 100000 ? short(value) : count(value);
}

export async function showRun(main, id) {
  const detail = await get("run", { id });
  const page = new RunPage(main, id, detail);
  await page.begin();
}

class RunPage {
  constructor(main, id, detail) {
    this.main = main;
    this.id = id;
    this.detail = detail;
    this.heading = h("h1", {}, detail.row.name);
    this.state = h("span", {});
    this.reason = h("p", { class: "soft" });
    this.facts = h("dl", { class: "facts" });
    this.progress = h("progress", { max: 1, value: 0 });
    this.verdict = h("div", { role: "region", "aria-label": "Why it failed", "aria-live": "polite" });
    document.title = `${detail.row.name} · windlass`;
    document.getElementById("crumbs").textContent = detail.row.name;
  }

  async begin() {
    const parts = [h("div", { class: "bar" }, this.heading, this.state), this.progress, this.reason, this.facts, this.verdict];
    if (!this.detail.row.folder) {
      replace(this.main, parts, this.elsewhere());
      this.showRow();
      watch([this.id], (changed) => this.change(changed));
      return;
    }
    this.charts = new Charts([this.id]);
    this.ranks = new Ranks(this.id);
    this.timeline = new Timeline();
    this.logs = new Logs(this.id);
    this.file = new RunFile(this.id);
    const sections = [
      ["curves", "Curves", this.charts.element],
      ["ranks", "Ranks", this.ranks.element],
      ["timeline", "Time line", this.timeline.element],
      ["logs", "Logs", this.logs.element],
      ["file", "Run file", this.file.element],
    ];
    const jump = h("nav", { class: "jump", "aria-label": "On this page" }, sections.map(([name, title]) => h("a", { href: `#${name}` }, title)));
    replace(this.main, parts, jump, sections.map(([name, title, element]) => h("section", { id: name, "aria-label": title }, element)));
    this.showRow();
    this.refresh = throttled(() => this.load());
    const curves = this.charts.load();
    this.showDetail();
    await curves;
    await Promise.all([this.logs.load(), this.file.load()]);
    watch([this.id], (changed) => this.change(changed));
  }

  elsewhere() {
    if (this.detail.row.target === "–") return h("div", { class: "card empty" }, "The folder of this run is not read.");
    const command = `windlass logs ${this.detail.row.name} --on ${this.detail.row.target} --follow`;
    return h("div", { class: "card empty" }, "This run has no folder on this machine. Following it brings its numbers here:", h("br"), h("pre", {}, command));
  }

  change(changed) {
    const row = changed[`row ${this.id}`];
    if (row) {
      this.detail.row = row;
      this.showRow();
    }
    if (row === null) {
      setText(this.reason, "The folder of this run is gone. What is shown was read before.");
      this.reason.hidden = false;
      return;
    }
    const view = changed[`view ${this.id}`];
    if (view ? view.version !== this.detail.version || view.complete !== this.detail.complete : row) this.refresh?.();
    const size = changed[`logs ${this.id}`];
    if (size !== undefined && size !== this.logs?.size) this.logs?.grow();
  }

  async load() {
    const [detail] = await Promise.all([get("run", { id: this.id }), this.charts.load()]);
    this.detail = detail;
    this.showRow();
    this.showDetail();
  }

  showDetail() {
    this.timeline.show(this.detail);
    const isAlone = this.detail.attempts.at(-1)?.ranks === 1; // nobody to compare it with
    for (const element of [document.getElementById("ranks"), document.querySelector('.jump a[href="#ranks"]')]) element.hidden = isAlone;
    if (!isAlone) this.ranks.load();
    this.showVerdict();
  }

  showRow() {
    const { row } = this.detail;
    if (this.state.textContent !== row.state) replace(this.state, stateMark(row.state));
    this.state.setAttribute("role", "status");
    setText(this.reason, row.reason ?? "");
    this.reason.hidden = !row.reason || row.state === "failed"; // then it stands with the verdict
    this.progress.max = row.steps || 1;
    this.progress.value = row.step ?? 0;
    this.progress.setAttribute("aria-label", `Step ${row.step ?? 0} of ${row.steps ?? "?"}`);
    if (!this.facts.children.length) {
      this.cells = FACTS.map(() => h("dd"));
      this.facts.append(...FACTS.map(([name, , hint], index) => h("div", { title: hint }, h("dt", {}, name), this.cells[index])));
    }
    FACTS.forEach(([name, text], index) => {
      const words = String(text(row, this.detail));
      setText(this.cells[index], words);
      this.cells[index].parentNode.hidden = words === "–" && !ALWAYS.includes(name);
    });
  }

  // As `windlass why` says it; asked for once for each failure.
  async showVerdict() {
    const { row } = this.detail;
    const failure = row.state === "failed" ? `${row.attempt} ${row.step}` : null;
    if (failure === this.judged) return;
    this.judged = failure;
    if (!failure) {
      replace(this.verdict);
      return;
    }
    const verdict = await get("verdict", { id: this.id }).catch((error) => ({ cause: error.message, evidence: [] }));
    replace(this.verdict, verdictCard(verdict, row.reason));
  }
}

function verdictCard(verdict, reason) {
  const places = new Map(); // by line: ranks that fail together say the same
  for (const one of verdict.evidence) {
    const source = one.rank === null || one.rank === undefined ? one.source : `rank ${one.rank}`;
    const place = [source, one.host, one.time].filter(Boolean).join(", ");
    places.set(one.line, [...(places.get(one.line) ?? []), place]);
  }
  const evidence = [...places].map(([line, where]) => h("div", {}, h("pre", {}, line), h("div", { class: "soft" }, where.join(" · "))));
  const sure = verdict.confidence >= 0.8 ? "sure" : verdict.confidence >= 0.5 ? "likely" : "perhaps";
  const rows = [
    ["What", reason],
    ["Cause", verdict.cause],
    ["Fix", verdict.fix ? h("pre", {}, verdict.fix) : null],
    ["Evidence", evidence.length ? evidence : null],
    ["How sure", verdict.confidence === undefined ? null : `${sure} (${percent(verdict.confidence)}): ${verdict.why}`],
  ];
  const list = rows.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  return h("div", { class: "card verdict" }, h("h2", {}, "Why it failed"), h("span", { class: "soft" }, verdict.class ? `class ${verdict.class}` : ""), h("dl", {}, list));
}
