// The requests of all tenants: those that wait or run, and those of the last hour.

import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { count, duration, integer } from "../lib/format.js";
import { badge, button, empty, head, link, modelLink, section, table } from "../lib/parts.js";
import { Ended } from "../lib/ended.js";
import { KeyNames } from "../lib/key-names.js";
import { hrefTo } from "../lib/router.js";

const SHOWN = 200;

export default { path: "/requests", title: "Requests", nav: "Requests", open };

function open(view) {
  const names = new KeyNames(view);
  const past = new Ended(view, names);
  const state = { rows: null, wanted: view.query.state ?? "", text: "", all: false, drawn: null };
  const read = view.poll(2, async (api) => {
    const { data } = await api.get(withQuery("/farm/requests", { model: view.query.model, tenant: view.query.tenant }), { signal: view.signal });
    state.rows = data;
    state.drawn = null;
  });
  const change = (values) => {
    Object.assign(state, values, { drawn: null });
    view.redraw();
  };
  return () => {
    // The farm's snapshots redraw the page each second: a thousand rows are made again after a reading only.
    state.drawn ??= content(view, state, read, change);
    return [head("Requests", { beside: beside(view) }), finder(), state.drawn, past.section()];
  };
}

function beside(view) {
  const named = [["model", view.query.model], ["tenant", view.query.tenant]].filter(([, value]) => value);
  if (!named.length) return null;
  return h("span", { class: "muted" }, named.map(([name, value]) => `${name} ${value} `), h("a", { href: "#/requests" }, "Show all"));
}

// A request that has ended is not in the list.
function finder() {
  const sent = (event) => {
    event.preventDefault();
    const id = event.target.elements.rid.value.trim();
    if (id) location.hash = hrefTo(["requests", id]);
  };
  return h(
    "form",
    { class: "finder", key: "finder", onsubmit: sent },
    h("label", { for: "rid" }, "Request or answer id"),
    h("input", { id: "rid", name: "rid", required: true, autocomplete: "off", spellcheck: "false", placeholder: "chatcmpl-…" }),
    h("button", { type: "submit", class: "button" }, "Open"),
  );
}

function content(view, state, read, change) {
  if (state.rows === null) return h("p", { class: "muted", key: "wait" }, "Reading the requests…");
  const text = state.text.toLowerCase();
  const fits = (row) =>
    (!state.wanted || stateOf(row) === state.wanted) &&
    (!text || [row.id, row.model, row.tenant, row.replica].some((value) => value.toLowerCase().includes(text)));
  const found = state.rows.filter(fits);
  const shown = state.all ? found : found.slice(0, SHOWN);
  const more = found.length - shown.length;
  return section(
    "Waiting and running",
    [
      filters(state, change),
      shown.length ? rows(view, shown, read) : nothing(state),
      more > 0 ? h("div", { class: "more-rows" }, button(`Show ${integer(more)} more`, () => change({ all: true }))) : null,
    ],
    { note: `${count(found.length, "request")}${found.length < state.rows.length ? ` of ${integer(state.rows.length)}` : ""}, oldest first`, key: "list" },
  );
}

const stateOf = (row) => (row.cancelled ? "cancelled" : row.state);

function filters(state, change) {
  const states = [["", "all states"], ["queued", "queued"], ["running", "running"], ["cancelled", "cancelled"]];
  return h(
    "div",
    { class: "filters" },
    h("input", {
      type: "search", "aria-label": "Filter by id, model, tenant or replica", placeholder: "Filter by id, model, tenant…",
      value: state.text, autocomplete: "off", spellcheck: "false",
      oninput: (event) => change({ text: event.target.value, all: false }),
    }),
    h("select", { "aria-label": "State", onchange: (event) => change({ wanted: event.target.value, all: false }) },
      states.map(([value, name]) => h("option", { value, selected: value === state.wanted }, name))),
  );
}

function nothing(state) {
  if (state.rows.length) return empty("No request fits this filter.");
  return empty("No request waits or runs.", "Requests are here from their arrival until their end. One that has ended can be opened by its id for two minutes.");
}

function rows(view, found, read) {
  const columns = [
    { name: "Request", cell: (row) => link(row.id, ["requests", row.id]) },
    { name: "Model", cell: (row) => modelLink(row.model) },
    { name: "Tenant", cell: (row) => h("bdi", {}, row.tenant || "–") },
    { name: "State", cell: (row) => [badge(stateOf(row)), row.position ? h("span", { class: "note" }, ` place ${integer(row.position)}`) : null] },
    { name: "Priority", kind: "word", cell: (row) => row.priority },
    { name: "Age", right: true, cell: (row) => duration(row.age_ms) },
    { name: "Prompt", right: true, cell: (row) => integer(row.prompt_tokens) },
    { name: "Answer", right: true, cell: (row) => integer(row.completion_tokens) },
    { name: "Replica", cell: (row) => [row.replica || "–", row.attempts > 1 ? h("span", { class: "note" }, ` attempt ${row.attempts}`) : null] },
    { name: "", cell: (row) => button("Cancel", () => cancel(view, row.id, read), { kind: "danger", disabled: row.cancelled, label: `Cancel request ${row.id}` }) },
  ];
  return table(columns, found, { key: (row) => row.id, label: "Requests" });
}

// Ask, then end a request. `read` reads the page again.
export async function cancel(view, id, read) {
  const ask = { title: "Cancel this request?", text: `Its client gets an error in place of the rest of the answer. Request ${id}.`, act: "Cancel request" };
  if (await view.act("/farm/requests/cancel", { id }, { ask })) read();
}
