// One host: its devices and what runs on them.

import { drain, takeBack } from "../lib/acts.js";
import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { bytes, count, integer } from "../lib/format.js";
import { badge, button, empty, facts, head, link, modelLink, section, table } from "../lib/parts.js";
import { memoryMeter } from "../lib/plot.js";
import { hostState, pendingInWords, rankState, stateOf } from "../lib/states.js";

export default {
  path: "/hosts/:host",
  title: ({ host }) => host,
  nav: "Farm",
  open(view) {
    const known = { report: null };
    view.poll(5, async (api) => {
      known.report = (await api.get(withQuery("/farm/hosts", { host: view.params.host }), { signal: view.signal })).data[0] ?? null;
    });
    return () => draw(view, known);
  },
};

function draw(view, { report }) {
  const id = view.params.host;
  const { card } = view.farm;
  if (!card) return [head(id, { over: "Host" }), h("p", { class: "muted", key: "wait" }, "Waiting for the first snapshot…")];
  const host = card.hosts.find((one) => one.id === id);
  if (!host) return [head(id, { over: "Host" }), h("div", { key: "none" }, empty("The farm has no host of this name.", link("Go to the farm", [])))];
  const act = host.drained
    ? button("Take back", () => takeBack(view, id), { kind: "primary", key: "drain" })
    : button("Drain…", () => drain(view, id), { kind: "danger", key: "drain" });
  const remedy = host.drained ? "" : " Start furrow worker there, or drain the host if it shall stay away.";
  return [
    head(id, { over: "Host", beside: badge(hostState(host)), acts: [act] }),
    host.alive ? null : h("p", { class: "detail bad", key: "away" }, `Its agent has no heartbeat. Ranks that run there serve on, but none is replaced.${remedy}`),
    section("Host", facts([
      ["Devices", host.devices.length ? host.devices.join(", ") : host.alive ? "cpu" : "not known"],
      ["Version of Furrow", host.version ?? "not known"],
      ["Replicas", integer(host.replicas.length)],
      ["New replicas", host.drained ? "none: it is drained" : host.alive ? "taken" : "none: it is away"],
    ])),
    memorySection(host),
    trouble(report),
    machine(report?.facts),
    section("Replicas", replicas(view, host), { note: count(host.replicas.length, "replica") }),
    section("Ranks", ranks(view, host)),
  ];
}

// What the ranks of each device may have together, what replicas were given of it, and what is left and free.
function memorySection(host) {
  if (!host.memory.length) return null;
  const columns = [
    { name: "Device", cell: ({ device }) => (device === "cpu" ? "cpu (all ranks)" : device) },
    { name: "For ranks", right: true, cell: ({ given }) => (given == null ? "not planned" : bytes(given)) },
    { name: "Planned", right: true, cell: (one) => memoryMeter(one) },
    { name: "Left", right: true, cell: ({ given, left }) => (given == null ? "–" : bytes(left)) },
    { name: "Free now", right: true, cell: ({ free }) => bytes(free) },
  ];
  return section("Memory", table(columns, host.memory, { key: ({ device }) => device, label: "Memory" }));
}

// The warnings and errors about the host, each with its remedy.
function trouble(report) {
  if (!report?.findings.length) return null;
  const items = report.findings.map((one) =>
    h(
      "li",
      { class: one.level === "error" ? "bad" : "warn", key: `${one.check} ${one.message}` },
      h("div", {}, h("p", { class: "strong" }, `${one.check}: ${one.message}`), h("p", { class: "cause" }, one.remedy)),
    ));
  return section("Needs attention", h("ul", { class: "findings" }, items), { note: count(items.length, "finding") });
}

const free = (space) => (space ? `${bytes(space.free)} of ${bytes(space.total)} in ${space.path}` : "none, or no answer");

function machine(known) {
  if (!known) return null;
  const { machine: own } = known;
  const accelerators = Object.entries(known.devices).map(([name, { total, free: left }]) => `${name}: ${bytes(left)} of ${bytes(total)} free`);
  return section("Machine", facts([
    ["Processors", own ? integer(own.processors) : null],
    ["Load of the last minute", own ? own.load.toFixed(2) : null],
    ["Free memory", own ? `${bytes(own.free)} of ${bytes(own.memory)}` : null],
    ["GPUs", accelerators.length ? accelerators.join("; ") : null],
    ["Clock beside Redis", `${known.clock_ms > 0 ? "+" : ""}${integer(known.clock_ms)} ms`],
    ["Round trip to Redis", `${known.round_trip_ms.toFixed(1)} ms`],
    ["Free for models", free(known.models)],
    ["Free for packed weights", free(known.cache)],
    ["Free shared memory", free(known.shared_memory)],
    ["C++ compiler", known.compiler || "none"],
    ["Computed in C++", known.native ? `no: ${known.native}. CPUs run the reference in torch, in float32.` : "yes"],
    ["Kernels switched off", known.kernels_off.length ? known.kernels_off.join("; ") : "none"],
    ["Models whose files are here", Object.keys(known.files).join(", ") || "none"],
  ]));
}

function replicas(view, host) {
  const rows = host.replicas.map((named) => {
    const at = named.lastIndexOf(":");
    const model = view.farm.card.models.find((one) => one.model === named.slice(0, at));
    return { name: named.slice(0, at), place: named.slice(at + 1), assigned: host.assigned[named], model, replica: model?.replicas.find((one) => one.replica === named.slice(at + 1)) };
  });
  if (!rows.length) return empty("No replica is assigned to this host.");
  const columns = [
    { name: "Model", cell: ({ name }) => modelLink(name) },
    { name: "Replica", cell: ({ place }) => place },
    { name: "State", cell: ({ model, replica }) => (model && replica ? [badge(stateOf(model, replica)), replica.detail ? h("p", { class: "cause" }, replica.detail) : null] : "–") },
    { name: "Planned memory", right: true, cell: ({ assigned }) => bytes(assigned) },
  ];
  return table(columns, rows, { key: ({ name, place }) => `${name} ${place}`, label: "Replicas" });
}

function ranks(view, host) {
  const { card, history } = view.farm;
  const rows = card.models.flatMap((model) =>
    model.replicas.flatMap((replica) =>
      replica.beats
        .map((beat, rank) => ({ model, replica, beat, rank, state: rankState(model, replica, rank, history) }))
        .filter(({ beat }) => beat?.host === host.id)));
  if (!rows.length) return empty("No rank beats on this host.");
  const columns = [
    { name: "Device", cell: ({ beat }) => beat.device },
    { name: "Model", cell: ({ model, replica }) => [modelLink(model.model), ` ${replica.replica}`] },
    { name: "Rank", cell: ({ rank }) => String(rank) },
    { name: "State", cell: ({ state }) => badge(state) },
    { name: "Process", right: true, cell: ({ beat }) => String(beat.pid) },
    { name: "Step", right: true, cell: ({ beat }) => integer(beat.seq) },
    { name: "Busy for", right: true, cell: ({ beat }) => pendingInWords(beat) },
    { name: "Memory", right: true, cell: ({ beat }) => bytes(beat.memory_bytes) },
  ];
  return table(columns, rows, { key: ({ model, replica, rank }) => `${model.model} ${replica.replica} ${rank}`, label: "Ranks" });
}
