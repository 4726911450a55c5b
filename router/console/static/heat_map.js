// The heat map of workers: a row per worker, a column per ten seconds, and the same as a table.
import { byId, DASH, el, keyed, row, say, seconds, set, share } from "./view.js";

const KEPT_S = 600;
const TABLE_S = 60;
const MEASURES = {
  batch: { place: 1, show: share, most: 1 },
  kv: { place: 2, show: share, most: 1 },
  step: { place: 3, show: (ms) => (ms ? seconds(ms / 1000) : DASH), most: null },
};
const LABELS = 92; // width of the names, in pixels
const AXIS = 18;
const FONT = "11.5px system-ui, sans-serif";

export class HeatMap {
  constructor(workers) {
    this.workers = workers;
    this.columns = [];
    this.columnS = 10;
    this.snapshot = null;
    this.canvas = byId("heat");
    this.details = byId("heat-details");
    for (const input of document.querySelectorAll("input[name=heat]")) input.addEventListener("change", () => this.draw());
    this.details.addEventListener("toggle", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => say(byId("heat-value"), ""));
  }

  /** Replaces the history with the router's. */
  restore({ columns, column_s: columnS }) {
    this.columnS = columnS;
    this.columns = columns.map(({ at, workers }) => ({ at, cells: new Map(Object.entries(workers)) }));
  }

  show(snapshot) {
    this.snapshot = snapshot;
    const at = snapshot.at - (snapshot.at % this.columnS);
    if (!this.columns.length || at > this.columns.at(-1).at) this.columns.push({ at, cells: new Map() });
    while (at - this.columns[0].at >= KEPT_S) this.columns.shift();
    const { cells } = this.columns.at(-1);
    for (const one of snapshot.workers) {
      const [count, ...means] = cells.get(one.slot) ?? [0, 0, 0, 0];
      const now = [one.batch_fill, one.used_blocks / (one.total_blocks || 1), one.step_ms];
      cells.set(one.slot, [count + 1, ...means.map((mean, n) => mean + (now[n] - mean) / (count + 1))]);
    }
    this.draw();
  }

  /** Names of the workers that have a row. Those that have gone are last, unless there is a filter. */
  #names() {
    const present = this.workers.chosen(this.snapshot).map((one) => one.slot);
    if (this.workers.isFiltered) return present;
    const names = new Set(present);
    for (const { cells } of this.columns) for (const name of cells.keys()) names.add(name);
    return [...names];
  }

  draw() {
    if (!this.snapshot) return;
    const measure = MEASURES[document.querySelector("input[name=heat]:checked").value];
    const names = this.#names();
    const values = this.columns.flatMap(({ cells }) => names.map((name) => cells.get(name)?.[measure.place] ?? 0));
    const most = measure.most ?? Math.max(...values, 1e-9);
    this.drawn = { names, measure, most };
    say(byId("heat-most"), measure.show(most));
    set(this.canvas, "aria-label", `${names.length} workers, ${Math.round((this.columns.length * this.columnS) / 60)} minutes; the table below has the same data`);
    this.#paint();
    if (this.details.open) this.#table();
  }

  #paint() {
    const { names, measure, most } = this.drawn;
    const height = names.length > 96 ? 4 : names.length > 32 ? 8 : 16;
    const width = this.canvas.parentElement.clientWidth;
    const scale = devicePixelRatio || 1;
    const size = [Math.round(width * scale), Math.round((names.length * height + AXIS) * scale)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) [this.canvas.width, this.canvas.height] = size;
    this.canvas.style.height = `${names.length * height + AXIS}px`;
    const style = getComputedStyle(this.canvas);
    const ink = this.canvas.getContext("2d");
    ink.setTransform(scale, 0, 0, scale, 0, 0);
    ink.clearRect(0, 0, width, names.length * height + AXIS);
    const columns = Math.round(KEPT_S / this.columnS);
    const step = (width - LABELS) / columns;
    const end = this.columns.at(-1).at;
    this.layout = { height, step, end, columns };
    const gap = height > 4 ? 1 : 0;
    ink.fillStyle = style.getPropertyValue("--used");
    for (const { at, cells } of this.columns) {
      const x = LABELS + (columns - 1 - Math.round((end - at) / this.columnS)) * step;
      names.forEach((name, place) => {
        const value = cells.get(name)?.[measure.place];
        if (value === undefined) return;
        ink.globalAlpha = 0.07 + 0.93 * Math.min(1, value / most);
        ink.fillRect(x, place * height, step - gap, height - gap);
      });
    }
    ink.globalAlpha = 1;
    ink.fillStyle = style.getPropertyValue("--muted");
    ink.font = FONT;
    ink.textBaseline = "middle";
    let free = 0;
    names.forEach((name, place) => {
      const y = (place + 0.5) * height;
      if (y < free) return; // names are not drawn over one another
      free = y + 13;
      ink.fillText(name.length > 13 ? `${name.slice(0, 12)}…` : name, 0, Math.max(y, 7));
    });
    ink.textBaseline = "bottom";
    const bottom = names.length * height + AXIS;
    for (const minutes of [10, 8, 6, 4, 2]) ink.fillText(`-${minutes} min`, LABELS + (1 - minutes / 10) * (width - LABELS), bottom);
  }

  /** Tells the value under the pointer. */
  #point({ offsetX, offsetY }) {
    if (!this.drawn) return;
    const { height, step, end, columns } = this.layout;
    const name = this.drawn.names[Math.floor(offsetY / height)];
    const place = Math.floor((offsetX - LABELS) / step);
    const at = end - (columns - 1 - place) * this.columnS;
    const cell = this.columns.find((one) => Math.abs(one.at - at) < this.columnS / 2)?.cells.get(name);
    say(byId("heat-value"), cell ? `${name}, ${clock(at)}: ${this.drawn.measure.show(cell[this.drawn.measure.place])}` : "");
  }

  #table() {
    const { names, measure } = this.drawn;
    const minutes = new Map();
    for (const { at, cells } of this.columns) {
      const minute = Math.floor(at / TABLE_S) * TABLE_S;
      if (!minutes.has(minute)) minutes.set(minute, []);
      minutes.get(minute).push(cells);
    }
    const shown = [...minutes.keys()].reverse();
    byId("heat-head").replaceChildren(
      el("th", { scope: "col" }, "Worker"),
      ...shown.map((minute) => el("th", { scope: "col", class: "number" }, clock(minute).slice(0, 5))),
    );
    const told = names.map((name) => ({ name, means: shown.map((minute) => mean(minutes.get(minute), name, measure)) }));
    keyed(byId("heat-rows"), told, ({ name }) => name, ({ name }) => {
      const node = row(name);
      return {
        node,
        update: ({ means }) => {
          while (node.cells.length > means.length + 1) node.lastElementChild.remove();
          while (node.cells.length < means.length + 1) node.append(el("td", { class: "number" }));
          means.forEach((value, n) => say(node.cells[n + 1], value));
        },
      };
    });
  }
}

function mean(columns, name, { place, show }) {
  const cells = columns.map((cells) => cells.get(name)).filter(Boolean);
  const samples = cells.reduce((sum, cell) => sum + cell[0], 0);
  return samples ? show(cells.reduce((sum, cell) => sum + cell[0] * cell[place], 0) / samples) : DASH;
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
