// A secret that is shown once, with a button that copies it.

import { h, patch } from "./dom.js";
import { button } from "./parts.js";

export function copyable(secret) {
  const field = h("input", { class: "mono secret", readonly: true, value: secret, "aria-label": "Secret", spellcheck: "false", onfocus: (event) => event.target.select() });
  const said = h("p", { class: "help", role: "status" });
  const copy = async () => {
    field.select();
    try {
      // A page without TLS that is not from this machine has no clipboard.
      await navigator.clipboard.writeText(secret);
      patch(said, "Copied.");
    } catch {
      patch(said, "The browser refused to copy. The secret is selected: press Ctrl-C.");
    }
  };
  return h("div", {}, h("p", {}, "Copy it now: it is not kept, and never shown again."), h("div", { class: "copy" }, field, button("Copy", copy)), said);
}
