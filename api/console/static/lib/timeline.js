// The life of a request as a picture: a lane for the queue, and one for each epoch that had the request.

import { h, s } from "./dom.js";
import { duration } from "./format.js";

const LANE = 44;
const AXIS = 24;

// `life`: the answer of GET /farm/requests/<id>. The same facts stand in the list of phases, which screen readers have.
export function timeline(life) {
  const begin = momentOf(life, "received") ?? life.phases[0]?.at_ms ?? life.read_ms;
  const end = Math.max(begin + 1, momentOf(life, "ended") ?? life.read_ms);
  const place = (at) => `${((100 * (Math.min(end, Math.max(begin, at)) - begin)) / (end - begin)).toFixed(2)}%`;
  const size = (since, until) => `${((100 * Math.max(0, Math.min(end, until) - Math.max(begin, since))) / (end - begin)).toFixed(2)}%`;
  const lanes = [waitingLane(life, begin, end), ...life.epochs.map((epoch, index) => epochLane(life, epoch, index, end))];
  const height = lanes.length * LANE + AXIS;
  return h(
    "figure",
    { class: "timeline", key: "timeline" },
    s(
      "svg",
      { width: "100%", height, role: "img", "aria-label": `Timeline of ${duration(end - begin)}: the phases below say the same.` },
      lanes.map((lane, index) => drawn(lane, index * LANE, place, size)),
      axis(end - begin, lanes.length * LANE),
    ),
    legend(lanes),
  );
}

const momentOf = (life, name) => life.phases.find((phase) => phase.name === name)?.at_ms ?? null;

function waitingLane(life, begin, end) {
  const bars = [];
  let since = begin;
  for (const epoch of life.epochs) {
    bars.push({ kind: bars.length ? "recovery" : "wait", since, until: epoch.at_ms });
    since = epoch.until_ms ?? end;
  }
  if (["queued"].includes(life.state) || !life.epochs.length) bars.push({ kind: "wait", since, until: end });
  return { name: "without a replica", bars: bars.filter((bar) => bar.until > bar.since), fault: null };
}

function epochLane(life, epoch, index, end) {
  const until = epoch.until_ms ?? end;
  const first = momentOf(life, "first token") ?? until;
  const bars = [
    { kind: "forming", since: epoch.formed?.led ?? epoch.at_ms, until: epoch.at_ms },
    { kind: "prefill", since: epoch.at_ms, until: Math.min(first, until) },
    { kind: "decode", since: Math.max(first, epoch.at_ms), until },
  ];
  const fault = epoch.fault ? { at: epoch.fault.at_ms, kind: epoch.fault.kind } : null;
  return { name: `attempt ${index + 1} · ${epoch.replica}`, bars: bars.filter((bar) => bar.until > bar.since), fault };
}

function drawn(lane, top, place, size) {
  const middle = top + 30;
  return s(
    "g",
    { class: "lane" },
    s("text", { x: 0, y: top + 14 }, lane.name),
    s("rect", { class: "track", x: 0, y: top + 24, width: "100%", height: 12, rx: 2 }),
    lane.bars.map((bar) => s("rect", { class: bar.kind, x: place(bar.since), y: top + 24, width: size(bar.since, bar.until), height: 12 })),
    lane.fault
      ? [
          s("line", { class: "fault-mark", x1: place(lane.fault.at), x2: place(lane.fault.at), y1: top + 18, y2: top + 42 }),
          s("circle", { class: "fault-mark", cx: place(lane.fault.at), cy: middle, r: 5 }),
          s("text", { class: "fault-name", x: "100%", y: top + 14, "text-anchor": "end" }, `ended by ${lane.fault.kind}`),
        ]
      : null,
  );
}

function axis(span, top) {
  const marks = [0, 0.25, 0.5, 0.75, 1];
  const anchor = (part) => (part === 0 ? "start" : part === 1 ? "end" : "middle");
  return s(
    "g",
    { class: "axis" },
    s("line", { x1: 0, x2: "100%", y1: top + 4, y2: top + 4 }),
    marks.map((part) => s("text", { x: `${part * 100}%`, y: top + 20, "text-anchor": anchor(part), class: part % 0.5 ? "minor" : null }, duration(span * part))),
  );
}

const NAMES = { wait: "waiting", recovery: "between epochs", forming: "epoch forms", prefill: "prefill", decode: "decoding" };

function legend(lanes) {
  const used = Object.keys(NAMES).filter((kind) => lanes.some((lane) => lane.bars.some((bar) => bar.kind === kind)));
  const faults = lanes.some((lane) => lane.fault);
  return h(
    "figcaption",
    {},
    used.map((kind) => h("span", { class: `mark ${kind}` }, NAMES[kind])),
    faults ? h("span", { class: "mark fault-mark" }, "fault") : null,
  );
}
