// Tables: pools, handoffs, queues, latencies and tenants.
import { byId, bytes, count, DASH, el, keyed, rate, row, say, seconds, set, share } from "./view.js";

const METRICS = ["ttft", "tpot", "itl", "e2el"];
const PERCENTILES = ["p50", "p95", "p99"];

const TENANT = [
  ["requests_per_s", rate], ["prompt_tokens_per_s", rate], ["output_tokens_per_s", rate],
  ["waiting", count], ["limited", count], ["overloaded", count], ["late", count], ["failed", count],
];
const REFUSALS = new Set(["limited", "overloaded", "late", "failed"]);

const number = () => el("td", { class: "number" });

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
            const isMissed = slo && value > slo;
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

export function showTenants({ tenants, queues, window_s: window }) {
  say(byId("tenants-note"), `of this router process, last ${Math.round(window)} s`);
  const inQueue = new Map(queues.map((one) => [one.tenant, one.waiting]));
  const told = tenants.map((one) => ({ ...one, waiting: inQueue.get(one.tenant) ?? 0 }));
  keyed(byId("tenant-rows"), told, (one) => one.tenant, (first) => {
    const cells = TENANT.map(number);
    return {
      node: row(first.tenant, ...cells),
      update: (one) =>
        TENANT.forEach(([name, show], n) => {
          say(cells[n], show(one[name]));
          set(cells[n], "class", REFUSALS.has(name) && one[name] ? "number bad" : "number");
        }),
    };
  });
}
