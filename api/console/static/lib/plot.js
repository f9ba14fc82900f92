// A live plot of the last hour: one line, its area, axes of time and value, and the newest value in words.

import { h, s } from "./dom.js";
import { bytes, duration } from "./format.js";
import { KEPT_MS } from "./history.js";

const WIDTH = 300;
const HEIGHT = 56;
const GAP_MS = 4_000;
const COARSE_GAP_MS = 25_000;
const LEAST_MS = 60_000;

// `name`, and `format(value)` of `pick(sample)` for each of the samples; `most` is the least top of the scale.
export function plot({ name, samples, pick, format, most = 0, now = Date.now(), note = "" }) {
  const points = samples.map((sample) => [sample.at, pick(sample), sample.coarse]).filter(([, value]) => value != null);
  const peak = points.reduce((top, [, value]) => Math.max(top, value), 0);
  const last = samples.length ? pick(samples.at(-1)) : null;
  const shown = format(last);
  // The first minute is shown whole; then the scale of time grows to all that is kept.
  const span = Math.min(KEPT_MS, Math.max(LEAST_MS, points.length ? now - points[0][0] : 0));
  const top = Math.max(peak, most) || 1;
  const said = points.length ? `${name}: ${shown} now, at most ${format(peak)} in ${duration(span)}` : `${name}: not known yet`;
  return h(
    "figure",
    { class: "plot", key: name },
    h("figcaption", {}, h("span", { class: "label" }, name), h("span", { class: "peak" }, points.length ? `peak ${format(peak)}` : "")),
    h("p", { class: "value" }, shown, note ? h("span", { class: "note" }, note) : null),
    h("div", { class: "axis" }, h("span", {}, format(top))),
    s(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": said },
      s("line", { class: "base", x1: 0, x2: WIDTH, y1: 2, y2: 2 }),
      s("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      runs(points).map((run) => drawn(run, now, span, top)),
    ),
    h("div", { class: "axis" }, h("span", {}, `${beginOf(span)} ago`), h("span", {}, "now")),
  );
}

// The length of the axis of time, in whole minutes where it has some.
const beginOf = (span) => (span < 90_000 ? duration(span) : `${Math.round(span / 60_000)} min`);

// Points without a gap between them, as there is one where the page was hidden or the farm away.
function runs(points) {
  const found = [];
  for (const point of points) {
    const run = found.at(-1);
    if (run && point[0] - run.at(-1)[0] <= (run.at(-1)[2] ? COARSE_GAP_MS : GAP_MS)) run.push(point);
    else found.push([point]);
  }
  return found;
}

function drawn(run, now, span, top) {
  const x = (at) => (WIDTH * (1 - (now - at) / span)).toFixed(1);
  const y = (value) => ((HEIGHT - 4) * (1 - value / top) + 2).toFixed(1);
  const line = run.map(([at, value]) => `${x(at)},${y(value)}`);
  if (run.length === 1) return s("circle", { class: "dot", cx: x(run[0][0]), cy: y(run[0][1]), r: 1.5 });
  const path = `M${line.join("L")}`;
  const area = `${path}L${x(run.at(-1)[0])},${HEIGHT}L${x(run[0][0])},${HEIGHT}Z`;
  return [s("path", { class: "area", d: area }), s("path", { class: "line", d: path })];
}

// A part of a whole as a bar beside its number.
export function meter(part, text) {
  if (part == null) return h("span", { class: "muted" }, text);
  const width = Math.min(100, Math.max(0, part * 100));
  const level = part > 0.9 ? "high" : "plain";
  return h(
    "span",
    { class: "meter" },
    s("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true", class: level },
      s("rect", { class: "whole", width: 100, height: 4 }),
      s("rect", { class: "part", width, height: 4 })),
    h("span", {}, text),
  );
}

// What replicas were given of a device's memory, and of how much; `named`: with the device.
export function memoryMeter({ device, given, assigned, free }, named = false) {
  const name = named ? `${device}: ` : "";
  if (given == null) return h("span", { class: "muted" }, `${name}${bytes(free)} free, not planned`);
  return meter(given ? assigned / given : 1, `${name}${bytes(assigned)} of ${bytes(given)}`);
}
