// Which page this is, and what all pages share.

import { h, replace } from "./dom.js";

const PAGES = {
  "/": async (main) => (await import("./list.js")).showList(main),
  "/run": async (main, query) => (await import("./run.js")).showRun(main, query.get("id") ?? ""),
  "/compare": async (main, query) => (await import("./compare.js")).showComparison(main, query.getAll("id")),
};

const THEMES = ["", "light", "dark"];

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const button = document.getElementById("theme");
  const name = theme || "as the system";
  button.title = `Colours: ${name}`;
  button.setAttribute("aria-label", `Colours: ${name}. Change`);
  document.dispatchEvent(new Event("windlass-theme"));
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
  localStorage.setItem("windlass-theme", theme);
  setTheme(theme);
}

setTheme(localStorage.getItem("windlass-theme") ?? "");
document.getElementById("theme").addEventListener("click", nextTheme);

const main = document.getElementById("main");
const query = new URLSearchParams(location.search);
try {
  await (PAGES[location.pathname] ?? PAGES["/"])(main, query);
} catch (error) {
  replace(main, h("div", { class: "card empty", role: "alert" }, h("p", {}, error.message), h("a", { href: "/" }, "All runs")));
}
document.documentElement.dataset.ready = "true";
