// The chat of this tab: kept over reloads, dropped with the key that it was held with.

import { Answer } from "./answer.js";
import { tab } from "./storage.js";

const STORED = "furrow.chat";
// A browser gives a page some millions of characters; the key has its place too.
const MOST_CHARACTERS = 1_000_000;
const MOST_TURNS = 2_000;
const STATES = ["waiting", "answering", "resuming", "ended", "stopped", "failed"];
const SETTINGS = ["model", "system", "temperature", "most", "draft"];

// Keep the conversation: as many of its last turns as fit. Returns how many those are.
export function keep(chat) {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, chat[name]]));
  // Images are larger than the room that there is.
  const lost = ({ images = [], lost: before = 0 }) => images.length + before;
  const turns = chat.turns.map((turn) => {
    const { role, text, answer } = turn;
    return JSON.stringify(answer ? { role, answer: answer.record() } : { role, text, lost: lost(turn) });
  });
  let from = Math.max(0, turns.length - MOST_TURNS);
  for (let size = sum(turns.slice(from)); size > MOST_CHARACTERS; from++) size -= turns[from].length;
  // The room that there is may be less than the bound.
  for (;;) {
    if (chat.turns[from]?.role === "assistant") from++;
    const kept = turns.slice(from);
    if (tab.set(STORED, `{"settings":${JSON.stringify(settings)},"turns":[${kept.join(",")}]}`)) return kept.length;
    if (!kept.length) break;
    from += Math.ceil(kept.length / 2);
  }
  forget();
  return 0;
}

export function forget() {
  tab.remove(STORED);
}

// The kept conversation as fields of the chat; null where there is none. What another program wrote there is dropped whole.
export function kept(changed) {
  let found = null;
  try {
    found = checked(JSON.parse(tab.get(STORED) ?? "null"));
  } catch {
    found = null;
  }
  if (found === null) {
    forget();
    return null;
  }
  const turns = found.turns.map(({ role, text, answer, lost }) => (answer ? { role, answer: Answer.restore(answer, changed) } : { role, text, lost }));
  return { ...found.settings, turns };
}

const sum = (texts) => texts.reduce((size, text) => size + text.length, 0);
const isText = (value) => typeof value === "string";
const isTime = (value) => Number.isFinite(value) && value >= 0;
const isCount = (value) => Number.isInteger(value) && value >= 0;
const orNull = (check) => (value) => value === null || check(value);
const optional = (check) => (value) => value === undefined || check(value);
const fits = (form) => (value) => isText(value) && form.test(value);
const ROLES = ["system", "user", "assistant"];

const ASKED = {
  model: isText,
  temperature: optional(Number.isFinite),
  max_tokens: optional(Number.isFinite),
  messages: (found) => Array.isArray(found) && found.every((one) => one && ROLES.includes(one.role) && isText(one.content)),
};
const ANSWER = {
  asked: (found) => holds(found, ASKED),
  text: isText,
  reasoning: isText,
  state: (found) => STATES.includes(found),
  finish: orNull(isText),
  usage: orNull((found) => isCount(found?.completion_tokens)),
  error: orNull(isText),
  // These are sent as a part of an address, and as headers.
  rid: orNull(fits(/^[\w-]{1,200}$/)),
  last: orNull(fits(/^[\w.:,-]{1,4000}$/)),
  key: fits(/^console-[\d-]{1,100}$/),
  resumed: isCount,
  began: isTime,
  firstAt: isTime,
  lastAt: isTime,
};

function holds(found, checks) {
  return typeof found === "object" && found !== null && Object.entries(checks).every(([name, check]) => check(found[name]));
}

// A turn is a text of the visitor or an answer of a model; only the last answer can be under way.
function isTurn(turn, index, { length }) {
  if (turn?.role === "user") return isText(turn.text) && optional(isCount)(turn.lost);
  if (turn?.role !== "assistant" || !holds(turn.answer, ANSWER)) return false;
  return index === length - 1 || ["ended", "stopped", "failed"].includes(turn.answer.state);
}

function checked(found) {
  if (!Array.isArray(found?.turns) || !found.turns.every(isTurn)) return null;
  if (!SETTINGS.every((name) => isText(found.settings?.[name]))) return null;
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, found.settings[name]]));
  return { settings, turns: found.turns.map(cleaned) };
}

// Only the fields that were checked.
function cleaned({ role, text, answer, lost = 0 }) {
  if (role === "user") return { role, text, lost };
  const only = (from, checks) => Object.fromEntries(Object.keys(checks).map((name) => [name, from[name]]));
  const usage = answer.usage && { completion_tokens: answer.usage.completion_tokens };
  return { role, answer: { ...only(answer, ANSWER), usage, asked: only(answer.asked, ASKED) } };
}
