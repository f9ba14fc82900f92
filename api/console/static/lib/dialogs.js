// Dialogs: a question before an act that ends something, and forms.

import { h, patch } from "./dom.js";
import { remembered, stopsIn } from "./focus.js";
import { button } from "./parts.js";

// Ask before an act: true if it was confirmed. `act` is the text of its button.
export function confirm({ title, text, act, kind = "danger" }) {
  return new Promise((resolve) => {
    const dialog = opened(title, (close) => [
      h("p", {}, text),
      h("div", { class: "acts" }, button("Cancel", () => close(false)), button(act, () => close(true), { kind })),
    ], resolve);
    dialog.querySelector("button").focus();
  });
}

// A form. `fields`: `{name, label, type, value, help, options, min, max, pattern, required, more}`; `type` is "text", "number",
// "select", "check" or "password", and fields with `more` are folded. `submit(values)` does the act; what it throws is
// shown in the form, which stays, as it does for the result false. Nothing closes the form while the act runs, so that
// no result is lost. `attach(update)` is called once: `update(values)` takes values that were changed elsewhere over into
// the fields that the visitor has not changed. Resolves to the result, or to null where the form was closed.
export function form({ title, text = null, fields, act, kind = "primary", submit, attach = null }) {
  return new Promise((resolve) => {
    const fault = h("p", { class: "fault", role: "alert", keep: true });
    const news = h("p", { class: "help", role: "status", keep: true });
    const shown = fields.map((field) => [field, row(field)]);
    const folded = shown.filter(([field]) => field.more).map(([, element]) => element);
    let sending = false;
    const dialog = opened(title, (close) => {
      const cancel = button("Cancel", () => close(null));
      const sent = async (event) => {
        event.preventDefault();
        const pressed = dialog.querySelector("[type=submit]");
        patch(fault);
        sending = cancel.disabled = pressed.disabled = true;
        try {
          const result = (await submit(valuesOf(dialog, fields))) ?? true;
          if (result !== false) close(result);
        } catch (error) {
          patch(fault, error.message);
          dialog.querySelector(`[name="${error.param ?? ""}"]`)?.focus();
        } finally {
          sending = cancel.disabled = pressed.disabled = false;
          // A button that is disabled has lost the focus.
          if (dialog.open && !dialog.contains(document.activeElement)) pressed.focus();
        }
      };
      return h(
        "form",
        { onsubmit: sent, novalidate: false },
        text ? h("p", {}, text) : null,
        shown.filter(([field]) => !field.more).map(([, element]) => element),
        folded.length ? unfolding(h("summary", {}, "More settings"), h("div", {}, folded)) : null,
        news,
        fault,
        h("div", { class: "acts" }, cancel, h("button", { type: "submit", class: `button ${kind}` }, act)),
      );
    }, resolve, () => sending);
    attach?.(updating(dialog, fields, news));
  });
}

// Takes values over into the fields that were not changed here, and says so in `news`.
function updating(dialog, fields, news) {
  const [changed, told] = [new Set(), new Map()];
  const before = new Map(fields.map(({ name, value }) => [name, value ?? ""]));
  dialog.addEventListener("input", ({ target }) => changed.add(target.name));
  return (values) => {
    for (const { name, label, type } of fields) {
      const value = values[name] ?? "";
      if (!(name in values) || value === before.get(name)) continue;
      before.set(name, value);
      const input = dialog.querySelector(`[name="${name}"]`);
      const shown = type === "check" ? (value ? "on" : "off") : value === "" ? "empty" : value;
      told.set(name, changed.has(name) ? `${label}: now ${shown}; what you entered is kept.` : `${label}: now ${shown}.`);
      if (changed.has(name)) continue;
      if (type === "check") input.checked = Boolean(value);
      else input.value = value;
    }
    patch(news, told.size ? ["Changed elsewhere meanwhile. ", [...told.values()].join(" ")] : null);
  };
}

// Folded content that unfolds where a field in it is not valid: the browser can't say so at a field that is hidden.
function unfolding(...content) {
  const details = h("details", { class: "more" }, content);
  details.addEventListener("invalid", () => (details.open = true), true);
  return details;
}

// Show content until its button is pressed, such as a secret that is shown once: Escape does not close it.
export function show({ title, content, act = "Close" }) {
  return new Promise((resolve) => {
    opened(title, (close) => [content, h("div", { class: "acts" }, button(act, () => close(null), { kind: "primary" }))], resolve, () => true);
  });
}

// `held()`: true while nothing but `close` ends the dialog.
function opened(title, content, resolve, held = () => false) {
  const back = remembered();
  const id = `dialog-${Math.random().toString(36).slice(2)}`;
  let answer = null;
  let done = false;
  const dialog = h("dialog", { "aria-labelledby": id });
  const close = (value) => {
    [answer, done] = [value, true];
    dialog.close();
  };
  dialog.append(h("h2", { id }, title), ...[content(close)].flat());
  dialog.addEventListener("cancel", (event) => held() && event.preventDefault());
  dialog.addEventListener("close", () => {
    // A browser closes a dialog at the second Escape, whatever was prevented.
    if (!done && held()) return dialog.showModal();
    dialog.remove();
    back();
    resolve(answer);
  });
  dialog.addEventListener("keydown", (event) => round(event, dialog));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// The Tab key goes round in a dialog, and not out of it to the browser's own controls.
function round(event, dialog) {
  if (event.key !== "Tab") return;
  const stops = stopsIn(dialog);
  const [from, to] = event.shiftKey ? [stops[0], stops.at(-1)] : [stops.at(-1), stops[0]];
  if (document.activeElement !== from && dialog.contains(document.activeElement)) return;
  event.preventDefault();
  to?.focus();
}

function row(field) {
  const { name, label, type = "text", value, help, required = false, min, max, options } = field;
  const id = `field-${name}`;
  const about = help ? `${id}-help` : null;
  const shared = { id, name, "aria-describedby": about };
  let input;
  if (type === "select") {
    input = h("select", shared, options.map((one) => h("option", { value: one, selected: one === value }, one || "default")));
  } else if (type === "check") {
    input = h("input", { ...shared, type: "checkbox", checked: Boolean(value) });
  } else {
    const typed = { type, value: value ?? "", required, min, max, autocomplete: "off", spellcheck: "false" };
    input = h("input", { ...shared, ...typed, placeholder: field.placeholder, pattern: field.pattern });
  }
  return h(
    "div",
    { class: type === "check" ? "field check" : "field" },
    h("label", { for: id }, label),
    input,
    help ? h("p", { class: "help", id: about }, help) : null,
  );
}

// Empty texts and numbers are null.
function valuesOf(dialog, fields) {
  const found = {};
  for (const { name, type = "text" } of fields) {
    const input = dialog.querySelector(`[name="${name}"]`);
    if (type === "check") found[name] = input.checked;
    else if (type === "number") found[name] = input.value === "" ? null : Number(input.value);
    else found[name] = input.value.trim() || null;
  }
  return found;
}
