// Messages about acts, at the edge of the page: a success leaves by itself, an error stays until it is closed.

import { button } from "./parts.js";
import { h } from "./dom.js";

const SHOWN_MS = 6_000;

// `tone` is "good" or "bad". Screen readers read it aloud.
export function notify(text, tone = "good") {
  const place = document.getElementById(tone === "bad" ? "errors" : "messages");
  const note = h("div", { class: `notice ${tone}` }, h("p", {}, text));
  const close = () => note.remove();
  note.append(button("×", close, { label: "Close this message" }));
  place.append(note);
  if (tone !== "bad") setTimeout(close, SHOWN_MS);
}
