// The farm: what needs an operator, live plots, models with their replicas, hosts and API processes.

import { drain, load, reload, restart, resume, scale, takeBack } from "../lib/acts.js";
import { findings, judged } from "../lib/attention.js";
import { h } from "../lib/dom.js";
import { bytes, count, duration, integer, percent, rate } from "../lib/format.js";
import { badge, button, command, empty, head, hostLink, link, modelLink, section, table } from "../lib/parts.js";
import { memoryMeter, meter } from "../lib/plot.js";
import { plots } from "../lib/plots.js";
import { causeOf, hostState, ranksInWords, stateOf } from "../lib/states.js";

const SHOWN = 100;
const MORE = 400;
const SHOWN_FINDINGS = 8;

export default {
  path: "/",
  title: "Farm",
  nav: "Farm",
  open(view) {
    const chosen = { text: "", most: SHOWN, findings: false };
    return () => draw(view, chosen);
  },
};

function draw(view, chosen) {
  const { card, history } = view.farm;
  const acts = [button("Load a model…", () => load(view), { kind: card?.models.length ? "plain" : "primary" })];
  if (!card) return [head("Farm"), h("p", { class: "muted", key: "wait" }, "Waiting for the first snapshot…")];
  return [
    head("Farm", { acts }),
    attention(view, findings(card, history), chosen),
    plots(history.of()),
    models(view, card, chosen),
    hosts(view, card),
    processes(card),
    servers(card),
  ];
}

function attention(view, found, chosen) {
  if (!found.length) {
    const { models, hosts } = view.farm.card;
    if (!models.length || !hosts.length || view.farm.status !== "live") return null;
    return h("p", { class: "well", key: "well" }, badge("All is well", "good"));
  }
  const shown = chosen.findings ? found : found.slice(0, SHOWN_FINDINGS);
  const rest = found.length - shown.length;
  const items = shown.map((one) =>
    h(
      "li",
      { class: one.tone, key: `${one.what}` },
      h("div", {}, h("p", { class: "strong" }, about(one)), one.cause ? h("p", { class: "cause" }, one.cause) : null),
      mend(view, one),
    ));
  const more = () => ((chosen.findings = true), view.redraw());
  return section(
    "Needs attention",
    [h("ul", { class: "findings" }, items), rest ? h("p", { class: "rest" }, button(`Show ${integer(rest)} more`, more)) : null],
    { note: count(found.length, "finding") },
  );
}

function about(one) {
  if (one.host) return link(one.what, ["hosts", one.host]);
  return one.model ? link(one.what, ["models", one.model]) : one.what;
}

function mend(view, { act, model, replica, host }) {
  const found = view.farm.card.models.find((one) => one.model === model);
  const acts = {
    retry: () => button("Try again…", () => reload(view, model)),
    restart: () => button("Restart replica…", () => restart(view, model, replica)),
    resume: () => button("Resume", () => resume(view, model)),
    scale: () => button("Scale…", () => scale(view, found)),
    takeBack: () => button("Take back", () => takeBack(view, host)),
    letters: () => link("Show dead letters", ["dead"], { model }),
  };
  return h("div", { class: "acts" }, acts[act]?.() ?? null);
}

function models(view, card, chosen) {
  if (!card.models.length)
    return section("Models", empty("No model is loaded.", ["Load one with the button above, or with ", command("furrow models load MODEL"), "."]));
  const all = card.models.flatMap((model) =>
    model.replicas.length ? model.replicas.map((replica, place) => ({ model, replica, place })) : [{ model, replica: null, place: 0 }]);
  const text = chosen.text.toLowerCase();
  const found = all.filter(({ model, replica }) =>
    `${model.model} ${replica?.replica} ${stateOf(model, replica)} ${replica?.host}`.toLowerCase().includes(text));
  const rows = found.slice(0, chosen.most);
  const serving = card.models.filter((model) => model.state === "loaded").length;
  const parts = [table(columns(view), rows, { key: ({ model, replica }) => `${model.model} ${replica?.replica}`, kind: ({ place }) => (place ? "again" : null), label: "Models" })];
  if (!rows.length) parts.push(h("p", { class: "rest" }, "No replica has that in its name, state or host."));
  if (rows.length < found.length)
    parts.push(h("p", { class: "rest" }, button(`Show more of ${integer(found.length)} replicas`, () => ((chosen.most += MORE), view.redraw()))));
  const filter = all.length > 10 || chosen.text ? search(view, chosen) : [];
  return section("Models", parts, { acts: filter, note: `${integer(serving)} of ${integer(card.models.length)} serve` });
}

function search(view, chosen) {
  const oninput = (event) => ((chosen.text = event.target.value), view.redraw());
  return h("input", { type: "search", class: "search", placeholder: "Filter", "aria-label": "Filter models", oninput, key: "search" });
}

function columns(view) {
  const last = ({ model, replica }) => view.farm.history.last(model.model, replica?.replica ?? "-");
  return [
    { name: "Model", kind: "name", cell: ({ model }) => modelLink(model.model) },
    { name: "Replica", cell: ({ replica }) => replica?.replica ?? "none" },
    { name: "State", cell: ({ model, replica }) => [badge(stateOf(model, replica)), causeOf(model, replica)] },
    { name: "Host", kind: "short", cell: ({ replica }) => (replica?.host ? replica.host.split(",").map((id) => h("div", { key: id }, hostLink(id))) : "–") },
    { name: "Ranks", kind: "short", cell: ({ model, replica }) => ranksInWords(model, replica, view.farm.history) },
    { name: "Tokens/s", right: true, cell: (row) => rate(last(row).rate) },
    { name: "First token", right: true, cell: (row) => duration(last(row).first) },
    { name: "Running", right: true, cell: (row) => integer(last(row).running) },
    { name: "Waiting", right: true, cell: ({ model, place }) => (place ? "" : integer(model.queued)) },
    { name: "KV", right: true, cell: (row) => meter(last(row).kv, percent(last(row).kv)) },
  ];
}

function hosts(view, card) {
  if (!card.hosts.length)
    return section("Hosts", empty("No host has joined.", ["Start a worker on each host: ", command("furrow worker"), ", with this farm's ", command("REDIS_URL"), "."]));
  const rows = [
    { name: "Host", kind: "name", cell: (host) => hostLink(host.id) },
    { name: "State", cell: (host) => [badge(hostState(host)), marks(card, host.id)] },
    { name: "Machine", kind: "short", cell: machineOf },
    { name: "Engines", cell: (host) => ["furrow", ...host.engines].join(", ") },
    { name: "Memory", kind: "short", cell: planned },
    { name: "Version", cell: (host) => host.version ?? "–" },
    { name: "Replicas", cell: (host) => (host.replicas.length ? host.replicas.join(", ") : "none") },
    { name: "", right: true, cell: (host) => (host.drained
      ? button("Take back", () => takeBack(view, host.id), { label: `Take back ${host.id}` })
      : button("Drain…", () => drain(view, host.id), { label: `Drain ${host.id}` })) },
  ];
  return section("Hosts", table(rows, card.hosts, { key: (host) => host.id, label: "Hosts" }), { note: `${integer(card.hosts.filter((host) => host.alive).length)} alive` });
}

// Processors, memory and accelerators of a host; the names of its devices where it tells no more.
export function machineOf({ machine, accelerators, devices, alive }) {
  const known = Object.entries(accelerators);
  const rest = devices.filter((name) => !(name in accelerators)).join(", ");
  const lines = [
    machine ? `${count(machine.processors, "processor")}, load ${machine.load.toFixed(1)}` : null,
    machine ? meter(1 - machine.free / machine.memory, `${bytes(machine.free)} of ${bytes(machine.memory)} free`) : null,
    ...known.map(([name, { total, free }]) => meter(1 - free / total, `${name}: ${bytes(free)} of ${bytes(total)} free`)),
    rest || null,
  ].filter(Boolean);
  return lines.length ? lines.map((line, index) => h("div", { key: `${index}` }, line)) : alive ? "cpu" : "–";
}

// The part of each device's memory that was given to replicas; of one that is not planned what is free.
function planned(host) {
  return host.memory.length ? host.memory.map((one) => h("div", { key: one.device }, memoryMeter(one, host.memory.length > 1))) : "–";
}

// How many warnings and errors there are about a host.
function marks(card, id) {
  const found = judged(card).filter((one) => one.subject === "hosts" && one.where === id);
  if (!found.length) return null;
  const errors = found.filter((one) => one.level === "error").length;
  return [" ", errors ? badge(count(errors, "error"), "bad") : badge(count(found.length, "warning"), "warn")];
}

function servers(card) {
  if (!card.redis?.length) return null;
  const persistence = (one) => (one.persistence !== "ok" ? badge(one.persistence, "bad") : one.append_only ? "append-only file" : badge("no append-only file", "warn"));
  const columns = [
    { name: "Server", kind: "name", cell: (one) => one.address },
    { name: "Memory", right: true, cell: (one) => (one.most ? meter(one.used / one.most, `${bytes(one.used)} of ${bytes(one.most)}`) : bytes(one.used)) },
    { name: "When full", cell: (one) => (one.eviction === "noeviction" ? "refuses writes" : badge(`evicts: ${one.eviction}`, "bad")) },
    { name: "Persistence", cell: persistence },
  ];
  return section("Redis", table(columns, card.redis, { key: (one) => one.address, label: "Redis" }));
}

function processes(card) {
  return section("API processes", h("ul", { class: "tags" }, card.apis.map((id) => h("li", { key: id, class: "mono" }, id))), { note: `${integer(card.apis.length)} alive` });
}
