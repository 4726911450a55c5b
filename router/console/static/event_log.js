// The log of events: what happened to workers, requests and files.
import { byId, count, el, keyed, row, say } from "./view.js";

const KEPT = 512;
const KINDS = {
  joined: "join", left: "leave", died: "death", draining: "drain", ready: "ready", role: "role",
  unreachable: "silent", moved: "move", breaker: "breaker", store: "store", health: "health",
  autoscaler: "autoscaler", keys: "keys", certificate: "certificate",
};

export class EventLog {
  constructor() {
    this.events = [];
    byId("log-level").addEventListener("change", () => this.#show());
  }

  /** Forgets all events: the router sends its own again. */
  clear() {
    this.events = [];
  }

  add(events) {
    this.events = [...this.events, ...events].slice(-KEPT);
    this.#show();
  }

  #show() {
    const level = byId("log-level").value;
    const shown = this.events.filter((one) => !level || one.level !== "info").reverse();
    say(byId("log-note"), shown.length === this.events.length ? `the latest ${count(shown.length)}` : `${count(shown.length)} of the latest ${count(this.events.length)}`);
    byId("log-none").hidden = shown.length > 0;
    keyed(byId("log-rows"), shown, (one) => one.number, (one) => {
      const time = new Date(one.at * 1000);
      const cell = el("time", { datetime: time.toISOString(), title: time.toLocaleString("en-GB") }, time.toLocaleTimeString("en-GB"));
      const kind = el("td", {}, el("span", { class: `tag ${one.level}` }, KINDS[one.kind] ?? one.kind));
      const mark = one.level === "info" ? "" : el("span", { class: "unseen" }, `${one.level}: `);
      const node = row("", kind, el("td", { class: "event" }, mark, one.text));
      node.cells[0].append(cell);
      return { node, update: () => {} };
    });
  }
}
