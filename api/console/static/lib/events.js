// Server-sent events by fetch, because EventSource can send no key.

// Yields `{event, data, id}` of a Response's body until it ends. `data` is text. `heard()` is called for all that comes,
// comments included.
export async function* serverSentEvents(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) yield parse(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(part) {
  const found = { event: "message", data: "", id: null };
  const data = [];
  for (const line of part.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "event" || name === "id") found[name] = value;
  }
  found.data = data.join("\n");
  return found;
}
