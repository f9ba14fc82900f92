// One request's life: its phases, the epochs that had it, and the faults that it met.

import { h } from "../lib/dom.js";
import { duration, integer, moment } from "../lib/format.js";
import { KeyNames } from "../lib/key-names.js";
import { badge, button, command, empty, facts, head, link, modelLink, section, table } from "../lib/parts.js";
import { timeline } from "../lib/timeline.js";
import { cancel } from "./requests.js";

export default { path: "/requests/:id", title: ({ id }) => `Request ${id}`, nav: "Requests", open };

const OPEN = ["queued", "running"];

function open(view) {
  const names = new KeyNames(view);
  const state = { life: null, gone: "", text: null, refused: "" };
  const path = `/farm/requests/${encodeURIComponent(view.params.id)}`;
  const read = view.poll(1, async (api) => {
    if (state.gone || (state.life && !OPEN.includes(state.life.state))) return;
    try {
      state.life = await api.get(path, { signal: view.signal });
    } catch (error) {
      if (error.status !== 404) throw error;
      state.gone = error.message;
    }
  });
  const show = async () => {
    try {
      state.text = await view.api.get(`${path}/text`, { signal: view.signal });
      state.refused = "";
    } catch (error) {
      if (error.name === "AbortError") return;
      state.refused = error.message;
    }
    view.redraw();
  };
  return () => draw(view, state, read, show, names);
}

function draw(view, state, read, show, names) {
  const { life, gone } = state;
  const over = link("Requests", ["requests"]);
  if (!life) {
    const title = h("span", { class: "mono" }, view.params.id);
    if (!gone) return [head(title, { over }), h("p", { class: "muted", key: "wait" }, "Reading the request…")];
    return [
      head(title, { over }),
      section("Not kept", empty("This request is not kept any more, or never was.",
        ["A request can be read until two minutes after its end, or as long as ", command("furrow api --keep-requests SECONDS"), " says."])),
    ];
  }
  const acts = OPEN.includes(life.state)
    ? button("Cancel request", () => cancel(view, life.id, read), { kind: "danger", disabled: life.cancelled })
    : null;
  return [
    head(h("span", { class: "mono" }, life.id), { over, beside: badge(life.cancelled && OPEN.includes(life.state) ? "cancelled" : life.state), acts }),
    life.cause ? h("p", { class: "lead", key: "cause" }, life.cause) : null,
    section("Facts", known(life, names)),
    section("Timeline", timeline(life), { note: attempts(life) }),
    section("Phases", phases(life)),
    section("Prompt and answer", texts(state, show), { key: "texts" }),
  ];
}

const attempts = (life) => (life.attempts > 1 ? `${integer(life.attempts)} attempts: each epoch goes on where the log ends` : null);

function known(life, names) {
  return facts([
    ["Model", modelLink(life.model)],
    ["Tenant", h("bdi", {}, life.tenant || "–")],
    ["API key", life.key ? link(names.of(life.key), ["keys"], { key: life.key }) : "–"],
    ["Priority", life.priority],
    ["Replica", life.replica || "–"],
    ["Prompt", `${integer(life.prompt_tokens)} tokens${life.cached_tokens ? `, ${integer(life.cached_tokens)} cached` : ""}`],
    ["Answer", `${integer(life.completion_tokens)} tokens${life.choices > 1 ? ` in ${life.choices} choices` : ""}`],
    ["Tokens per second", rateOf(life)],
  ]);
}

// Of the time since the first token, recoveries included.
function rateOf(life) {
  const at = (name) => life.phases.find((phase) => phase.name === name)?.at_ms;
  const span = (at("ended") ?? life.read_ms) - (at("first token") ?? Infinity);
  return span > 0 && life.completion_tokens > 1 ? ((life.completion_tokens * 1_000) / span).toFixed(1) : null;
}

function phases(life) {
  const begin = life.phases[0]?.at_ms ?? 0;
  const columns = [
    { name: "After", right: true, cell: (phase) => duration(phase.at_ms - begin) },
    { name: "Time", cell: (phase) => moment(phase.at_ms) },
    { name: "Phase", cell: (phase) => (phase.name.startsWith("fault:") ? badge(phase.name, "bad") : phase.name) },
    { name: "Detail", cell: (phase) => phase.detail || null },
  ];
  const rows = life.phases.map((phase, index) => ({ ...phase, index }));
  return table(columns, rows, { key: (phase) => `${phase.index}`, kind: (phase) => (phase.name.startsWith("fault:") ? "bad" : null), label: "Phases" });
}

function texts({ text, refused }, show) {
  if (refused) return empty("The text is not shown.", refused);
  if (!text) return h("div", { class: "texts" }, button("Show prompt and answer", show));
  const parts = [["Prompt", text.prompt ?? "The prompt is not kept after the request's end. --keep-requests of furrow api keeps it.", text.prompt === null]];
  for (const answer of text.answers) parts.push([text.answers.length > 1 ? `Choice ${answer.index}` : "Answer", answer.text || "(no text yet)", !answer.text]);
  return h("div", { class: "texts" }, parts.map(([name, value, muted]) => [h("h3", {}, name), h("pre", { class: muted ? "muted" : null, dir: "auto", tabindex: 0 }, value)]), button("Read again", show));
}
