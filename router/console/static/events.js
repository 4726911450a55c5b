// Reads server-sent events from a fetch response: EventSource can send no Authorization header.

/** The data of each event, as parsed JSON; "[DONE]" as it is. Ends with the stream. */
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

/** What a failed response says of itself. */
export async function complaint(response) {
  try {
    const body = await response.json();
    return body.error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
