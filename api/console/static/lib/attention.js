// Findings that need an operator, from a snapshot of GET /farm, worst first.

import { count, duration } from "./format.js";

const LONG_WAIT_MS = 60_000;
const ORDER = ["bad", "warn", "busy"];
// Checks that are told below in other words, or are no reason to act.
const TOLD = new Set(["alive", "drained", "version", "facts"]);

// Findings: `tone`, `what` (a sentence), `cause`, and `model`, `replica` or `host` that it is about; `act` names the act
// that mends it: "retry", "restart", "resume", "scale", "takeBack", "letters"; null where no act does.
export function findings(card, history) {
  const away = new Set(card.hosts.filter((host) => !host.alive && !host.drained).map(({ id }) => id));
  const found = [...card.models.flatMap((model) => ofModel(model, history, away)), ...card.hosts.flatMap(ofHost)];
  for (const [model, letters] of Object.entries(card.dead_letters))
    found.push({ tone: "warn", model, what: `${count(letters, "dead letter")} of ${model}`, cause: "Requests that crashed their ranks when they ran alone.", act: "letters" });
  found.push(...versions(card.hosts), ...judged(card).map(ofJudgement));
  return found.sort((one, other) => ORDER.indexOf(one.tone) - ORDER.indexOf(other.tone));
}

// The warnings and errors of the server that the page shows: hosts by their facts, files that differ, Redis.
export function judged(card) {
  const off = (one) => one.check === "persistence" && one.level === "warning"; // shown in the table of Redis servers
  return (card.findings ?? []).filter((one) => !TOLD.has(one.check) && !off(one));
}

function ofJudgement({ subject, where, check, level, message, remedy }) {
  const what = subject === "redis" ? `Redis at ${where}: ${message}` : `${where} ${check}: ${message}`.trim();
  const about = { hosts: { host: where }, models: { model: where } }[subject] ?? {};
  return { ...about, tone: level === "error" ? "bad" : "warn", what, cause: remedy, act: null };
}

function ofModel(model, history, away) {
  const name = model.model;
  // A host that is away is one finding, which names its replicas.
  const here = model.replicas.filter((replica) => !(ILL.includes(replica.state) && replica.host?.split(",").some((id) => away.has(id))));
  const found = together(here.flatMap((replica) => ofReplica(model, replica, history)));
  if (model.paused)
    found.push({ tone: "warn", model: name, what: `${name} is paused`, cause: waiting(model), act: "resume" });
  const wait = model.load.expected_wait_ms;
  if (!model.paused && wait > LONG_WAIT_MS)
    found.push({ tone: "warn", model: name, what: `A new request of ${name} waits about ${duration(wait)}`, cause: waiting(model), act: "scale" });
  return found;
}

const ILL = ["failed", "poisoned", "recovering"];

// Findings of several replicas with one cause as one.
function together(found) {
  const groups = grouped(found);
  return [...groups.values()].map((same) => {
    const [first] = same;
    if (same.length === 1) return first;
    const what = `${first.model} ${same.map(({ replica }) => replica).join(", ")}${first.what.slice(`${first.model} ${first.replica}`.length).replace(/^ has /, " have ")}`;
    return { ...first, what, act: first.act === "retry" ? "retry" : null };
  });
}

const kindOf = ({ tone, what, model, replica, cause }) => [tone, what.slice(`${model} ${replica}`.length), cause].join("\n");

function grouped(found) {
  const groups = new Map();
  for (const one of found) groups.set(kindOf(one), [...(groups.get(kindOf(one)) ?? []), one]);
  return groups;
}

function waiting(model) {
  return model.queued ? `${count(model.queued, "request")} ${model.queued === 1 ? "waits" : "wait"}.` : "No request waits.";
}

function ofReplica(model, replica, history) {
  const about = { model: model.model, replica: replica.replica, cause: replica.detail };
  const what = `${model.model} ${replica.replica}`;
  if (replica.state === "failed" && !replica.placed) return [{ ...about, tone: "bad", what: `${what} has no host`, act: null }];
  if (replica.state === "failed") return [{ ...about, tone: "bad", what: `${what} has failed`, act: "retry" }];
  if (replica.state === "poisoned") return [{ ...about, tone: "bad", what: `${what} leaves its epoch after a fault`, act: "restart" }];
  if (replica.state === "recovering") return [{ ...about, tone: "busy", what: `${what} is recovering`, act: "restart" }];
  const slow = replica.beats.findIndex((beat, rank) => beat && history.isSlow(model.model, replica.replica, rank));
  if (slow < 0) return [];
  const cause = `Rank ${slow} on ${replica.beats[slow].device} of ${replica.beats[slow].host} holds up the others.`;
  return [{ ...about, tone: "warn", what: `${what} has a slow rank`, cause, act: "restart" }];
}

function ofHost(host) {
  const held = count(host.replicas.length, "replica");
  if (host.drained) return [{ tone: "warn", host: host.id, what: `${host.id} is drained`, cause: `It gets no new replica, and has ${held}.`, act: "takeBack" }];
  const remedy = `Start furrow worker there, or run furrow drain ${host.id} if it shall stay away.`;
  const names = host.replicas.length ? `: ${host.replicas.join(", ")}` : "";
  if (!host.alive) return [{ tone: "bad", host: host.id, what: `${host.id} is away`, cause: `Its agent has no heartbeat; it has ${held}${names}. ${remedy}`, act: null }];
  return [];
}

function versions(hosts) {
  const known = [...new Set(hosts.map((host) => host.version).filter(Boolean))].sort();
  if (known.length < 2) return [];
  return [{ tone: "warn", what: "Hosts run different versions of Furrow", cause: `${known.join(", ")}. Upgrade the older ones.`, act: null }];
}
