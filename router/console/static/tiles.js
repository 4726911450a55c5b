// Tiles at the top, each with a chart of its last two minutes, and a table of their values.
import { byId, count, dollars, el, keyed, rate, row, say, seconds, set, share, svg } from "./view.js";

const KEPT_S = 120;
const ROW_S = 10;
const WIDTH = 160;
const HEIGHT = 34;

const all = (snapshot) => snapshot.classes[0];
const p95 = (latency) => latency.lately?.p95 ?? null;

const TILES = [
  { name: "Requests", unit: "/s", of: (s) => s.traffic.requests_per_s, show: rate, more: (s) => `${count(s.traffic.active)} running` },
  { name: "Output tokens", unit: "/s", of: (s) => s.traffic.output_tokens_per_s, show: rate, more: (s) => `${rate(s.handoffs.per_s)} handoffs/s` },
  { name: "Prompt tokens", unit: "/s", of: (s) => s.traffic.prompt_tokens_per_s, show: rate, more: (s) => `${share(s.traffic.cached_share)} from cache` },
  { name: "TTFT p95", unit: "", of: (s) => p95(all(s).ttft), show: seconds, more: (s) => `p50 ${seconds(all(s).ttft.lately?.p50)}` },
  { name: "TPOT p95", unit: "", of: (s) => p95(all(s).tpot), show: seconds, more: (s) => `p50 ${seconds(all(s).tpot.lately?.p50)}` },
  { name: "Within SLO", unit: "", of: (s) => s.traffic.good_share, show: share, most: 1, more: (s) => `${rate(s.traffic.good_per_s)} good/s` },
  { name: "Waiting", unit: "", of: (s) => s.traffic.waiting + s.workers.reduce((sum, w) => sum + w.waiting, 0), show: count, more: (s) => `${count(s.traffic.shed)} shed, ${count(s.traffic.failed)} failed` },
  { name: "Cost", unit: "/h", of: (s) => s.cost?.per_hour ?? null, show: dollars, more: (s) => s.cost ? `${dollars(s.cost.per_request)} per request; per million tokens ${dollars(s.cost.per_million_input)} in, ${dollars(s.cost.per_million_output)} out` : "no prices" },
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

  show(snapshot) {
    const values = TILES.map((tile) => tile.of(snapshot));
    this.history.push({ at: snapshot.at, values });
    while (this.history[0].at < snapshot.at - KEPT_S) this.history.shift();
    TILES.forEach((tile, place) => {
      say(tile.value, tile.show(values[place]));
      say(tile.note, tile.more(snapshot));
      this.#draw(tile, place, snapshot.at);
    });
    this.#table();
  }

  #draw(tile, place, now) {
    const points = this.history
      .map(({ at, values }) => ({ x: WIDTH * (1 - (now - at) / KEPT_S), value: values[place] }))
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
        update: ([, { values }]) => cells.forEach((cell, n) => say(cell, TILES[n].show(values[n]))),
      };
    });
  }
}
