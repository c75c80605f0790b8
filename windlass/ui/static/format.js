// Numbers and times as people read them. A dash stands for what is not known.

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function short(value) {
  if (!known(value)) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    const scale = letter === "k" ? 1e3 : size;
    if (Math.abs(value) >= size) return `${Number((value / scale).toPrecision(3))}${letter}`;
  }
  return number(value, 3);
}

export function percent(value) {
  return known(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : "–";
}

export function dollars(value) {
  return known(value) ? `$${value < 100 ? value.toFixed(2) : count(value)}` : "–";
}

export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) (value /= 1024), unit++;
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds && seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return parts(seconds, 60, "min", "s");
  if (seconds < 86400) return parts(seconds / 60, 60, "h", "min");
  return parts(seconds / 3600, 24, "d", "h");
}

function parts(value, size, large, small) {
  const rest = Math.floor(value % size);
  return `${Math.floor(value / size)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

export function moment(seconds) {
  if (!known(seconds)) return "–";
  const date = new Date(seconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// The labels of an axis: as many decimals as tell them apart, and one unit for all of them.
export function plainTicks(values, step) {
  const largest = Math.max(...values.map(Math.abs));
  if (largest && (largest < 1e-2 || largest >= 1e7)) return values.map((value) => (value ? value.toExponential(decimals(step / 10 ** Math.floor(Math.log10(Math.abs(value))))).replace("e+", "e") : "0"));
  if (largest >= 1e4 && step >= 1) return values.map(short);
  return values.map((value) => value.toLocaleString("en", fixed(step)));
}

export function percentTicks(values, step) {
  return values.map((value) => `${(100 * value).toFixed(decimals(100 * step))} %`);
}

export function secondTicks(values, step) {
  const largest = Math.max(...values);
  const [unit, scale] = largest < 1e-3 ? ["µs", 1e6] : largest < 1 ? ["ms", 1e3] : ["s", 1];
  return values.map((value) => `${(value * scale).toLocaleString("en", fixed(step * scale))} ${unit}`);
}

export function gibTicks(values, step) {
  return values.map((value) => `${value.toLocaleString("en", fixed(step))} GiB`);
}

// The decimals that a step between labels has: two of 0.25, none of 50.
function decimals(step) {
  for (let digits = 0; digits < 9; digits++) {
    const scaled = step * 10 ** digits;
    if (Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled) return digits;
  }
  return 9;
}

function fixed(step) {
  const digits = decimals(step);
  return { minimumFractionDigits: digits, maximumFractionDigits: digits };
}

export function clock(seconds) {
  return moment(seconds).slice(11) || "–";
}

export function ago(seconds) {
  if (!known(seconds)) return "–";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 60) return "just now";
  return `${duration(past).replace(/^(\d+ (?:d|h|min)) .*/, "$1")} ago`;
}
