// Creates and changes elements, and formats numbers.

// Text is inserted as text only: nothing here parses HTML.
const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Sets a text only if it differs, so that selections stay and screen readers do not repeat it. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

const kept = new WeakMap();

/** Keeps a child of `parent` for each item, by key; `make(item)` returns {node, update(item)}. */
export function keyed(parent, items, keyOf, make) {
  if (!kept.has(parent)) kept.set(parent, new Map());
  const rows = kept.get(parent);
  const gone = new Set(rows.keys());
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    gone.delete(key);
    if (!rows.has(key)) rows.set(key, make(item));
    const row = rows.get(key);
    row.update(item);
    const place = before === null ? parent.firstElementChild : before.nextElementSibling;
    if (place !== row.node) parent.insertBefore(row.node, place);
    before = row.node;
  }
  for (const key of gone) {
    rows.get(key).node.remove();
    rows.delete(key);
  }
}

/** A row of a table whose first cell is its header; `cells` are the others. */
export function row(head, ...cells) {
  return el("tr", {}, el("th", { scope: "row" }, head), ...cells);
}

// Formats numbers for people. An unknown number is a dash.
export const DASH = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : DASH;
}

export function rate(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(value < 0.095 ? 2 : 1);
  return value < 10000 ? count(value) : `${(value / 1000).toFixed(value < 99950 ? 1 : 0)}k`;
}

/** Dollars with three significant digits. */
export function dollars(amount) {
  if (!known(amount)) return DASH;
  return `$${amount === 0 ? 0 : Number(amount.toPrecision(3))}`;
}

export function share(value) {
  if (!known(value)) return DASH;
  const percent = value * 100;
  return `${percent > 99 && percent < 100 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (!known(value)) return DASH;
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 9.95 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}
