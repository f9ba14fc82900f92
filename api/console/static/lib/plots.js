// The four plots of a farm, a model or a replica.

import { h } from "./dom.js";
import { count, duration, integer, percent, rate } from "./format.js";
import { plot } from "./plot.js";

export function plots(samples, now = Date.now()) {
  const running = samples.at(-1)?.running;
  const note = running == null ? "" : `${count(running, "request")} running`;
  return h(
    "div",
    { class: "plots", key: "plots" },
    plot({ name: "Tokens per second", samples, pick: (one) => one.rate, format: rate, now, most: 10 }),
    plot({ name: "Time to first token", samples, pick: (one) => one.first, format: duration, now, most: 100 }),
    plot({ name: "Waiting requests", samples, pick: (one) => one.queued, format: integer, now, most: 4, note }),
    plot({ name: "Fullest KV memory", samples, pick: (one) => one.kv, format: percent, now, most: 1 }),
  );
}
