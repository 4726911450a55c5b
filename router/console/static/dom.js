// Makes and changes elements. Text goes in as text alone: nothing here reads HTML.
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

/** Sets a text, and leaves the node alone where it has it: selections and screen readers stay. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

const kept = new WeakMap();

/** Children of `parent` for `items`, kept by key: `make(item)` gives {node, update(item)}. */
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
