// States of replicas, ranks and hosts in words.

import { h } from "./dom.js";
import { duration } from "./format.js";

const LONG_MS = 2_000;

// The state of a replica as it is shown: `paused` for one that would serve.
export function stateOf(model, replica) {
  const state = replica?.state ?? model.state;
  return model.paused && state === "loaded" ? "paused" : state;
}

export const hostState = (host) => (host.drained ? "drained" : host.alive ? "alive" : "away");

// The cause of a state, where there is one.
export function causeOf(model, replica) {
  const detail = replica ? replica.detail : model.detail;
  return detail ? h("p", { class: "cause" }, detail) : null;
}

// A rank's state: `ready`, the phase of one that starts, `slow`, `silent` without a heartbeat, `not started` before the
// replica's first epoch.
export function rankState(model, replica, rank, history) {
  const beat = replica.beats[rank];
  if (!beat) return replica.epoch ? "silent" : "not started";
  if (history.isSlow(model.model, replica.replica, rank)) return "slow";
  return beat.phase;
}

// All ranks of a replica: "4 ready", or which are not.
export function ranksInWords(model, replica, history) {
  if (!replica) return "–";
  const states = replica.beats.map((_, rank) => rankState(model, replica, rank, history));
  if (states.every((state) => state === "ready")) return `${states.length} ready`;
  if (states.every((state) => state === states[0])) return `${states.length} ${states[0]}`;
  const odd = states.map((state, rank) => [state, rank]).filter(([state]) => state !== "ready");
  return `${states.length - odd.length} of ${states.length} ready; ${odd.map(([state, rank]) => `rank ${rank} ${state}`).join(", ")}`;
}

// The age of a rank's command, where it is long.
export function pendingInWords(beat) {
  return beat.oldest_pending_ms > LONG_MS ? duration(beat.oldest_pending_ms) : "–";
}
