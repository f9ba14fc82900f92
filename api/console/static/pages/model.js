// One model: its plots, replicas with their ranks, settings, and all that can be done to it.

import { load, pause, reload, restart, resume, scale, unload } from "../lib/acts.js";
import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { ago, bytes, count, duration, integer, moment, percent, rate } from "../lib/format.js";
import { notify } from "../lib/notices.js";
import { badge, button, empty, facts, head, hostLink, link, section, table } from "../lib/parts.js";
import { plots } from "../lib/plots.js";
import { causeOf, pendingInWords, rankState, stateOf } from "../lib/states.js";

export default {
  path: "/models/:model",
  title: ({ model }) => model,
  nav: "Farm",
  open(view) {
    const settings = new Settings(view);
    const known = { memory: null };
    view.poll(5, async (api) => {
      known.memory = await api.get(withQuery("/farm/models/memory", { model: view.params.model }), { signal: view.signal });
    });
    return () => draw(view, settings, known);
  },
};

// The model's specification, read again after each change of a setting, here or elsewhere.
class Settings {
  spec = null;
  #read = null;
  #update = null;

  constructor(view) {
    this.view = view;
  }

  async follow(model) {
    const { settings } = model;
    if (settings === this.#read) return;
    this.#read = settings;
    try {
      const spec = await this.fetch();
      if (settings !== this.#read) return;
      this.spec = spec;
      this.#update?.(spec);
      this.view.redraw();
    } catch {
      this.#read = null;
    }
  }

  fetch() {
    // An answer from before the change would be kept until the next one.
    const options = { signal: this.view.signal, fresh: true };
    return this.view.api.get(withQuery("/farm/models/spec", { model: this.view.params.model }), options);
  }

  async change() {
    try {
      await load(this.view, await this.fetch(), (update) => {
        this.#update = update;
        this.#read = null; // a change since that reading
      });
    } catch (error) {
      if (error.name !== "AbortError") notify(error.message, "bad");
    } finally {
      this.#update = null;
    }
  }
}

function draw(view, settings, { memory }) {
  const name = view.params.model;
  const { card, history } = view.farm;
  if (!card) return [head(name, { over: "Model" }), h("p", { class: "muted", key: "wait" }, "Waiting for the first snapshot…")];
  const model = card.models.find((one) => one.model === name);
  if (!model) return [head(name, { over: "Model" }), h("div", { key: "none" }, empty("The farm has no model of this name.", ["It was unloaded, or never loaded. ", link("Go to the farm", [])]))];
  if (!["draining", "unloading"].includes(model.state)) settings.follow(model);
  const state = stateOf(model, null);
  return [
    head(name, { over: "Model", beside: badge(state), acts: acts(view, model, settings) }),
    model.detail ? h("p", { class: `detail ${state}`, key: "detail" }, model.detail) : null,
    plots(history.of(name)),
    summary(view, model),
    memorySection(model, memory),
    model.replicas.map((replica) => replicaSection(view, model, replica)),
    settings.spec ? section("Settings", facts(specFacts(settings.spec)), { acts: [button("Change settings…", () => settings.change())] }) : null,
  ];
}

function acts(view, model, settings) {
  const name = model.model;
  return [
    link("Requests", ["requests"], { model: name }),
    link("History", ["history"], { model: name }),
    model.paused ? button("Resume", () => resume(view, name), { kind: "primary", key: "pause" }) : button("Pause", () => pause(view, name), { key: "pause" }),
    button("Scale…", () => scale(view, model), { key: "scale" }),
    button("Restart replicas…", () => reload(view, name), { key: "reload" }),
    button("Unload…", () => unload(view, name), { kind: "danger", key: "unload" }),
  ];
}

function summary(view, model) {
  const last = view.farm.history.last(model.model);
  const { load: told } = model;
  const poisons = Object.entries(told.poisons).map(([kind, number]) => `${kind} ${integer(number)}`);
  const letters = view.farm.card.dead_letters[model.model] ?? 0;
  const classes = Object.entries(told.by_class).filter(([, number]) => number).map(([name, number]) => `${name} ${integer(number)}`);
  return section("Load", facts([
    ["Replicas serving", `${integer(model.replicas.filter((one) => one.state === "loaded").length)} of ${integer(model.wanted)}`],
    ["Running requests", integer(last.running)],
    ["Waiting requests", classes.length > 1 ? `${integer(model.queued)} (${classes.join(", ")})` : integer(model.queued)],
    ["Expected wait", told.expected_wait_ms == null ? "not known yet" : told.expected_wait_ms === 0 ? "none" : duration(told.expected_wait_ms)],
    ["Requests since the first load", `${integer(told.enqueued)}, ${integer(told.ended)} ended`],
    ["Epochs", integer(told.epochs)],
    ["Faults", poisons.length ? poisons.join(", ") : "none"],
    ["Dead letters", letters ? link(integer(letters), ["dead"], { model: model.model }) : "none"],
    ["Context", model.assets ? count(Number(model.assets[2]), "token") : null],
    ["KV memory of a replica", model.assets ? count(Number(model.assets[1]), "token") : null],
  ]));
}

const totalOf = (rank) => rank.weights + rank.kv + rank.step + rank.process;

// What a rank needs; where a replica has no place, also what each host has left for all ranks of one.
function memorySection(model, memory) {
  if (!memory?.ranks.length) return null;
  const onGpus = memory.hosts.some(({ device }) => device !== "cpu");
  const onCpus = !onGpus || memory.hosts.some(({ device }) => device === "cpu");
  const parts = [onCpus ? need(memory.ranks, memory, onGpus ? " on CPUs" : "") : null, onGpus ? need(memory.gpu_ranks, memory, " on a GPU") : null];
  const isPlaced = model.replicas.filter((one) => one.placed).length >= model.wanted;
  const hosts = isPlaced || !memory.hosts.length ? null : table(FITS, memory.hosts, { key: ({ host, device }) => `${host} ${device}`, label: "Hosts' memory" });
  return section("Memory", [parts, hosts], { note: isPlaced ? null : "a replica has no place" });
}

function need(ranks, { kv_tokens: tokens }, where) {
  const largest = ranks.reduce((one, other) => (totalOf(other) > totalOf(one) ? other : one));
  const about = largest.exact ? "" : "about ";
  const name = ranks.length > 1 ? `Each of ${ranks.length} ranks needs${where}` : `A rank needs${where}`;
  return facts([
    [name, `${about}${bytes(totalOf(largest))}`],
    ["Weights", `${about}${bytes(largest.weights)}`],
    ["KV memory", largest.kv ? `${bytes(largest.kv)} for ${count(tokens, "token")}` : "none"],
    ["A step", bytes(largest.step)],
    ["The process", bytes(largest.process)],
  ]);
}

const FITS = [
  { name: "Host", kind: "name", cell: ({ host, device }) => [hostLink(host), device === "cpu" ? null : ` ${device}`] },
  { name: "Needs", right: true, cell: ({ needs }) => bytes(needs) },
  { name: "Has", right: true, cell: ({ has }) => bytes(has) },
  { name: "", kind: "short", cell: ({ needs, has }) => (needs <= has ? badge("fits", "good") : badge(`${bytes(needs - has)} too little`, "bad")) },
];

function replicaSection(view, model, replica) {
  const { history } = view.farm;
  const last = history.last(model.model, replica.replica);
  const old = replica.revision !== model.revision ? h("span", { class: "note" }, `revision ${replica.revision} of ${model.revision}`) : null;
  const ranks = replica.beats.map((beat, rank) => ({ beat, rank, state: rankState(model, replica, rank, history) }));
  const told = [
    ["Tokens per second", rate(last.rate)],
    ["Time to first token", duration(last.first)],
    ["Running requests", integer(last.running)],
    ["KV memory in use", percent(last.kv)],
    ["Epoch", replica.epoch ? [h("span", { class: "mono epoch" }, String(replica.epoch)), h("div", { class: "note" }, `began ${moment(replica.epoch)}, ${ago(replica.epoch)}`)] : "none yet"],
    ["Backend", replica.backend ? backend(replica.backend) : null],
  ];
  return section(
    `Replica ${replica.replica}`,
    [causeOf(model, replica) ? h("div", { class: "causes" }, causeOf(model, replica)) : null, facts(told), ranks.length ? table(RANKS, ranks, { key: ({ rank }) => rank, kind: ({ state }) => state, label: `Ranks of ${replica.replica}` }) : null],
    { key: `replica ${replica.replica}`, note: [badge(stateOf(model, replica)), old], acts: [button("Restart replica…", () => restart(view, model.model, replica.replica), { label: `Restart replica ${replica.replica}` })] },
  );
}

function backend(one) {
  const parts = [one.weights?.slice?.(0, 12), one.dtype, one.quant, one.kernels].filter(Boolean);
  return h("span", { class: "mono" }, parts.join(" · "));
}

const RANKS = [
  { name: "Rank", cell: ({ rank }) => String(rank) },
  { name: "State", cell: ({ beat, state }) => [badge(state), beat?.phase === "loading" && beat.weight_bytes ? ` ${bytes(beat.read_bytes)} of ${bytes(beat.weight_bytes)}` : null] },
  { name: "Device", cell: ({ beat }) => beat?.device ?? "–" },
  { name: "Host", kind: "name", cell: ({ beat }) => (beat?.host ? hostLink(beat.host) : "–") },
  { name: "Process", right: true, cell: ({ beat }) => (beat ? String(beat.pid) : "–") },
  { name: "Step", right: true, cell: ({ beat }) => integer(beat?.seq) },
  { name: "Busy for", right: true, cell: ({ beat }) => (beat ? pendingInWords(beat) : "–") },
  { name: "Memory", right: true, cell: ({ beat }) => bytes(beat?.memory_bytes) },
];

function specFacts(spec) {
  const yes = (value) => (value ? "yes" : "no");
  const onOff = (value) => (value ? "on" : "off");
  return [
    ["Source", h("span", { class: "mono" }, spec.source)],
    ["GGUF file", spec.gguf],
    ["Engine", !spec.engine || spec.engine === "furrow" ? null : [spec.engine, ...Object.entries(spec.engine_args ?? {}).map(([name, value]) => `${name}=${value}`)].join(" ")],
    ["Revision", integer(spec.revision)],
    ["Ranks of a replica (TP)", integer(spec.tp)],
    ["Replicas wanted", spec.min_replicas == null ? integer(spec.replicas) : `${spec.min_replicas} to ${spec.replicas}, as requests need`],
    ["Sleeps without requests after", spec.min_replicas === 0 ? duration(spec.idle_s * 1_000) : null],
    ["Devices", spec.devices.length ? spec.devices.join(", ") : "the host chooses"],
    ["Number type", spec.dtype],
    ["Packing of weights", spec.quant],
    ["Longest context", spec.max_context == null ? "the model's" : count(spec.max_context, "token")],
    ["KV memory", spec.kv_tokens == null ? "what the devices have" : count(spec.kv_tokens, "token")],
    ["Prompt lookup", spec.lookup ? `${count(spec.lookup, "token")} a step` : "off"],
    ["Prefix cache", onOff(spec.prefix_cache)],
    ["Images", onOff(spec.images)],
    ["Deterministic", spec.deterministic ? "yes" : null],
    ["Dequantized", spec.dequantize ? "yes" : null],
    ["Spread over hosts", yes(spec.spread)],
    ["Surge while replacing", yes(spec.surge)],
    ["Drain time", duration(spec.drain_s * 1_000)],
  ];
}
