// A chat to try a model. The conversation lives as long as the tab, reloads included.

import { Answer } from "../lib/answer.js";
import { farewells, withQuery } from "../lib/api.js";
import { copyButton } from "../lib/clipboard.js";
import { forget, keep, kept } from "../lib/conversation.js";
import { confirm } from "../lib/dialogs.js";
import { h } from "../lib/dom.js";
import { count, duration, integer, rate } from "../lib/format.js";
import { markdown } from "../lib/markdown.js";
import { notify } from "../lib/notices.js";
import { button, command, empty, head, link } from "../lib/parts.js";
import { hrefTo } from "../lib/router.js";

// On a narrow page the settings would push the conversation away.
const WIDE = matchMedia("(min-width: 721px)").matches;

// A screen that is touched would cover half of the page with its keyboard.
const TYPES = matchMedia("(hover: hover)").matches;
const MOST_IMAGES = 8;

export default { path: "/chat", title: "Chat", nav: "Chat", ordinary: true, open };

// `turns`: `{role, text, answer, images, lost}`; an assistant's turn has its Answer, a visitor's may have images, as
// data addresses, and counts those that a reload has dropped in `lost`. `models` are those that can be asked now, null
// until they are read; `model` is the chosen one, which stays chosen while it can't be asked. `editing` is the place of
// the turn that the draft takes the place of, null for a new one. `sees`: by model, whether it takes images.
const chat = { turns: [], models: null, model: "", system: "", temperature: "", most: "", draft: "", images: [], editing: null, sees: {}, view: null, drawn: 0 };
// The texts that are in the document as they will stay, by answer: they are not drawn again.
let settled = new WeakMap();
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
  Object.assign(chat, { turns: [], draft: "", images: [], editing: null });
  forget();
  chat.view?.redraw();
}

function open(view) {
  chat.view = view;
  view.signal.addEventListener("abort", () => chat.view === view && (chat.view = null));
  if (view.query.model) chat.model = view.query.model;
  chat.models = null;
  settled = new WeakMap();
  view.poll(5, async (api) => {
    const first = chat.models === null;
    const { data } = await api.get("/v1/models", { signal: view.signal });
    chat.models = data.filter((model) => !model.kind || model.kind === "generate").map(({ id }) => id);
    chat.model ||= chat.models[0] ?? "";
    await look(view).catch(() => {});
    if (first && TYPES) requestAnimationFrame(beginAtMessage);
  });
  return draw;
}

// Whether the chosen model takes images; asked once.
async function look(view) {
  const { model } = chat;
  if (!served() || model in chat.sees) return;
  const props = await view.api.get(withQuery("/props", { model }), { signal: view.signal });
  chat.sees[model] = props.modalities.vision;
}

// The message box gets the focus, unless the visitor is elsewhere already.
function beginAtMessage() {
  const at = document.activeElement;
  if (!at || at === document.body || at.matches("main, main h1")) focusMessage();
}

function focusMessage() {
  document.getElementById("message")?.focus({ preventScroll: true });
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

function turn({ role, text, answer, images = [], lost = 0 }, index) {
  const name = role === "user" ? "You" : answer.body.model;
  const body = answer
    ? [
        answer.reasoning ? h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), h("div", { class: "said", dir: "auto" }, answer.reasoning)) : null,
        written(answer),
        status(answer),
      ]
    : [pictures(images), lost ? h("p", { class: "help" }, `${count(lost, "image")} of this message: a reload keeps none.`) : null, h("div", { class: "said", dir: "auto" }, text)];
  return h("article", { class: `turn ${role}${chat.editing === index ? " edited" : ""}`, key: `${index}` }, h("header", {}, h("h2", {}, h("bdi", {}, name)), acts(index)), body);
}

// The text of an answer. Once it has ended it is drawn a last time, and stays: what a visitor selects in it stays selected.
function written(answer) {
  const stays = settled.get(answer) === answer.text;
  if (!answer.open) settled.set(answer, answer.text);
  return h("div", { class: "said markdown", dir: "auto", key: "said", keep: stays }, stays ? [] : markdown(answer.text));
}

function pictures(images, remove = null) {
  if (!images.length) return null;
  const shown = ({ name, url }, index) =>
    h("li", { key: `${index}-${name}` }, h("img", { src: url, alt: name }), remove ? button("×", () => remove(index), { label: `Remove ${name}` }) : null);
  return h("ul", { class: "pictures", key: "pictures", "aria-label": "Images" }, images.map(shown));
}

// What can be done with a turn: copied, and while nothing runs a message changed, or the last answer asked for again.
function acts(index) {
  const { role, text, answer } = chat.turns[index];
  const found = [];
  if (answer ? answer.text : text) found.push(copyButton(answer ? "Copy answer" : "Copy message", () => (answer ? answer.text : text), "copy"));
  if (!running() && role === "user") found.push(small("Edit", () => edit(index), "Edit message"));
  if (!running() && answer && index === chat.turns.length - 1 && served()) found.push(small("Retry", retry, "Retry: ask for another answer"));
  return h("div", { class: "acts" }, found);
}

const small = (text, onclick, label) => h("button", { type: "button", class: "button small", "aria-label": label, key: text, onclick }, text);

// Take a message back into the box; what follows it goes only once the changed one is sent.
function edit(index) {
  const { text, images = [] } = chat.turns[index];
  Object.assign(chat, { draft: text, images: [...images], editing: index });
  redrawMessage();
}

function leaveEdit() {
  Object.assign(chat, { draft: "", images: [], editing: null });
  redrawMessage();
}

function redrawMessage() {
  const message = document.getElementById("message");
  if (message) message.value = chat.draft;
  chat.view?.redraw();
  focusMessage();
}

// Another answer in place of the last one.
function retry() {
  if (running() || !served()) return;
  chat.turns.pop();
  focusMessage();
  return ask();
}

function status(answer) {
  const life = answer.rid && chat.view?.farm.status !== "refused" ? link("Request", ["requests", answer.rid]) : null;
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
  const pasted = (event) => {
    if (event.clipboardData?.files.length && seesImages()) event.preventDefault();
    attach(event.clipboardData?.files ?? []);
  };
  const remove = (index) => (chat.images.splice(index, 1), redrawMessage());
  return [editingNote(), pictures(chat.images, remove), h(
    "form",
    { class: "composer", onsubmit: submitted, key: "composer" },
    seesImages() ? attachment() : null,
    h("textarea", { id: "message", rows: 3, "aria-label": "Message", placeholder: "Message (Enter sends, Shift-Enter begins a line)", value: chat.draft, dir: "auto", oninput: (event) => (chat.draft = event.target.value), onkeydown: keys, onpaste: pasted }),
    running()
      ? h("button", { type: "button", class: "button danger", key: "stop", onclick: stop }, "Stop")
      : h("button", { type: "submit", class: "button primary", key: "send", disabled: !served() }, "Send"),
  )];
}

function editingNote() {
  if (chat.editing === null) return null;
  const later = chat.turns.length - chat.editing - 1;
  const text = later ? `You change a message. Sending drops the ${count(later, "message")} after it.` : "You change a message.";
  return h("p", { class: "help editing", role: "status", key: "editing" }, h("span", {}, text), small("Cancel", leaveEdit, "Cancel: leave the message as it was"));
}

const seesImages = () => chat.sees[chat.model] ?? false;

function attachment() {
  const chosen = ({ target }) => (attach(target.files), (target.value = ""));
  return h("label", { class: "button attach", key: "attach" }, "Images", h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, "aria-label": "Add images", onchange: chosen }));
}

// Put images before the message.
async function attach(files) {
  if (!seesImages()) return;
  const images = [...files].filter(({ type }) => type.startsWith("image/"));
  if (chat.images.length + images.length > MOST_IMAGES) notify(`A message takes at most ${MOST_IMAGES} images here.`, "bad");
  for (const file of images.slice(0, MOST_IMAGES - chat.images.length)) chat.images.push({ name: file.name || "image", url: await addressOf(file) });
  redrawMessage();
}

function addressOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function stop() {
  chat.turns.at(-1)?.answer?.stop();
  focusMessage();
}

async function restart() {
  if (running()) {
    const text = "The answer that runs is stopped, and this conversation is dropped.";
    if (!(await confirm({ title: "Begin a new chat?", text, act: "Stop and begin" }))) return;
  }
  drop();
  focusMessage();
}

// The messages for the model: turns without an answer's text are left out with it, because templates of many models refuse
// two messages of one role in a row.
function told() {
  const { turns } = chat;
  const kept = turns.filter(({ answer }, index) => (answer ?? turns[index + 1]?.answer ?? { text: true }).text);
  return kept.map(({ role, text, answer, images = [] }) => ({ role, content: images.length ? parts(images, text) : answer ? answer.text : text }));
}

function parts(images, text) {
  return [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function send() {
  const text = chat.draft.trim();
  if (!text || running() || !served()) return;
  if (chat.editing !== null) chat.turns.length = Math.min(chat.turns.length, chat.editing);
  chat.turns.push({ role: "user", text, images: chat.images });
  Object.assign(chat, { draft: "", images: [], editing: null });
  return ask();
}

// Have the model answer the conversation as it stands.
async function ask() {
  const messages = told();
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  const body = { model: chat.model, messages };
  if (chat.temperature !== "") body.temperature = Number(chat.temperature);
  if (chat.most !== "") body.max_tokens = Number(chat.most);
  const answer = new Answer(body, changed);
  chat.turns.push({ role: "assistant", answer });
  save();
  redrawMessage();
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
    look(chat.view).then(() => chat.view?.redraw(), () => {});
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
      number("temperature", "Temperature", { min: 0, max: 5, step: 0.1 }, "the model's"),
      number("most", "Most tokens", { min: 1, step: 1 }, "the rest of the context")),
  );
}
