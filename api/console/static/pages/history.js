// The latest epochs of a model's replicas: the time of each stage, and the fault that ended them.

import { withQuery } from "../lib/api.js";
import { h, s } from "../lib/dom.js";
import { duration, moment } from "../lib/format.js";
import { badge, empty, head, link, modelLink, section, table } from "../lib/parts.js";
import { hrefTo } from "../lib/router.js";

export default { path: "/history", title: "History", nav: "History", open };

const STAGES = ["gathered", "joined", "loaded"];

function open(view) {
  const state = { events: null, of: null };
  view.poll(1.5, async (api) => {
    const model = chosen(view);
    if (!model) return;
    const { data } = await api.get(withQuery("/farm/history", { model }), { signal: view.signal });
    Object.assign(state, { events: data, of: model });
  });
  return () => {
    const { card } = view.farm;
    if (!card) return [head("History"), h("p", { class: "muted", key: "wait" }, "Waiting for the first snapshot…")];
    const model = chosen(view);
    if (!model) return [head("History"), section("Epochs", empty("No model is loaded.", "Each start and each recovery of a model is listed here."))];
    return [head("History", { acts: picker(view, model) }), section("Epochs", content(state, model, card), { note: "newest first, up to 64 of a replica" })];
  };
}

const chosen = (view) => view.query.model ?? view.farm.card?.models[0]?.model ?? null;

function picker(view, model) {
  const known = view.farm.card.models.map((one) => one.model);
  // In the same order whichever is chosen: the arrow keys go through it.
  const names = known.includes(model) ? known : [model, ...known];
  const change = (event) => (location.hash = hrefTo(["history"], { model: event.target.value }));
  return h("label", { class: "picker" }, "Model ", h("select", { "aria-label": "Model", onchange: change }, names.map((name) => h("option", { value: name, selected: name === model }, name))));
}

// One row for an epoch: its formation and its fault together.
function together(events) {
  const rows = new Map();
  for (const event of events) {
    const key = `${event.replica} ${event.epoch}`;
    const row = rows.get(key) ?? { key, replica: event.replica, epoch: event.epoch, formed: null, fault: null };
    row[event.event] = event;
    rows.set(key, row);
  }
  return [...rows.values()];
}

function content({ events, of }, model, card) {
  if (of !== model || !events) return h("p", { class: "muted padded" }, "Reading the epochs…");
  if (!events.length) return empty("No epoch is known yet.", ["An epoch is one life of a replica's group of ranks, from the lock to its end. ", modelLink(model), " has not formed one."]);
  const now = new Map((card.models.find((one) => one.model === model)?.replicas ?? []).map((one) => [one.replica, one]));
  const rows = together(events);
  const most = Math.max(1, ...rows.map(({ formed }) => (formed ? span(formed) : 0)));
  const columns = [
    { name: "Began", cell: (row) => moment(row.formed?.at_ms ?? row.epoch) },
    { name: "Replica", cell: (row) => row.replica },
    { name: "Epoch", cell: (row) => h("span", { class: "mono" }, row.epoch) },
    ...STAGES.map((name) => ({ name: name[0].toUpperCase() + name.slice(1), right: true, cell: ({ formed }) => (formed ? duration(formed[`${name}_ms`]) : "–") })),
    { name: "Formed in", cell: ({ formed }) => (formed ? bar(formed, most) : h("span", { class: "muted" }, "did not form")) },
    { name: "End", cell: (row) => end(row, now.get(row.replica)) },
  ];
  return table(columns, rows, { key: (row) => row.key, label: "Epochs" });
}

const span = (formed) => STAGES.reduce((sum, name) => sum + formed[`${name}_ms`], 0);

function bar(formed, most) {
  let x = 0;
  const parts = STAGES.map((name) => {
    const width = (100 * formed[`${name}_ms`]) / most;
    const part = s("rect", { class: name, x, width, height: 4 });
    x += width;
    return part;
  });
  const drawn = s("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "whole", width: 100, height: 4 }), parts);
  return h("span", { class: "meter stages" }, drawn, duration(span(formed)));
}

function end({ epoch, fault }, replica) {
  if (fault) {
    const named = fault.rank === null || fault.message.startsWith(`rank ${fault.rank} `);
    const rank = named ? "" : `rank ${fault.rank}: `;
    return [badge(fault.kind, "bad"), h("span", { class: "note" }, ` after ${duration(Math.max(0, fault.at_ms - epoch))}`), h("p", { class: "cause" }, `${rank}${fault.message}`)];
  }
  if (replica?.epoch === epoch) return badge(replica.state);
  return h("span", { class: "muted" }, "ended without a fault");
}

export const historyLink = (model) => link("History", ["history"], { model });
