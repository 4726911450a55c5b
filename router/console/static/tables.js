// Tables: workers, pools, handoffs, queues and latencies.
import { byId, bytes, count, DASH, el, keyed, rate, row, say, seconds, set, share } from "./view.js";

const KV = ["used", "cached", "quarantined"];
const METRICS = ["ttft", "tpot", "itl", "e2el"];
const PERCENTILES = ["p50", "p95", "p99"];

const number = () => el("td", { class: "number" });

export function showWorkers(snapshot) {
  const { workers } = snapshot;
  say(byId("workers-note"), workers.length ? `${count(workers.length)}` : "none registered");
  keyed(byId("worker-rows"), workers, (worker) => worker.slot, (first) => {
    const role = el("span", { class: "tag" });
    const state = el("td");
    const batch = bar(["fill"]);
    const kv = bar(KV);
    const [waiting, step, context, host, disk, sending] = [0, 0, 0, 0, 0, 0].map(number);
    const node = row(
      first.slot, el("td", {}, role), state, el("td", {}, batch.node), waiting, step, context,
      el("td", {}, kv.node), host, disk, sending,
    );
    return {
      node,
      update: (worker) => {
        say(role, worker.role);
        set(role, "class", `tag ${worker.role}`);
        say(state, worker.state);
        set(state, "class", worker.state === "ready" ? "fine" : "bad");
        batch.update([worker.running / (worker.max_sequences || 1)], `${count(worker.running)} / ${count(worker.max_sequences)}`);
        say(waiting, count(worker.waiting));
        say(step, worker.step_ms ? seconds(worker.step_ms / 1000) : DASH);
        say(context, count(worker.context_tokens));
        const total = worker.total_blocks || 1;
        const told = `${count(worker.used_blocks)} used, ${count(worker.cached_blocks)} cached`
          + `${worker.quarantined_blocks ? `, ${count(worker.quarantined_blocks)} quarantined` : ""} of ${count(worker.total_blocks)}`;
        kv.update(KV.map((name) => worker[`${name}_blocks`] / total), told);
        say(host, worker.host_blocks ? count(worker.host_blocks) : DASH);
        say(disk, worker.disk_blocks ? count(worker.disk_blocks) : DASH);
        say(sending, worker.in_flight_bytes ? bytes(worker.in_flight_bytes) : DASH);
      },
    };
  });
}

/** A bar with parts by share, and the same as text. */
function bar(names) {
  const parts = names.map((name) => el("i", { class: name }));
  const text = el("span", { class: "told" });
  const node = el("div", { class: "bar-cell" }, el("div", { class: "meter", "aria-hidden": "true" }, ...parts), text);
  return {
    node,
    update: (shares, told) => {
      // A small share stays visible.
      parts.forEach((part, n) => {
        const width = shares[n] > 0 ? `max(2px, ${(100 * Math.min(1, shares[n])).toFixed(2)}%)` : "0";
        if (part.style.width !== width) part.style.width = width;
      });
      say(text, told);
    },
  };
}

export function showPools(snapshot) {
  keyed(byId("pool-rows"), snapshot.pools, (pool) => pool.name, (first) => {
    const [ready, running, waiting, kv] = [0, 0, 0, 0].map(number);
    return {
      node: row(first.name, ready, running, waiting, kv),
      update: (pool) => {
        say(ready, `${count(pool.ready)} / ${count(pool.workers)}`);
        set(ready, "class", pool.ready < pool.workers || !pool.workers ? "number bad" : "number");
        say(running, `${count(pool.running)} / ${count(pool.places)}`);
        say(waiting, count(pool.waiting));
        say(kv, pool.total_blocks ? share(pool.used_blocks / pool.total_blocks) : DASH);
      },
    };
  });
}

export function showHandoffs({ handoffs }) {
  facts("handoffs", [
    ["Per second", rate(handoffs.per_s)],
    ["KV", `${bytes(handoffs.bytes_per_s)}/s`],
    ["Reserve to commit, p50", seconds(handoffs.seconds?.p50)],
    ["p95", seconds(handoffs.seconds?.p95)],
    ["Failed in the last minute", count(handoffs.failed)],
  ]);
}

export function showQueues({ queues }) {
  facts("queues", queues.length ? queues.map((one) => [one.tenant, count(one.waiting)]) : [["Empty", "0"]]);
}

function facts(id, pairs) {
  keyed(byId(id), pairs, ([name]) => name, ([name]) => {
    const value = el("dd");
    return {
      node: el("div", {}, el("dt", {}, name), value),
      update: ([, text]) => say(value, text),
    };
  });
}

export function wireLatency(again) {
  byId("latency-head").append(
    ...METRICS.flatMap(() => PERCENTILES.map((name, n) => el("th", { scope: "col", class: n ? "number" : "number first" }, name))),
  );
  for (const input of document.querySelectorAll("input[name=span]")) input.addEventListener("change", again);
}

export function showLatency({ classes, window_s: window }) {
  const span = document.querySelector("input[name=span]:checked").value;
  say(byId("latency-note"), span === "all" ? "since the router started" : `of the last ${Math.round(window)} s`);
  keyed(byId("latency-rows"), classes, (one) => one.name, (first) => {
    const requests = number();
    const good = number();
    const cells = METRICS.map(() => PERCENTILES.map((_, n) => el("td", { class: n ? "number" : "number first" })));
    return {
      node: row(first.name, requests, good, ...cells.flat()),
      update: (one) => {
        say(requests, rate(one.requests_per_s));
        say(good, share(one.good_share));
        METRICS.forEach((metric, m) =>
          PERCENTILES.forEach((percentile, p) => {
            const value = one[metric][span]?.[percentile];
            const slo = one[`slo_${metric}_s`];
            const isMissed = slo !== undefined && value > slo;
            say(cells[m][p], `${seconds(value)}${isMissed ? " ▲" : ""}`);
            set(cells[m][p], "class", `number${p ? "" : " first"}${isMissed ? " bad" : ""}`);
          }),
        );
      },
    };
  });
  const slos = classes.slice(1).map((one) => `${one.name} ${seconds(one.slo_ttft_s)}`);
  const tpot = classes.length ? seconds(classes[0].slo_tpot_s) : DASH;
  say(byId("slo-note"), `▲ above the SLO. TTFT: ${slos.join(", ")}. TPOT: ${tpot}.`);
}
