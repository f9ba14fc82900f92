// A chat to try a model. The conversation lives as long as the tab, reloads included.

import { Answer } from "../lib/answer.js";
import { farewells } from "../lib/api.js";
import { forget, keep, kept } from "../lib/conversation.js";
import { confirm } from "../lib/dialogs.js";
import { h } from "../lib/dom.js";
import { count, duration, integer, rate } from "../lib/format.js";
import { button, command, empty, head, link } from "../lib/parts.js";
import { hrefTo } from "../lib/router.js";

// On a narrow page the settings would push the conversation away.
const WIDE = matchMedia("(min-width: 721px)").matches;

export default { path: "/chat", title: "Chat", nav: "Chat", open };

// `turns`: `{role, text, answer}`; an assistant's turn has its Answer. `models` are those that can be asked now, null
// until they are read; `model` is the chosen one, which stays chosen while it can't be asked.
const chat = { turns: [], models: null, model: "", system: "", temperature: "", most: "", draft: "", view: null, drawn: 0 };
const SAVED_EVERY_MS = 2_000;
let savedAt = 0;
// How many of the last turns a reload brings back.
let lasting = 0;

Object.assign(chat, kept(changed));
lasting = chat.turns.length;
if (running()) chat.turns.at(-1).answer.run();
addEventListener("pagehide", save);
document.addEventListener("visibilitychange", () => document.hidden && save());
farewells.add(() => (drop(), (chat.system = "")));

function save() {
  if (!chat.turns.length && !chat.draft) return forget();
  savedAt = Date.now();
  lasting = keep(chat);
}

// End the answer that runs, and drop the conversation.
function drop() {
  chat.turns.at(-1)?.answer?.stop();
  Object.assign(chat, { turns: [], draft: "" });
  forget();
  chat.view?.redraw();
}

function open(view) {
  chat.view = view;
  view.signal.addEventListener("abort", () => chat.view === view && (chat.view = null));
  if (view.query.model) chat.model = view.query.model;
  chat.models = null;
  view.poll(5, async (api) => {
    const { data } = await api.get("/v1/models", { signal: view.signal });
    chat.models = data.filter((model) => !model.kind || model.kind === "generate").map(({ id }) => id);
    chat.model ||= chat.models[0] ?? "";
  });
  return draw;
}

// At most once a frame, however fast the tokens come.
function changed() {
  if (!running() || Date.now() - savedAt > SAVED_EVERY_MS) save();
  if (chat.drawn) return;
  chat.drawn = requestAnimationFrame(() => {
    chat.drawn = 0;
    if (!chat.view) return;
    const bottom = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    chat.view.redraw();
    if (bottom) scrollTo(0, document.documentElement.scrollHeight);
  });
}

function running() {
  return chat.turns.at(-1)?.answer?.open ?? false;
}

const served = () => chat.models?.includes(chat.model) ?? false;

function draw() {
  const { models } = chat;
  const acts = chat.turns.length ? button("New chat", restart) : null;
  if (!models) return [head("Chat", { acts }), h("p", { class: "muted", key: "wait" }, "Reading the models…")];
  if (!models.length && !chat.turns.length)
    return [head("Chat"), h("section", { class: "section" }, empty("No model is loaded.", ["Load one on the ", link("farm's page", []), ", or with ", command("furrow models load MODEL"), "."]))];
  return [head("Chat", { acts }), h("div", { class: "chat", key: "chat" }, conversation(), h("div", { class: "compose" }, fleeting(), missing(), composer()), settings(models))];
}

function conversation() {
  if (!chat.turns.length) return h("div", { class: "turns", key: "turns" }, empty("Try a model.", "Write a message below. The answer goes on by itself if the API process or a rank dies meanwhile."));
  return h("div", { class: "turns", key: "turns", role: "log", "aria-label": "Conversation", "aria-busy": running() ? "true" : "false" }, chat.turns.map(turn));
}

function turn({ role, text, answer }, index) {
  const name = role === "user" ? "You" : answer.body.model;
  const body = answer
    ? [
        answer.reasoning ? h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), h("div", { class: "said", dir: "auto" }, answer.reasoning)) : null,
        h("div", { class: "said", dir: "auto" }, answer.text),
        status(answer),
      ]
    : h("div", { class: "said", dir: "auto" }, text);
  return h("article", { class: `turn ${role}`, key: `${index}` }, h("h2", {}, h("bdi", {}, name)), body);
}

function status(answer) {
  const life = answer.rid ? link("Request", ["requests", answer.rid]) : null;
  const words = {
    waiting: answer.place ? placed(answer.place) : "Waiting for the first token…",
    answering: "Answering…",
    resuming: "The connection broke. The same answer is followed again…",
    stopped: "Stopped.",
    failed: answer.error,
    ended: figures(answer),
  }[answer.state];
  return h("p", { class: answer.state === "failed" ? "figures fault" : "figures muted", role: "status" }, h("span", {}, words), life);
}

function placed({ position, waitMs }) {
  return `Waiting in the queue: place ${integer(position)}${waitMs ? `, about ${duration(waitMs)}` : ""}.`;
}

function figures({ usage, rate: speed, firstMs, finish, resumed }) {
  const found = [];
  if (speed !== null) found.push(`${rate(speed)} tokens/s`);
  if (usage) found.push(count(usage.completion_tokens, "token"));
  if (firstMs !== null) found.push(`first after ${duration(firstMs)}`);
  if (finish === "length") found.push("ended by the token limit");
  if (resumed) found.push(`resumed ${resumed === 1 ? "once" : `${resumed} times`}`);
  return found.join(" · ") || "Ended.";
}

function fleeting() {
  if (lasting >= chat.turns.length) return null;
  const text = lasting ? `A reload keeps only the last ${integer(lasting)} of these ${integer(chat.turns.length)} messages.` : "A reload drops this conversation: the browser keeps nothing of it.";
  return h("p", { class: "help", role: "status", key: "fleeting" }, text);
}

function missing() {
  if (served() || !chat.model) return null;
  return h("p", { class: "fault", role: "status", key: "missing" }, h("bdi", {}, chat.model), " can't be asked now: it is not loaded, or writes no text. Wait for it, or choose another model.");
}

function composer() {
  const keys = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const submitted = (event) => {
    event.preventDefault();
    send();
  };
  return h(
    "form",
    { class: "composer", onsubmit: submitted },
    h("textarea", { id: "message", rows: 3, "aria-label": "Message", placeholder: "Message (Enter sends, Shift-Enter begins a line)", value: chat.draft, dir: "auto", oninput: (event) => (chat.draft = event.target.value), onkeydown: keys }),
    running()
      ? h("button", { type: "button", class: "button danger", key: "stop", onclick: stop }, "Stop")
      : h("button", { type: "submit", class: "button primary", key: "send", disabled: !served() }, "Send"),
  );
}

function stop() {
  chat.turns.at(-1)?.answer?.stop();
  document.getElementById("message")?.focus();
}

async function restart() {
  if (running()) {
    const text = "The answer that runs is stopped, and this conversation is dropped.";
    if (!(await confirm({ title: "Begin a new chat?", text, act: "Stop and begin" }))) return;
  }
  drop();
  document.getElementById("message")?.focus();
}

// The messages for the model: turns without an answer's text are left out with it, because templates of many models refuse
// two messages of one role in a row.
function told() {
  const { turns } = chat;
  const kept = turns.filter(({ answer }, index) => (answer ?? turns[index + 1]?.answer ?? { text: true }).text);
  return kept.map(({ role, text, answer }) => ({ role, content: answer ? answer.text : text }));
}

async function send() {
  const text = chat.draft.trim();
  if (!text || running() || !served()) return;
  chat.turns.push({ role: "user", text });
  const messages = told();
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  const body = { model: chat.model, messages };
  if (chat.temperature !== "") body.temperature = Number(chat.temperature);
  if (chat.most !== "") body.max_tokens = Number(chat.most);
  const answer = new Answer(body, changed);
  chat.turns.push({ role: "assistant", answer });
  chat.draft = "";
  save();
  const message = document.getElementById("message");
  if (message) message.value = "";
  chat.view?.redraw();
  scrollTo(0, document.documentElement.scrollHeight);
  await answer.run();
}

function settings(models) {
  const listed = !chat.model || served() ? models : [chat.model, ...models];
  // The address names the model, so that a way back to this page keeps the choice.
  const choose = (event) => {
    chat.model = event.target.value;
    history.replaceState(null, "", hrefTo(["chat"], { model: chat.model }));
    chat.view?.redraw();
  };
  const set = (name) => (event) => (chat[name] = event.target.value);
  const number = (name, label, properties, help) =>
    h("div", { class: "field" }, h("label", { for: `chat-${name}` }, label), h("input", { id: `chat-${name}`, type: "number", value: chat[name], oninput: set(name), placeholder: help, ...properties }));
  return h(
    "aside",
    { class: "settings", "aria-label": "Settings" },
    h("div", { class: "field" },
      h("label", { for: "chat-model" }, "Model"),
      h("select", { id: "chat-model", onchange: choose }, listed.map((id) => h("option", { key: id, value: id, selected: id === chat.model }, id)))),
    h("details", { class: "more", open: WIDE },
      h("summary", {}, "Settings"),
      h("div", { class: "field" },
        h("label", { for: "chat-system" }, "System prompt"),
        h("textarea", { id: "chat-system", rows: 4, value: chat.system, dir: "auto", oninput: set("system") })),
      number("temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, "the model's"),
      number("most", "Most tokens", { min: 1, step: 1 }, "the rest of the context")),
  );
}
