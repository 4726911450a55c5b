// The grid of ratios: predicted goodput with a few workers more or less of each role.
import { authorization, complaint, events } from "./api.js";
import { byId, DASH, el, rate, row, say, seconds, share } from "./view.js";

const FIGURES = {
  ttft_p95: ["TTFT p95", seconds],
  tpot_p95: ["TPOT p95", seconds],
  good_share: ["Goodput, share within SLO", share],
};
const SHADES = [0.5, 0.8, 0.95, 0.99]; // lower bounds of the shades 1 to 4

const place = ({ prefill, decode }) => `${prefill}+${decode}`;
const words = ({ prefill, decode }) => `${prefill} prefill + ${decode} decode`;

export class Ratios {
  constructor() {
    this.button = byId("ratios-run");
    this.status = byId("ratios-status");
    this.progress = byId("ratios-progress");
    this.abort = null;
    this.button.addEventListener("click", () => (this.abort ? this.abort.abort() : this.#run()));
  }

  show(snapshot) {
    if (snapshot.what_if || this.button.disabled) return;
    this.button.disabled = true;
    say(this.status, "This router was started without the simulator.");
  }

  async #run() {
    this.abort = new AbortController();
    say(this.button, "Stop simulating");
    say(this.status, "Simulating …");
    this.progress.value = 0;
    this.progress.hidden = false;
    byId("ratios-advice").replaceChildren();
    try {
      const response = await fetch("/console/ratios", { method: "POST", headers: authorization(), signal: this.abort.signal });
      if (!response.ok) throw new Error(await complaint(response));
      for await (const event of events(response)) this.#told(event);
    } catch (error) {
      if (this.abort.signal.aborted) say(this.status, "Stopped.");
      else say(this.status, `No answer: ${error instanceof TypeError ? "the router cannot be reached" : error.message}.`);
    } finally {
      this.abort = null;
      this.progress.hidden = true;
      say(this.button, "Simulate the grid");
    }
  }

  #told({ grid, checks, cell, advice, error }) {
    if (error) throw new Error(error.message);
    if (grid) this.#begin(grid);
    if (checks) this.#check(checks);
    if (cell) this.#cell(cell);
    if (advice) this.#advise(advice);
  }

  #begin(grid) {
    this.grid = grid;
    this.found = new Map();
    this.cells = new Map();
    const total = grid.present.prefill + grid.present.decode;
    byId("ratios-head").replaceChildren(
      el("th", { scope: "col" }, "Prefill ↓  Decode →"),
      ...grid.decode.map((decode) => el("th", { scope: "col" }, decode)),
    );
    byId("ratios-rows").replaceChildren(...grid.prefill.map((prefill) => row(prefill, ...grid.decode.map((decode) => {
      const isPresent = place({ prefill, decode }) === place(grid.present);
      const kind = isPresent ? "present" : prefill + decode === total ? "same" : "";
      const node = el("td", { class: kind }, DASH);
      this.cells.set(place({ prefill, decode }), node);
      return node;
    }))));
    this.progress.max = this.cells.size;
    byId("ratios-table").classList.remove("untrusted");
    byId("ratios-result").hidden = false;
  }

  #cell(cell) {
    const { grid } = this;
    this.found.set(place(cell), cell);
    const node = this.cells.get(place(cell));
    const shade = SHADES.filter((bound) => cell.good_share >= bound).length;
    node.classList.add(`shade-${shade}`);
    const isPresent = place(cell) === place(grid.present);
    node.replaceChildren(
      el("strong", {}, this.#goodput(cell.good_share)),
      el("span", {}, `${share(cell.good_share)} in SLO`),
      el("span", {}, `TTFT ${seconds(cell.ttft_s.p95)}`),
      el("span", {}, `TPOT ${seconds(cell.tpot_s.p95)}`),
      ...(isPresent ? [el("span", { class: "mark" }, "now")] : []),
    );
    this.progress.value = this.found.size;
  }

  /** Good requests per second. Requests that came at once have no rate. */
  #goodput(goodShare) {
    const { requests, seconds: span } = this.grid;
    return span > 0 ? `${rate((goodShare * requests) / span)}/s` : share(goodShare);
  }

  #check(checks) {
    this.checks = checks;
    byId("ratios-table").classList.toggle("untrusted", !checks.every((one) => one.agrees));
    byId("ratios-checks").replaceChildren(...checks.map((one) => {
      const [name, show] = FIGURES[one.figure];
      const ratio = one.ratio === null ? DASH : `${one.ratio.toFixed(2)} ×`;
      return row(name,
        el("td", { class: "number" }, show(one.simulated)),
        el("td", { class: "number" }, show(one.measured)),
        el("td", { class: one.agrees ? "number fine" : "number bad" }, `${ratio}${one.agrees ? "" : " ▲"}`));
    }));
  }

  #advise(advice) {
    const { grid } = this;
    const told = [];
    if (!advice.best) told.push(el("p", {}, this.#refusal()));
    else {
      this.cells.get(place(advice.best.shape)).append(el("span", { class: "mark" }, "best"));
      told.push(...this.#choice("Best", advice.best));
      if (place(advice.best_same.shape) !== place(advice.best.shape)) {
        told.push(...this.#choice(`Best with ${grid.present.prefill + grid.present.decode} workers`, advice.best_same));
      }
      if (grid.autoscales && advice.best.commands.length) {
        told.push(el("p", {}, "The autoscaler is on and may change the ratio again. Set its bounds instead."));
      }
    }
    byId("ratios-advice").replaceChildren(...told);
    const missing = this.cells.size - this.found.size;
    say(this.status, `Simulated from the latest ${grid.requests} requests, of ${seconds(grid.seconds)}.`
      + (missing ? ` The time was up before ${missing} of ${this.cells.size} cells.` : ""));
  }

  #refusal() {
    const wrong = this.checks.filter((one) => !one.agrees).map((one) => FIGURES[one.figure][0]);
    return `No advice: more than 30 % lie between simulation and measurement of the present workers (${wrong.join("; ")}). `
      + "So the figures of the other cells are not to be trusted either.";
  }

  #choice(name, { shape, good_share: goodShare, commands }) {
    const { grid } = this;
    const present = this.found.get(place(grid.present));
    if (!commands.length) return [el("p", {}, el("b", {}, `${name}: `), `the present ${words(shape)}. No cell here has more goodput${name === "Best" ? " with as few workers" : ""}.`)];
    const [goodput, now] = [goodShare, present.good_share].map((one) => `${this.#goodput(one)} (${share(one)})`);
    const fewer = grid.present.prefill + grid.present.decode - shape.prefill - shape.decode;
    const gain = goodput === now && fewer > 0 ? `${goodput} as now, with ${fewer} ${fewer === 1 ? "worker" : "workers"} fewer` : `${goodput} instead of ${now}`;
    return [
      el("p", {}, el("b", {}, `${name}: `), `${words(shape)}, ${gain}.`),
      el("pre", { tabindex: 0, role: "region", "aria-label": `Commands for ${words(shape)}` }, commands.join("\n")),
    ];
  }
}
