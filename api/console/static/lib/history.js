// The last hour of the farm and each model, and the last sample of each replica: rates are differences of the snapshots'
// counts. The last minutes are those that the page has seen, each second; before them there is a sample every ten seconds,
// of the page or, from before it was opened, of the farm.

export const KEPT_MS = 3_600_000;
const FINE_MS = 300_000;
const COARSE_MS = 10_000;
const WINDOW_MS = 3_000;
// A new follower gets the last snapshot at once and the next one at any moment: too short a time for a rate.
const LEAST_MS = 800;
const LONG_MS = 2_000;
const MARKED_MS = 4_000;

// A sample: `at` (ms), `rate` (tokens/s), `first` (ms to the first token), `queued`, `running`, `kv` (part in use; of
// several replicas that of the fullest); null where it is not known.
export class History {
  #samples = new Map();
  // Older ones, a few a minute, by model.
  #coarse = new Map();
  #counts = new Map();
  #slow = new Map();

  // The samples of a model or, without a name, of the farm, oldest first; of a replica the last one alone.
  of(model = "", replica = "") {
    const name = `${model}\n${replica}`;
    return [...(this.#coarse.get(name) ?? []), ...(this.#samples.get(name) ?? [])];
  }

  // Take the farm's own samples (GET /farm/plots), of the time before the page's first one.
  load(kept) {
    for (const { at_ms: at, points } of kept)
      for (const [model, [rate, first, queued, running, kv]] of Object.entries(points)) {
        const name = `${model}\n`;
        if (at >= (this.#samples.get(name)?.[0]?.at ?? Infinity)) continue;
        this.#thin(name, { at, rate, first, queued, running, kv });
      }
  }

  // The newest sample, or one of nulls.
  last(model = "", replica = "") {
    return this.#samples.get(`${model}\n${replica}`)?.at(-1) ?? { at: 0, rate: null, first: null, queued: null, running: null, kv: null };
  }

  // True for a rank for which others of its group wait: by the farm's judgement, or in a long command in which it gets
  // on while another stands still.
  isSlow(model, replica, rank) {
    return this.#slow.get(`${model}\n${replica}`)?.has(rank) ?? false;
  }

  // Take a snapshot of GET /farm that was received at `at` (ms).
  add(card, at) {
    const all = [];
    const known = new Set(["\n"]);
    for (const model of card.models) {
      const parts = model.replicas.map((replica) => {
        known.add(`${model.model}\n${replica.replica}`);
        return this.#replica(model, replica, at);
      });
      known.add(`${model.model}\n`);
      const sample = together(parts, at, model.queued);
      this.#keep(`${model.model}\n`, sample);
      all.push({ ...sample, firsts: sum(parts, "firsts"), firstMs: sum(parts, "firstMs") });
    }
    this.#keep("\n", together(all, at, sum(all, "queued") ?? 0));
    for (const map of [this.#samples, this.#coarse, this.#counts, this.#slow])
      for (const name of map.keys()) if (!known.has(name)) map.delete(name);
  }

  #replica(model, replica, at) {
    const name = `${model.model}\n${replica.replica}`;
    const leader = replica.beats[0] ?? null;
    const counts = this.#counts.get(name) ?? [];
    this.#mark(name, [...(replica.slow ?? []), ...slow(counts.at(-1)?.beats ?? [], replica.beats)], at);
    // Heartbeats and snapshots have clocks of their own, so a rate is that of some seconds.
    while (counts.length > 1 && counts[1].at <= at - WINDOW_MS) counts.shift();
    const since = counts[0];
    const tokens = leader && since?.leader ? leader.tokens - since.leader.tokens : null;
    const firsts = leader && since?.leader ? leader.first_tokens - since.leader.first_tokens : 0;
    const ms = firsts > 0 ? leader.first_tokens_ms - since.leader.first_tokens_ms : 0;
    if (tokens !== null && tokens < 0) counts.length = 0;
    counts.push({ at, leader, beats: replica.beats });
    this.#counts.set(name, counts);
    const room = Number(model.assets?.[1] ?? 0);
    const sample = {
      at,
      rate: tokens !== null && tokens >= 0 && at - since.at >= LEAST_MS ? (tokens * 1000) / (at - since.at) : null,
      firsts: Math.max(0, firsts),
      firstMs: ms,
      first: firsts > 0 ? ms / firsts : null,
      queued: null,
      running: leader ? leader.running : null,
      kv: leader && room ? leader.kv_used / room : null,
    };
    this.#samples.set(name, [sample]);
    return sample;
  }

  // A mark stays for some seconds: two snapshots may show the same heartbeats.
  #mark(name, found, at) {
    const marks = this.#slow.get(name) ?? new Map();
    for (const rank of found) marks.set(rank, at);
    for (const [rank, since] of marks) if (since < at - MARKED_MS) marks.delete(rank);
    this.#slow.set(name, marks);
  }

  #keep(name, sample) {
    const samples = this.#samples.get(name) ?? [];
    samples.push(sample);
    while (samples[0].at < sample.at - FINE_MS) this.#thin(name, samples.shift());
    this.#samples.set(name, samples);
  }

  #thin(name, sample) {
    const coarse = this.#coarse.get(name) ?? [];
    if (sample.at - (coarse.at(-1)?.at ?? 0) < COARSE_MS - 500) return;
    coarse.push({ ...sample, coarse: true });
    while (coarse[0].at < Date.now() - KEPT_MS) coarse.shift();
    this.#coarse.set(name, coarse);
  }
}

function together(parts, at, queued) {
  const firsts = sum(parts, "firsts");
  return {
    at,
    queued,
    rate: sum(parts, "rate"),
    first: firsts ? sum(parts, "firstMs") / firsts : null,
    running: sum(parts, "running"),
    // A full pool makes its own requests wait, whatever room the others have.
    kv: most(parts, "kv"),
  };
}

// The greatest of what is known; null where nothing is.
function most(parts, name) {
  const known = parts.map((part) => part[name]).filter((value) => value != null);
  return known.length ? Math.max(...known) : null;
}

// The sum of what is known; null where nothing is.
function sum(parts, name) {
  const known = parts.map((part) => part[name]).filter((value) => value != null);
  return known.length ? known.reduce((one, other) => one + other, 0) : null;
}

function slow(before, now) {
  const moved = new Map();
  now.forEach((beat, rank) => {
    const old = before[rank];
    if (beat && old && beat.oldest_pending_ms > LONG_MS) moved.set(rank, beat.progress !== old.progress);
  });
  const all = [...moved.values()].every(Boolean);
  return new Set(all ? [] : [...moved].filter(([, got]) => got).map(([rank]) => rank));
}
