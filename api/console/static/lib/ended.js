// The requests that ended in the last hour, with a filter.

import { withQuery } from "./api.js";
import { h } from "./dom.js";
import { ago, count, duration, integer } from "./format.js";
import { badge, button, empty, link, modelLink, section, table } from "./parts.js";

const SHOWN = 50;
const KINDS = [["", "all ends"], ["failed", "failed"], ["finished", "finished"]];

// `section()` draws the list; it is read every 5 seconds.
export class Ended {
  #rows = null;
  #kind = "";
  #text = "";
  #shown = SHOWN;
  #drawn = null;

  // `names`: of keys.
  constructor(view, names) {
    Object.assign(this, { view, names });
    this.read = view.poll(5, async (api) => {
      const failed = { failed: true, finished: false }[this.#kind];
      const { data } = await api.get(withQuery("/farm/requests/ended", { model: view.query.model, tenant: view.query.tenant, failed }), { signal: view.signal });
      this.#rows = data;
      this.#drawn = null;
    });
  }

  section() {
    return (this.#drawn ??= this.#content());
  }

  #change(draw) {
    draw();
    this.#shown = SHOWN;
    this.#drawn = null;
    this.view.redraw();
  }

  #content() {
    const rows = this.#rows;
    const text = this.#text.toLowerCase();
    const fits = (row) => !text || [row.id, row.model, row.tenant, this.names.of(row.key ?? ""), row.error, row.path, String(row.status)].some((value) => value?.toLowerCase().includes(text));
    const found = (rows ?? []).filter(fits);
    const more = found.length - this.#shown;
    const parts = [
      this.#filters(),
      rows === null ? h("p", { class: "empty" }, "Reading the requests…") : found.length ? this.#table(found.slice(0, this.#shown)) : this.#nothing(),
      more > 0 ? h("div", { class: "more-rows" }, button(`Show ${integer(more)} more`, () => ((this.#shown = Infinity), (this.#drawn = null), this.view.redraw()))) : null,
    ];
    return section("Ended in the last hour", parts, { note: rows?.length ? `${count(found.length, "request")}, newest first` : null, key: "ended" });
  }

  #filters() {
    const typed = (event) => this.#change(() => (this.#text = event.target.value));
    const chosen = (event) => (this.#change(() => (this.#kind = event.target.value)), this.read());
    return h("div", { class: "filters" },
      h("input", { type: "search", "aria-label": "Filter ended requests by id, model, tenant, key or error", placeholder: "Filter by id, model, tenant, key, error…", value: this.#text, autocomplete: "off", spellcheck: "false", oninput: typed }),
      h("select", { "aria-label": "End", onchange: chosen }, KINDS.map(([value, name]) => h("option", { value, selected: value === this.#kind }, name))));
  }

  #nothing() {
    return this.#text || this.#kind ? empty("No ended request fits this filter.") : empty("No request has ended in the last hour.");
  }

  #table(rows) {
    const columns = [
      { name: "Request", cell: (row) => link(row.id, ["requests", row.id]) },
      { name: "Ended", kind: "word", cell: (row) => ago(row.ended_ms) },
      { name: "End", cell: (row) => [badge(endOf(row), toneOf(row)), row.error ? h("p", { class: "cause" }, row.error) : null] },
      { name: "Model", cell: (row) => (row.model ? modelLink(row.model) : "–") },
      { name: "Tenant", cell: (row) => h("bdi", {}, row.tenant || "–") },
      { name: "Key", cell: (row) => h("bdi", {}, this.names.of(row.key ?? "") || "–") },
      { name: "First token", right: true, cell: (row) => duration(row.first_ms ?? null) },
      { name: "Total", right: true, cell: (row) => duration(row.total_ms) },
      { name: "Prompt", right: true, cell: (row) => integer(row.prompt_tokens ?? 0) },
      { name: "Answer", right: true, cell: (row) => integer(row.completion_tokens ?? 0) },
    ];
    return table(columns, rows, { key: (row) => `${row.id} ${row.ended_ms}`, label: "Ended requests" });
  }
}

function endOf(row) {
  if (row.status === 499) return "client left";
  return row.status >= 400 ? `failed: ${row.status}` : row.finish_reason || "finished";
}

function toneOf(row) {
  if (row.status >= 500) return "bad";
  return row.status >= 400 ? "warn" : "good";
}
