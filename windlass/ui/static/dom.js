// Elements made from values. Text goes in as text: nothing here parses HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat(Infinity));
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

// Writes only what differs: a page that is left open should not flicker, or move what somebody has selected.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let probe;
// A colour of the style sheet as a canvas takes it, in the theme of now.
export function colour(name, alpha = 1) {
  if (!probe) {
    probe = h("span", { hidden: true });
    document.body.append(probe);
  }
  probe.style.color = `var(--${name})`;
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g);
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

export function stateMark(state) {
  return h("span", { class: "state", data: { state } }, state);
}

export function runLink(id, text = id) {
  return h("a", { href: `/run?id=${encodeURIComponent(id)}` }, text);
}
