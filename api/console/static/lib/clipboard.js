// Texts for the visitor's clipboard.

import { h } from "./dom.js";
import { notify } from "./notices.js";

// A small button that copies `text()`.
export function copyButton(label, text, key = null) {
  return h("button", { type: "button", class: "button small", "aria-label": label, key: key ?? undefined, onclick: () => copy(text()) }, "Copy");
}

async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else selected(text);
    notify("Copied.");
  } catch {
    notify("The browser did not let this page copy. Select the text and copy it.", "bad");
  }
}

// Without https a browser has no clipboard for pages, but copies what is selected.
function selected(text) {
  const back = document.activeElement;
  const area = h("textarea", { value: text, readonly: true, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  back?.focus();
  if (!done) throw new Error("not copied");
}
