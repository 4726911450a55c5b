// Access to the router: the operator's API key, and responses that stream events.
import { byId, say } from "./view.js";

// The key is kept in this tab's session storage and nowhere else.
const NAME = "baton-key";
let inMemory = "";

export function key() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return inMemory; // without storage, the key is kept until the page is left
  }
}

function keep(value) {
  inMemory = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // without storage, as above
  }
}

export function authorization() {
  const known = key();
  return known ? { Authorization: `Bearer ${known}` } : {};
}

/** Wires the dialog; calls `changed` after the key is replaced or removed. */
export function wireKey(changed) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  const ask = (why) => {
    say(byId("key-why"), why);
    // Several requests may be refused in a row: keep what is typed meanwhile.
    if (dialog.open) return;
    input.value = "";
    dialog.showModal();
    input.focus();
  };
  byId("key-button").addEventListener("click", () =>
    ask(key() ? "This tab has a key. A new key replaces it." : "If the router has API keys, the console needs an operator's key."),
  );
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    keep("");
    dialog.close();
    changed();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = input.value.trim();
    // A header allows no other characters, and fetch would reject them without a message.
    if (!/^[\x21-\x7e]+$/.test(value)) {
      say(byId("key-why"), value ? "A key has no spaces or special characters." : "Enter a key first.");
      return;
    }
    keep(value);
    input.value = "";
    dialog.close();
    changed();
  });
  return ask;
}

// Server-sent events are read from a fetch response: EventSource cannot send an Authorization header.
/** Yields the data of each event as parsed JSON, and "[DONE]" as text. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data: "))
          .map((line) => line.slice(6))
          .join("\n");
        if (data) yield data === "[DONE]" ? data : JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Returns the error message of a failed response. */
export async function complaint(response) {
  try {
    const body = await response.json();
    return body.error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
