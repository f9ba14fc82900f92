// Dead letters: requests that crashed their group when they ran alone.

import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { ago, count, integer, moment } from "../lib/format.js";
import { button, command, empty, head, link, modelLink, section, table } from "../lib/parts.js";

export default { path: "/dead", title: "Dead letters", nav: "Dead letters", open };

function open(view) {
  let letters = null;
  const read = view.poll(4, async (api) => {
    letters = (await api.get(withQuery("/farm/dead", { model: view.query.model }), { signal: view.signal })).data;
  });
  return () => {
    const { model } = view.query;
    const beside = model ? h("span", { class: "muted" }, `model ${model} `, link("Show all", ["dead"])) : null;
    if (!letters) return [head("Dead letters", { beside }), h("p", { class: "muted", key: "wait" }, "Reading the dead letters…")];
    const note = letters.length ? `${count(letters.length, "letter")}, newest first` : null;
    return [head("Dead letters", { beside }), section("Requests that crashed their group alone", letters.length ? rows(view, letters, read) : nothing(), { note })];
  };
}

function nothing() {
  return empty("No dead letters.", "A request that crashes its ranks each time that it runs is set aside here with its cause, so that the others go on.");
}

function rows(view, letters, read) {
  const columns = [
    { name: "Request", kind: "name", cell: (one) => link(one.id, ["dead", one.model, one.id]) },
    { name: "Model", kind: "name", cell: (one) => modelLink(one.model) },
    { name: "Cause", cell: (one) => h("span", {}, one.cause) },
    { name: "Tenant", kind: "short", cell: (one) => h("bdi", {}, one.tenant || "–") },
    { name: "Prompt", right: true, cell: (one) => integer(one.prompt_tokens) },
    { name: "Time", kind: "word", cell: (one) => h("span", { title: moment(one.at_ms) }, ago(one.at_ms)) },
    { name: "", cell: (one) => h("div", { class: "acts" }, acts(view, one, read)) },
  ];
  return table(columns, letters, { key: (one) => `${one.model}/${one.id}`, label: "Dead letters" });
}

// The buttons of a letter; `done` is called after an act.
export function acts(view, { id, model }, done) {
  const act = async (path, ask) => {
    const answer = await view.act(path, { id, model }, { ask });
    if (answer) done(answer);
  };
  const retry = { title: "Try this request again?", text: `It runs again from its prompt, under a new id, and its letter is dropped. If it crashes its group again, running requests are delayed by the recovery. Request ${id}.`, act: "Try again" };
  const drop = { title: "Drop this letter?", text: `What reproduces the crash is deleted. Request ${id}.`, act: "Drop" };
  return [
    button("Retry", () => act("/farm/dead/retry", retry), { label: `Retry ${id}` }),
    button("Drop", () => act("/farm/dead/drop", drop), { kind: "danger", label: `Drop ${id}` }),
  ];
}

export const inTerminal = (model, id) => command(`furrow dead show ${model} ${id}`);
