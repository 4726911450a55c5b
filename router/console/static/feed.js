// Live snapshots: one stream, reopened when it ends, closed while the page is hidden.
import { authorization, complaint, events } from "./api.js";

const SILENCE_MS = 8000;
const HIDDEN_MS = 30000;
const FIRST_WAIT_MS = 1000;
const MAX_WAIT_MS = 15000;

export class Feed {
  /**
   * `onHistory(history)` at the begin of each stream; `onSnapshot(snapshot)`; `onLog(events)`;
   * `onState(state, text)`: connecting, live, waiting, hidden or refused.
   */
  constructor({ onHistory, onSnapshot, onLog, onState }) {
    Object.assign(this, { onHistory, onSnapshot, onLog, onState });
    this.life = 0;
    this.wait = FIRST_WAIT_MS;
    document.addEventListener("visibilitychange", () => this.#seen());
  }

  /** Open the stream, or reopen it. */
  start() {
    this.#stop();
    this.life += 1;
    this.wait = FIRST_WAIT_MS;
    this.#run(this.life);
  }

  #stop() {
    this.life += 1;
    this.abort?.abort();
  }

  #seen() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.isHidden = true;
        this.#stop();
        this.onState("hidden", "paused while hidden");
      }, HIDDEN_MS);
    } else if (this.isHidden) {
      this.isHidden = false;
      this.start();
    }
  }

  async #run(life) {
    while (life === this.life) {
      this.onState("connecting", "connecting");
      try {
        if (await this.#stream(life)) return;
      } catch {
        // Any failure is retried.
      }
      if (life !== this.life) return;
      this.onState("waiting", `no answer; again in ${Math.round(this.wait / 1000)} s`);
      await new Promise((done) => setTimeout(done, this.wait));
      this.wait = Math.min(2 * this.wait, MAX_WAIT_MS);
    }
  }

  /** Returns true if a retry would fail for the same reason. */
  async #stream(life) {
    const abort = (this.abort = new AbortController());
    let watchdog;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    heard();
    try {
      const response = await fetch("/console/events?history=true", {
        headers: authorization(),
        signal: abort.signal,
        cache: "no-store",
      });
      if (response.status === 401 || response.status === 403) {
        const why = await complaint(response);
        if (life === this.life) this.onState("refused", why);
        return true;
      }
      if (!response.ok) return false;
      for await (const event of events(response)) {
        if (life !== this.life) return true;
        heard();
        if (event.error) return this.#ended(event.error);
        this.wait = FIRST_WAIT_MS;
        this.onState("live", "live");
        this.#told(event);
      }
      return false;
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  /** Shows an event. An error of the page must not end the connection. */
  #told(event) {
    try {
      if (event.history) this.onHistory(event.history);
      else if (event.log) this.onLog(event.log);
      else this.onSnapshot(event);
    } catch (error) {
      reportError(error);
    }
  }

  #ended(error) {
    const isKey = error.code === "invalid_api_key" || error.code === "forbidden";
    if (isKey) this.onState("refused", error.message);
    return isKey;
  }
}
