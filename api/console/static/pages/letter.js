// One dead letter.

import { h } from "../lib/dom.js";
import { integer, moment } from "../lib/format.js";
import { button, empty, facts, head, link, modelLink, section } from "../lib/parts.js";
import { hrefTo } from "../lib/router.js";
import { withQuery } from "../lib/api.js";
import { acts, inTerminal } from "./dead.js";

export default { path: "/dead/:model/:id", title: ({ id }) => `Dead letter ${id}`, nav: "Dead letters", open };

function open(view) {
  const { model, id } = view.params;
  const state = { letter: null, gone: "", text: null, refused: "" };
  const address = (rest) => withQuery(`/farm/dead/${encodeURIComponent(id)}${rest}`, { model });
  view.poll(10, async (api) => {
    if (state.gone) return;
    try {
      state.letter = await api.get(address(""), { signal: view.signal });
    } catch (error) {
      if (error.status !== 404) throw error;
      state.gone = error.message;
    }
  });
  const show = async () => {
    try {
      state.text = await view.api.get(address("/text"), { signal: view.signal });
      state.refused = "";
    } catch (error) {
      if (error.name === "AbortError") return;
      state.refused = error.message;
    }
    view.redraw();
  };
  const done = (answer) => (location.hash = answer.id === id ? "#/dead" : hrefTo(["requests", answer.id]));
  return () => draw(view, state, show, done);
}

function draw(view, { letter, gone, text, refused }, show, done) {
  const over = link("Dead letters", ["dead"]);
  const title = h("span", { class: "mono" }, view.params.id);
  if (gone) return [head(title, { over }), section("Not there", empty("There is no such dead letter.", "It was tried again, dropped, or pushed out by newer ones."))];
  if (!letter) return [head(title, { over }), h("p", { class: "muted", key: "wait" }, "Reading the letter…")];
  return [
    head(title, { over, acts: acts(view, letter, done) }),
    h("p", { class: "lead", key: "cause" }, letter.cause),
    section("Facts", facts([
      ["Model", modelLink(letter.model)],
      ["Tenant", h("bdi", {}, letter.tenant || "–")],
      ["Priority", letter.priority],
      ["Replica", letter.replica || "–"],
      ["Attempts", integer(letter.attempts)],
      ["Prompt", `${integer(letter.prompt_tokens)} tokens`],
      ["Entries of its log", integer(letter.entries)],
      ["Time", moment(letter.at_ms)],
    ])),
    section("Prompt and parameters", content(letter, text, refused, show)),
  ];
}

function content(letter, text, refused, show) {
  if (refused) return empty("The text is not shown.", refused, ["In a terminal: ", inTerminal(letter.model, letter.id)]);
  if (!text) return h("div", { class: "texts" }, button("Show prompt and parameters", show));
  const { prompt, ...parameters } = text.params;
  return h(
    "div",
    { class: "texts" },
    h("h3", {}, "Prompt"),
    h("pre", { dir: "auto", tabindex: 0 }, text.prompt ?? `Tokens ${prompt.join(" ")}`),
    h("h3", {}, "Parameters"),
    h("pre", { tabindex: 0 }, JSON.stringify(parameters, null, 2)),
  );
}
