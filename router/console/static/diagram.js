// The diagram: prefill workers on the left, decode workers on the right, KV transfers between them.
import { byId, bytes, count, el, keyed, row, say, set, svg } from "./view.js";

const MOST = 16;
const WIDTH = 720;
const NODE = { width: 176, height: 34, gap: 12, top: 30 };
const DOT_MS = 900;
const DOTS = 3;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Diagram {
  constructor() {
    this.svg = byId("diagram");
    this.heads = svg("g", { class: "heads" });
    this.edges = svg("g", { class: "edges" });
    this.dots = svg("g", { class: "dots" });
    this.nodes = svg("g", { class: "nodes" });
    this.svg.append(this.heads, this.edges, this.dots, this.nodes);
    for (const [name, x] of [["prefill", 4], ["decode", WIDTH - NODE.width - 4]]) {
      const text = svg("text", { x, y: 18, class: `role ${name}` });
      this.heads.append(text);
      this[`${name}Head`] = text;
    }
  }

  show(snapshot) {
    const columns = this.#columns(snapshot);
    const tallest = Math.max(columns.prefill.length, columns.decode.length, 4);
    const height = NODE.top + tallest * (NODE.height + NODE.gap) + 4;
    set(this.svg, "viewBox", `0 0 ${WIDTH} ${height}`);
    const places = new Map();
    for (const [role, workers] of Object.entries(columns)) {
      const room = height - NODE.top;
      const step = Math.min(room / Math.max(workers.length, 1), 72);
      const start = NODE.top + (room - step * workers.length) / 2;
      workers.forEach((worker, n) =>
        places.set(worker.slot, { worker, role, x: role === "prefill" ? 4 : WIDTH - NODE.width - 4, y: start + n * step + (step - NODE.height) / 2 }),
      );
    }
    this.#nodes([...places.values()]);
    const shown = snapshot.transfers.filter((one) => places.has(one.writer) && places.has(one.receiver));
    this.places = places;
    this.#edges(shown);
    this.#table(snapshot.transfers);
    this.#say(snapshot, columns);
  }

  /** Selects the workers of each role; if there are more than MOST, the busiest. */
  #columns(snapshot) {
    const columns = {};
    for (const role of ["prefill", "decode"]) {
      const every = snapshot.workers.filter((worker) => worker.role === role);
      const busy = (worker) => worker.running + worker.waiting;
      const kept = new Set([...every].sort((a, b) => busy(b) - busy(a)).slice(0, MOST));
      columns[role] = every.filter((worker) => kept.has(worker));
      const more = every.length > MOST ? `, the ${MOST} busiest` : "";
      say(this[`${role}Head`], `${role} · ${count(every.length)}${more}`);
    }
    return columns;
  }

  #nodes(places) {
    keyed(this.nodes, places, ({ worker, role }) => `${worker.slot} ${role}`, ({ role }) => {
      const box = svg("rect", { class: "box", width: NODE.width, height: NODE.height, rx: 6 });
      const track = svg("rect", { class: "track", x: 10, y: 23, width: NODE.width - 20, height: 4, rx: 2 });
      const fill = svg("rect", { class: "fill", x: 10, y: 23, height: 4, rx: 2 });
      const name = svg("text", { x: 10, y: 16 });
      const load = svg("text", { x: NODE.width - 10, y: 16, class: "load" });
      const node = svg("g", { class: role }, box, track, fill, name, load);
      return {
        node,
        update: ({ worker, x, y }) => {
          set(node, "transform", `translate(${x} ${y.toFixed(1)})`);
          set(node, "data-state", worker.state);
          say(name, worker.slot.length > 14 ? `${worker.slot.slice(0, 13)}…` : worker.slot);
          say(load, worker.state === "ready" ? `${worker.running} / ${worker.max_sequences}` : worker.state);
          set(fill, "width", Math.round((NODE.width - 20) * Math.min(1, worker.running / (worker.max_sequences || 1))));
        },
      };
    });
  }

  #edges(transfers) {
    // A field, like `places`: the closure of a row keeps the snapshot that created it.
    this.most = Math.max(...transfers.map((one) => one.bytes_per_s), 1);
    keyed(this.edges, transfers, (one) => `${one.writer} ${one.receiver}`, () => {
      const node = svg("path", { class: "edge" });
      return {
        node,
        update: (one) => {
          set(node, "d", between(this.places.get(one.writer), this.places.get(one.receiver)));
          set(node, "class", one.bytes_per_s > 0 ? "edge busy" : "edge");
          set(node, "stroke-width", one.bytes_per_s > 0 ? (1.5 + 3.5 * Math.sqrt(one.bytes_per_s / this.most)).toFixed(1) : 1);
          if (one.moved && !still.matches && !document.hidden) this.#move(node);
        },
      };
    });
  }

  /** Moves dots along an edge, for the bytes received since the last snapshot. */
  #move(path) {
    const length = path.getTotalLength();
    for (let n = 0; n < DOTS; n += 1) {
      const dot = svg("circle", { r: 3.2, class: "dot" });
      const begin = performance.now() + n * 180;
      const step = (now) => {
        const part = (now - begin) / DOT_MS;
        if (part >= 1) {
          dot.remove();
          return;
        }
        if (part >= 0) {
          if (!dot.isConnected) this.dots.append(dot);
          const { x, y } = path.getPointAtLength(part * length);
          set(dot, "cx", x.toFixed(1));
          set(dot, "cy", y.toFixed(1));
        }
        requestAnimationFrame(step);
      };
      requestAnimationFrame(step);
    }
  }

  #table(transfers) {
    keyed(byId("transfer-rows"), transfers, (one) => `${one.writer} ${one.receiver}`, (first) => {
      const transport = el("td");
      const speed = el("td", { class: "number" });
      return {
        node: row(first.writer, el("td", {}, first.receiver), transport, speed),
        update: (one) => {
          say(transport, one.transport);
          say(speed, `${bytes(one.bytes_per_s)}/s`);
        },
      };
    });
  }

  #say(snapshot, columns) {
    const { handoffs, transfers } = snapshot;
    const text = `${columns.prefill.length} prefill and ${columns.decode.length} decode workers, ${transfers.length} pairs, ${bytes(handoffs.bytes_per_s)} of KV per second`;
    set(this.svg, "aria-label", text);
    const missing = snapshot.pages_missing ? `; ${snapshot.pages_missing} workers sent no figures` : "";
    say(byId("transfers-note"), `${bytes(handoffs.bytes_per_s)}/s of KV${missing}`);
  }
}

function between(from, to) {
  const y1 = from.y + NODE.height / 2;
  const y2 = to.y + NODE.height / 2;
  if (from.x === to.x) {
    // Within a column, KV moves by a fetch of cached blocks.
    const side = from.role === "prefill" ? from.x + NODE.width : from.x;
    const bend = from.role === "prefill" ? side + 60 : side - 60;
    return `M ${side} ${y1} C ${bend} ${y1} ${bend} ${y2} ${side} ${y2}`;
  }
  const leftwards = from.x > to.x;
  const x1 = leftwards ? from.x : from.x + NODE.width;
  const x2 = leftwards ? to.x + NODE.width : to.x;
  const middle = (x1 + x2) / 2;
  return `M ${x1} ${y1} C ${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}
