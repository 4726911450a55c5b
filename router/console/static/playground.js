// A chat with the model, over the API that all clients use.
import { authorization, complaint, events } from "./api.js";
import { byId, el, rate, say, seconds } from "./view.js";

export class Playground {
  constructor() {
    this.model = "";
    this.messages = [];
    this.abort = null;
    this.log = byId("chat-log");
    this.form = byId("chat-form");
    this.status = byId("chat-status");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.abort) this.#send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-new").addEventListener("click", () => {
      this.abort?.abort();
      this.messages = [];
      this.log.replaceChildren();
      say(this.status, "A new chat.");
      byId("chat-text").focus();
    });
  }

  show(snapshot) {
    this.model = snapshot.model;
    if (!snapshot.chat && !this.isElsewhere) {
      this.isElsewhere = true;
      for (const one of this.form.elements) one.disabled = true;
      say(this.status, "This listener serves operators only. Use the clients' listener to chat with the model.");
    }
  }

  async #send() {
    const { text, most, temperature } = this.form.elements;
    const question = text.value.trim();
    if (!question) return;
    if (!this.model) {
      say(this.status, "The model is not known yet: wait for the first snapshot.");
      return;
    }
    const messages = this.messages;
    messages.push({ role: "user", content: question });
    this.#turn("user", "You", question);
    text.value = "";
    const answer = this.#turn("assistant", this.model || "Model", "");
    this.#busy(new AbortController());
    try {
      const told = await this.#stream(messages, most.valueAsNumber, temperature.valueAsNumber, answer);
      say(this.status, told);
    } catch (error) {
      const stopped = error.name === "AbortError";
      say(this.status, stopped ? "Stopped." : `No answer: ${error.message}`);
      if (!stopped) answer.classList.add("bad");
    } finally {
      if (answer.textContent) messages.push({ role: "assistant", content: answer.textContent });
      else {
        // A question without an answer is not sent again.
        messages.pop();
        answer.closest("li").remove();
      }
      this.#busy(null);
    }
  }

  /** Streams an answer; returns its status line. */
  async #stream(messages, most, temperature, answer) {
    say(this.status, "Answering …");
    const begun = performance.now();
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({
        model: this.model, messages, temperature, max_tokens: most, stream: true, stream_options: { include_usage: true },
      }),
      signal: this.abort.signal,
    });
    if (!response.ok) throw new Error(await complaint(response));
    let first = null;
    let usage = null;
    for await (const event of events(response)) {
      if (event === "[DONE]") break;
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        first ??= performance.now();
        answer.append(piece);
        this.log.scrollTop = this.log.scrollHeight;
      }
    }
    const ended = performance.now();
    const tokens = usage?.completion_tokens ?? 0;
    const pace = tokens > 1 && first !== null ? `, ${rate((tokens - 1) / ((ended - first) / 1000))} tokens/s` : "";
    return `Answered: ${tokens} tokens, the first after ${seconds(((first ?? ended) - begun) / 1000)}${pace}.`;
  }

  #turn(role, name, text) {
    const body = el("p", {}, text);
    this.log.append(el("li", { class: role }, el("strong", {}, name), body));
    this.log.scrollTop = this.log.scrollHeight;
    return body;
  }

  #busy(abort) {
    this.abort = abort;
    byId("chat-send").disabled = abort !== null;
    byId("chat-stop").disabled = abort === null;
    this.log.setAttribute("aria-busy", String(abort !== null));
  }
}
