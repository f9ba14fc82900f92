// Parts that pages are made of.

import { h } from "./dom.js";
import { hrefTo } from "./router.js";

// The tone of each state's badge: `good`, `busy` (it changes by itself), `warn` (an operator should look), `bad`.
const TONES = {
  ...{ loaded: "good", alive: "good", active: "good", running: "good", finished: "good", ready: "good" },
  ...{ loading: "busy", recovering: "busy", queued: "busy", starting: "busy", forming: "busy", unloading: "busy" },
  ...{ paused: "warn", draining: "warn", drained: "warn", cancelled: "warn", expired: "warn", slow: "warn" },
  ...{ failed: "bad", poisoned: "bad", away: "bad", dead: "bad", revoked: "bad", error: "bad", silent: "bad" },
};

// A state in its colour and in words, so that the colour is not needed.
export function badge(state, tone = TONES[state] ?? "plain") {
  return h("span", { class: `badge ${tone}` }, state);
}

export const toneOf = (state) => TONES[state] ?? "plain";

export function link(text, parts, query) {
  return h("a", { href: hrefTo(parts, query) }, text);
}

export const modelLink = (name) => link(name, ["models", name]);
export const hostLink = (id) => link(id, ["hosts", id]);

// A button; `kind` is "plain", "primary" or "danger".
export function button(text, onclick, { kind = "plain", disabled = false, label = null, key } = {}) {
  return h("button", { type: "button", class: `button ${kind}`, onclick, disabled, "aria-label": label, key }, text);
}

// The head of a page: its title, what stands beside it, and its acts.
export function head(title, { beside = [], acts = [], over = null } = {}) {
  return h(
    "header",
    { class: "head", key: "head" },
    h("div", { class: "title" }, over ? h("p", { class: "over" }, over) : null, h("h1", { tabindex: -1 }, title), beside),
    h("div", { class: "acts" }, acts),
  );
}

// A part of a page with its title.
export function section(title, content, { acts = [], note = null, key = title } = {}) {
  return h(
    "section",
    { class: "section", key },
    h("header", {}, h("h2", {}, title), note ? h("span", { class: "note" }, note) : null, h("div", { class: "acts" }, acts)),
    content,
  );
}

// The place of a list that has nothing: why, and how to begin.
export function empty(title, ...content) {
  return h("div", { class: "empty" }, h("p", { class: "strong" }, title), content.map((part) => h("p", {}, part)));
}

export const command = (text) => h("code", { class: "command" }, text);

// Names and values, in rows; pairs whose value is null are left out.
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value != null);
  return h("dl", { class: "facts" }, shown.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value))));
}

// A table. A column has `name`, `cell(row)`, `right: true` for numbers, and `kind: "name"` or `"short"`
// for a least width, or `"word"` for a value of one line. On a narrow page each row is a block in
// which a cell stands beside its column's name. `key(row)` is the identity of a row, `kind(row)` its class.
export function table(columns, rows, { key, kind = () => null, label }) {
  return h(
    "table",
    { "aria-label": label },
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.right ? "right" : null }, column.name || h("span", { class: "unseen" }, "Acts"))))),
    h("tbody", {}, rows.map((row) =>
      h("tr", { key: key(row), class: kind(row) }, columns.map((column) =>
        h("td", { class: column.kind ?? (column.right ? "right" : null), "data-name": column.name }, column.cell(row)))))),
  );
}
