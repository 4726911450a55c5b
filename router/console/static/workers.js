// The table of workers, which can be sorted and filtered.
import { byId, bytes, count, DASH, el, keyed, row, say, seconds, set } from "./view.js";

const KV = ["used", "cached", "quarantined"];
const MOST = 200; // more rows would slow the page down; filters reach the others
const share = (part, whole) => part / (whole || 1);

// What a column is sorted by; without one, workers have the router's order.
const COLUMNS = [
  { name: "Worker" },
  { name: "Role", by: (one) => one.role },
  { name: "State", by: (one) => one.state },
  { name: "Batch", by: (one) => share(one.running, one.max_sequences) },
  { name: "Waiting", by: (one) => one.waiting, number: true },
  { name: "Step", by: (one) => one.step_ms, number: true },
  { name: "Context", by: (one) => one.context_tokens, number: true },
  { name: "KV blocks", by: (one) => share(one.used_blocks, one.total_blocks) },
  { name: "Host", by: (one) => one.host_blocks, number: true },
  { name: "Disk", by: (one) => one.disk_blocks, number: true },
  { name: "Sending", by: (one) => one.in_flight_bytes, number: true },
];

export class Workers {
  constructor() {
    this.filters = byId("worker-filters");
    this.column = 0;
    this.isDescending = false;
    this.changed = () => {};
    this.heads = COLUMNS.map(({ name, number }, place) => {
      const button = el("button", { type: "button", class: "sort" }, name);
      button.addEventListener("click", () => this.#sort(place));
      return el("th", { scope: "col", class: number ? "number" : null }, button);
    });
    byId("worker-head").append(...this.heads);
    this.#mark();
    this.filters.addEventListener("input", () => this.changed());
    this.filters.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Calls `changed` when another order or other workers are wanted. */
  wire(changed) {
    this.changed = changed;
  }

  get isFiltered() {
    return Object.values(this.#wanted()).some(Boolean);
  }

  /** Returns the workers that are wanted, in the chosen order. */
  chosen({ workers }) {
    const { name, pool, role, state } = this.#wanted();
    const found = workers.filter((one) =>
      one.slot.toLowerCase().includes(name) && (!pool || one.pool === pool)
        && (!role || one.role === role) && (!state || one.state === state));
    const { by } = COLUMNS[this.column];
    if (by) found.sort((one, other) => compare(by(one), by(other)));
    return this.isDescending ? found.reverse() : found;
  }

  show(snapshot) {
    const { workers, pools } = snapshot;
    this.#offer(pools.map((pool) => pool.name));
    const found = this.chosen(snapshot);
    const shown = found.slice(0, MOST);
    say(byId("workers-note"), !workers.length ? "none registered"
      : shown.length === workers.length ? count(workers.length)
      : `${count(shown.length)} of ${count(workers.length)}`);
    byId("worker-none").hidden = found.length > 0 || !workers.length;
    keyed(byId("worker-rows"), shown, (worker) => worker.slot, workerRow);
  }

  #wanted() {
    const { name, pool, role, state } = this.filters.elements;
    return { name: name.value.trim().toLowerCase(), pool: pool.value, role: role.value, state: state.value };
  }

  /** The choice of pools follows the cluster; a chosen pool stays. */
  #offer(pools) {
    const select = this.filters.elements.pool;
    const names = [...new Set([...pools, ...(select.value ? [select.value] : [])])];
    if ([...select.options].slice(1).map((one) => one.value).join("\n") === names.join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => el("option", { value: name }, name)));
    select.value = chosen;
  }

  #sort(place) {
    // Numbers begin with the highest one, since those are looked for.
    const first = COLUMNS[place].by !== undefined && !["Role", "State"].includes(COLUMNS[place].name);
    this.isDescending = place === this.column ? !this.isDescending : first;
    this.column = place;
    this.#mark();
    this.changed();
  }

  #mark() {
    this.heads.forEach((head, place) => {
      if (place === this.column) set(head, "aria-sort", this.isDescending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }
}

const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
const number = () => el("td", { class: "number" });

function workerRow(first) {
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
      batch.update([share(worker.running, worker.max_sequences)], `${count(worker.running)} / ${count(worker.max_sequences)}`);
      say(waiting, count(worker.waiting));
      say(step, worker.step_ms ? seconds(worker.step_ms / 1000) : DASH);
      say(context, count(worker.context_tokens));
      const told = `${count(worker.used_blocks)} used, ${count(worker.cached_blocks)} cached`
        + `${worker.quarantined_blocks ? `, ${count(worker.quarantined_blocks)} quarantined` : ""} of ${count(worker.total_blocks)}`;
      kv.update(KV.map((name) => share(worker[`${name}_blocks`], worker.total_blocks)), told);
      say(host, worker.host_blocks ? count(worker.host_blocks) : DASH);
      say(disk, worker.disk_blocks ? count(worker.disk_blocks) : DASH);
      say(sending, worker.in_flight_bytes ? bytes(worker.in_flight_bytes) : DASH);
    },
  };
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
