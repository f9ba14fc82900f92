// Server-sent events by fetch, because EventSource can send no key.

// Yields `{event, data, id}` of a Response's body until it ends. `data` is text. `heard()` is called for all that comes,
// and `heard(text)` for each comment.
export async function* serverSentEvents(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(":")) heard(line.slice(1).trim());
        else if (line) event.push(line);
        else if (event.length) {
          yield parse(event);
          event = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(lines) {
  const found = { event: "message", data: "", id: null };
  const data = [];
  for (const line of lines) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "event" || name === "id") found[name] = value;
  }
  found.data = data.join("\n");
  return found;
}
