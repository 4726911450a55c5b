// What-if questions: the latency of recent traffic with other numbers of workers.
import { authorization, complaint } from "./api.js";
import { byId, DASH, el, row, say, seconds, share } from "./view.js";

const ROWS = [
  ["TTFT p50", (all) => all.ttft.lately?.p50, (one) => one.ttft_s.p50, seconds],
  ["TTFT p95", (all) => all.ttft.lately?.p95, (one) => one.ttft_s.p95, seconds],
  ["TPOT p50", (all) => all.tpot.lately?.p50, (one) => one.tpot_s.p50, seconds],
  ["TPOT p95", (all) => all.tpot.lately?.p95, (one) => one.tpot_s.p95, seconds],
  ["E2EL p50", (all) => all.e2el.lately?.p50, (one) => one.e2el_s.p50, seconds],
  ["E2EL p95", (all) => all.e2el.lately?.p95, (one) => one.e2el_s.p95, seconds],
  ["Within SLO", (all) => all.good_share, (one) => one.good_share, share],
  ["Shed", () => null, (one) => one.shed_share, share],
  ["Prefill workers busy", () => null, (one) => one.prefill_busy, share],
  ["Decode workers busy", () => null, (one) => one.decode_busy, share],
];

const shape = (one) => `${one.prefill} prefill + ${one.decode} decode`;

export class WhatIf {
  constructor() {
    this.form = byId("what-if-form");
    this.status = byId("what-if-status");
    this.snapshot = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
  }

  show(snapshot) {
    if (this.snapshot === null) {
      const ready = (role) => snapshot.workers.filter((worker) => worker.role === role).length;
      this.form.elements.prefill.value = ready("prefill");
      this.form.elements.decode.value = Math.max(1, ready("decode"));
      if (!snapshot.what_if) {
        for (const one of this.form.elements) one.disabled = true;
        say(this.status, "This router was started without the simulator.");
      }
    }
    this.snapshot = snapshot;
  }

  async #ask() {
    const button = this.form.querySelector("button");
    const values = Object.fromEntries(
      ["prefill", "decode", "rate"].map((name) => [name, this.form.elements[name].valueAsNumber]),
    );
    button.disabled = true;
    say(this.status, "Simulating …");
    try {
      const response = await fetch("/console/what-if", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...authorization() },
        body: JSON.stringify(values),
      });
      if (response.ok) this.#answer(await response.json(), values.rate);
      else say(this.status, `No answer: ${await complaint(response)}.`);
    } catch {
      say(this.status, "No answer: the router cannot be reached.");
    } finally {
      button.disabled = false;
    }
  }

  #answer(answer, rate) {
    const [present, asked] = answer.shapes;
    const times = rate === 1 ? "" : `, ${rate} times the rate`;
    say(byId("what-if-present"), `Simulated, current workers: ${shape(present)}${times}`);
    say(byId("what-if-asked"), `Simulated: ${shape(asked)}${times}`);
    const measured = this.snapshot?.classes[0];
    byId("what-if-rows").replaceChildren(
      ...ROWS.map(([name, live, simulated, told]) =>
        row(name, ...[measured ? live(measured) : null, simulated(present), simulated(asked)].map((value) =>
          el("td", { class: "number" }, value === null ? DASH : told(value)))),
      ),
    );
    byId("what-if-result").hidden = false;
    say(
      this.status,
      `With ${shape(asked)} the recent traffic would have a TTFT of ${seconds(asked.ttft_s.p95)} and a TPOT of ${seconds(asked.tpot_s.p95)} at p95, and ${share(asked.good_share)} within SLO. `
        + `Simulated from ${answer.requests} requests of ${seconds(answer.seconds)}.`,
    );
  }
}
