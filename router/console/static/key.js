// The operator's API key: in this tab's session storage and nowhere else.
import { byId, say } from "./dom.js";

const NAME = "baton-key";
let inMemory = "";

export function key() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return inMemory; // no storage: until the page is left
  }
}

function keep(value) {
  inMemory = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // no storage: see above
  }
}

export function authorization() {
  const known = key();
  return known ? { Authorization: `Bearer ${known}` } : {};
}

/** Wires the dialog; `changed` is called when another key, or none, is to be used. */
export function wireKey(changed) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  const ask = (why) => {
    say(byId("key-why"), why);
    input.value = "";
    if (!dialog.open) dialog.showModal();
    input.focus();
  };
  byId("key-button").addEventListener("click", () =>
    ask(key() ? "This tab has a key. Another one takes its place." : "Routers that have API keys ask for an operator's."),
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
    // A header takes nothing else, and fetch would refuse it without a word.
    if (!/^[\x21-\x7e]+$/.test(value)) {
      say(byId("key-why"), value ? "A key has no spaces and no special characters." : "Type a key first.");
      return;
    }
    keep(value);
    input.value = "";
    dialog.close();
    changed();
  });
  return ask;
}
