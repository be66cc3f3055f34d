// Formats numbers, and draws pictures as SVG. The page allows no inline style, so SVG has attributes.

const SVG = "http://www.w3.org/2000/svg";

// Creates an element: svg("rect", {x, y, width, height, class: "prefill"}, …children). A child that
// is a string becomes a text node.
export function svg(name, properties = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.startsWith("data-")) node.setAttribute(key, value);
    else node.setAttribute(key, typeof value === "number" ? round(value) : value);
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

const round = (value) => Math.round(value * 100) / 100;

// A picture with a description for screen readers.
export function picture(label, width, height, ...children) {
  return svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "picture",
    preserveAspectRatio: "xMidYMid meet",
  }, ...children);
}

const SCALES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// 1234567 → "1.23 M"
export function short(value, unit = "") {
  if (!Number.isFinite(value)) return "–";
  const [scale, prefix] = SCALES.find(([one]) => Math.abs(value) >= one) ?? [1, ""];
  return `${figure(value / scale)} ${prefix}${unit}`.trim();
}

export const bytes = (value) => short(value, "B");

// Formats a number with three significant digits: 0.0123, 1.23, 12.3, 123
export function figure(value) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= 3) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.min(6, Math.max(0, 2 - size)));
}

// Seconds → "850 ms", "12.3 s", "4.1 min"
export function time(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds >= 120) return `${figure(seconds / 60)} min`;
  if (seconds >= 1) return `${figure(seconds)} s`;
  if (seconds >= 1e-3) return `${figure(seconds * 1e3)} ms`;
  return `${figure(seconds * 1e6)} µs`;
}

export const percent = (share) => `${figure(100 * share)} %`;
export const count = (value) => Math.round(value).toLocaleString("en");
// Returns the text of a token with visible spaces and line ends.
export const visible = (text) => (text ?? "").replace(/\n/g, "↵").replace(/ /g, "␣") || "∅";
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

// Returns the values of a logarithmic slider: powers of two, and the middle between each two of them.
export function logStops(low, high) {
  const found = [];
  for (let value = 1; value <= high; value *= 2) found.push(value, value * 1.5);
  return found.filter((one) => Number.isInteger(one) && one >= low && one <= high);
}
