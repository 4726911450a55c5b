// Tiles at the top, each with a chart of its last ten minutes, and a table of their values.
import { byId, count, dollars, el, keyed, rate, row, say, seconds, set, share, svg } from "./view.js";

const KEPT_S = 600;
const POINT_S = 1.8; // a point is at least this long after the one before
const ROW_S = 30;
const WIDTH = 160;
const HEIGHT = 34;

const all = (snapshot) => snapshot.classes[0];

const TILES = [
  { name: "Requests", unit: "/s", figure: "requests_per_s", show: rate, more: (s) => `${count(s.traffic.active)} running` },
  { name: "Output tokens", unit: "/s", figure: "output_tokens_per_s", show: rate, more: (s) => `${rate(s.handoffs.per_s)} handoffs/s` },
  { name: "Prompt tokens", unit: "/s", figure: "prompt_tokens_per_s", show: rate, more: (s) => `${share(s.traffic.cached_share)} from cache` },
  { name: "TTFT p95", unit: "", figure: "ttft_p95_s", show: seconds, more: (s) => `p50 ${seconds(all(s).ttft.lately?.p50)}` },
  { name: "TPOT p95", unit: "", figure: "tpot_p95_s", show: seconds, more: (s) => `p50 ${seconds(all(s).tpot.lately?.p50)}` },
  { name: "Within SLO", unit: "", figure: "good_share", show: share, most: 1, more: (s) => `${rate(s.traffic.good_per_s)} good/s` },
  { name: "Waiting", unit: "", figure: "waiting", show: count, more: (s) => `${count(s.traffic.shed)} shed, ${count(s.traffic.failed)} failed` },
  { name: "Cost", unit: "/h", figure: "cost_per_hour", show: dollars, more: (s) => s.cost ? `${dollars(s.cost.per_request)}/request` : "no prices", tip: (s) => s.cost ? `Per million tokens: ${dollars(s.cost.per_million_input)} in, ${dollars(s.cost.per_million_output)} out` : "" },
];

export class Tiles {
  constructor() {
    this.history = [];
    for (const tile of TILES) {
      tile.value = el("span", { class: "value" });
      tile.note = el("span", { class: "note" });
      tile.line = svg("path", { class: "line" });
      tile.area = svg("path", { class: "area" });
      const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", preserveAspectRatio: "none" }, tile.area, tile.line);
      byId("tiles").append(
        el("div", { class: "tile card" }, el("h3", {}, tile.name), el("p", {}, tile.value, el("span", { class: "unit" }, tile.unit)), tile.note, chart),
      );
    }
    byId("history-head").append(
      el("th", { scope: "col" }, "Time"),
      ...TILES.map((tile) => el("th", { scope: "col", class: "number" }, tile.name + tile.unit)),
    );
  }

  /** Replaces the history with the router's, which is there from before the page was opened. */
  restore({ points }) {
    this.history = points;
  }

  show(snapshot) {
    const { at, figures } = snapshot;
    const last = this.history.at(-1);
    if (!last || at - last.at >= POINT_S) this.history.push({ at, ...figures });
    while (this.history[0].at < at - KEPT_S) this.history.shift();
    for (const tile of TILES) {
      say(tile.value, tile.show(figures[tile.figure]));
      say(tile.note, tile.more(snapshot));
      if (tile.tip) set(tile.note, "title", tile.tip(snapshot));
      this.#draw(tile, at);
    }
    this.#table();
  }

  #draw(tile, now) {
    const points = this.history
      .map((point) => ({ x: WIDTH * (1 - (now - point.at) / KEPT_S), value: point[tile.figure] }))
      .filter(({ value }) => value !== null);
    const most = tile.most ?? Math.max(...points.map(({ value }) => value), 1e-9) * 1.1;
    const path = points
      .map(({ x, value }) => `${x.toFixed(1)} ${(HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1)}`)
      .join(" L ");
    set(tile.line, "d", path && `M ${path}`);
    set(tile.area, "d", path && `M ${points[0].x.toFixed(1)} ${HEIGHT} L ${path} L ${points.at(-1).x.toFixed(1)} ${HEIGHT} Z`);
  }

  #table() {
    const rows = new Map();
    for (const one of this.history) rows.set(Math.floor(one.at / ROW_S), one);
    keyed(byId("history-body"), [...rows].reverse(), ([slot]) => slot, ([slot]) => {
      const cells = TILES.map(() => el("td", { class: "number" }));
      const time = new Date(slot * ROW_S * 1000).toLocaleTimeString("en-GB");
      return {
        node: row(time, ...cells),
        update: ([, point]) => cells.forEach((cell, n) => say(cell, TILES[n].show(point[TILES[n].figure]))),
      };
    });
  }
}
