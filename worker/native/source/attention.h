// Attention of a step's tokens over the slabs of their sequences, a key-value head at a time.
//
// A score is summed by lanes first, each over its own dimensions in order, then over the lanes in pairs; an output is summed
// over the positions in order. So what a token gets depends on its own sequence only, and is the same in a chunk of a prompt
// as alone.
#pragma once

#include "cached.h"

namespace furrow {

constexpr int QUERIES = 4;         // that meet a key at once
constexpr int64_t TOKENS = 16;     // of a chunk, whose heads share the reading of keys
constexpr int WIDEST = LANES / 2;  // vectors of a value that are summed at once, for two heads
constexpr int64_t VALUE_BYTES = 16 * 1024;  // that a task's tokens and heads take before the next: with what they are read from, they stay in a first-level cache

// The work of one thread: `tokens` of one sequence, and the heads that share the key-value head `shared`.
struct Task {
  const char* keys;  // of this layer and head, by position
  const char* values;
  const char* following;  // rows that this thread probably reads next; null: none
  Kind kind;
  const float* queries;  // of the first token and head; heads lie `head_stride` apart, tokens `stride` apart
  float* out;            // heads lie side by side, tokens `out_stride` apart
  int64_t head_stride, stride, out_stride, dim, heads, tokens;
  int64_t value_dim;  // numbers of a value, the first of a row of `dim`
  int64_t position;  // of the first token
  int64_t window;    // 0: sees everything
  int64_t chunk;     // 0: sees across borders of chunks
  const int64_t* ends;  // by token, the position before which it sees the sequence; null: its own included
  float scale, cap;  // cap 0: scores stay
  const float* sinks;  // by head; null: none
};

inline int64_t first_seen(const Task& task, int64_t token) {
  if (task.chunk) return (task.position + token) / task.chunk * task.chunk;
  return task.window ? std::max<int64_t>(0, task.position + token + 1 - task.window) : 0;
}

inline int64_t end_seen(const Task& task, int64_t token) {
  return task.ends ? task.ends[token] : task.position + token + 1;
}

// scores[i] (LANES) of `COUNT` queries, scaled before, against LANES keys; what is `next` is asked for on the way.
template <int COUNT>
void score(const float* keys, const float* next, const float* queries, int64_t dim, float* scores, int64_t room) {
  constexpr int KEYS = LANES / 4;  // at a time: read across many keys, the cache would not foresee what comes
  Floats parts[COUNT][LANES / KEYS];
#pragma GCC unroll 4
  for (int part = 0; part < LANES / KEYS; ++part, keys += KEYS * dim, next += KEYS * dim) {
    Floats sums[COUNT][KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT * KEYS; ++i) sums[i / KEYS][i % KEYS] = all(0.0f);
    for (int64_t at = 0; at < dim; at += LANES) {
      Floats asked[COUNT];
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; ++i) asked[i] = in_register(load(queries + i * dim + at));
#pragma GCC unroll 4
      for (int key = 0; key < KEYS; ++key) {
        __builtin_prefetch(next + key * dim + at, 0, 1);
        const Floats values = in_register(load(keys + key * dim + at));
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; ++i) sums[i][key] = fma(asked[i], values, sums[i][key]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) parts[i][part] = across<1>(sums[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i) store(scores + i * room, across<KEYS>(parts[i]));
}

// Scores become weights that add up to one, or with `sink`, the score of a position without a value, to less; `positions` of them
// from `front` on are seen, the others of `room` get 0.
inline void soften(float* scores, int64_t front, int64_t positions, int64_t room, const float* sink) {
  for (int64_t i = 0; i < front; ++i) scores[i] = -INFINITY;
  for (int64_t i = front + positions; i < room; ++i) scores[i] = -INFINITY;
  Floats most = load(scores);
  for (int64_t i = LANES; i < room; i += LANES) most = larger(most, load(scores + i));
  const float highest = sink ? std::max(largest(most), *sink) : largest(most);
  const Floats top = all(highest);
  Floats total = all(0.0f);
  for (int64_t i = 0; i < room; i += LANES) {
    const Floats weight = exponential(load(scores + i) - top);
    store(scores + i, weight);
    total = total + weight;
  }
  const Floats share = all(1.0f / (sum(total) + (sink ? std::exp(*sink - highest) : 0.0f)));
  for (int64_t i = 0; i < room; i += LANES) store(scores + i, load(scores + i) * share);
}

// out[i] (HEADS × WIDTH vectors) = Σ weights[i][position] · values[position], added to what is there where `more`.
template <int HEADS, int WIDTH>
void mix(const float* values, int64_t dim, int64_t positions, const float* const* weights, float* const* out, bool more) {
  Floats sums[HEADS][WIDTH];
#pragma GCC unroll 16
  for (int i = 0; i < HEADS * WIDTH; ++i)
    sums[i / WIDTH][i % WIDTH] = more ? load(out[i / WIDTH] + i % WIDTH * LANES) : all(0.0f);
  for (int64_t position = 0; position < positions; ++position, values += dim) {
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH; ++i) {
      const Floats value = in_register(load(values + i * LANES));
#pragma GCC unroll 2
      for (int head = 0; head < HEADS; ++head)
        sums[head][i] = fma(all(weights[head][position]), value, sums[head][i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < HEADS * WIDTH; ++i) store(out[i / WIDTH] + i % WIDTH * LANES, sums[i / WIDTH][i % WIDTH]);
}

template <int HEADS, int WIDTH>
void mix_from(int64_t at, const Task& task, const float* values, int64_t positions, const float* const* weights,
              float* const* out, bool more) {
  if constexpr (WIDTH > 0) {
    for (; at + WIDTH * LANES <= task.value_dim; at += WIDTH * LANES) {
      float* places[HEADS];
      for (int i = 0; i < HEADS; ++i) places[i] = out[i] + at;
      mix<HEADS, WIDTH>(values + at, task.dim, positions, weights, places, more);
    }
    mix_from<HEADS, WIDTH / 2>(at, task, values, positions, weights, out, more);
  }
}

// Adds to a token's outputs what it sees of the positions `from` … `to`, whose values are `values`. `weights`: of its first head, by
// position; heads lie `room` apart.
inline void mix_block(const Task& task, int64_t token, const float* values, int64_t from, int64_t to, const float* weights, int64_t room) {
  const int64_t first = first_seen(task, token), begin = std::max(first, from), end = std::min(to, end_seen(task, token));
  if (begin >= end) return;
  values += (begin - from) * task.dim;
  for (int64_t head = 0; head < task.heads; head += 2) {
    const float* own = weights + head * room + begin;
    const float* pair[] = {own, own + room};
    float* out = task.out + token * task.out_stride + head * task.value_dim;
    float* places[] = {out, out + task.value_dim};
    if (head + 1 < task.heads)
      mix_from<2, WIDEST>(0, task, values, end - begin, pair, places, begin > first);
    else
      mix_from<1, WIDEST>(0, task, values, end - begin, pair, places, begin > first);
  }
}

inline int64_t value_rows(int64_t dim) { return std::max<int64_t>(LANES, VALUE_BYTES / (dim * static_cast<int64_t>(sizeof(float)))); }

// The position from which on a task reads keys.
inline int64_t first_read(const Task& task) { return first_seen(task, 0) / LANES * LANES; }

// Floats for the rows that are read together, where they are not floats already.
inline int64_t row_room(Kind kind, int64_t dim) { return kind == FLOAT32 ? 0 : value_rows(dim) * dim; }

// `scratch`: see `attention_scratch`.
inline void attend(const Task& task, float* scratch) {
  int64_t last = 0;
  for (int64_t token = 0; token < task.tokens; ++token) last = std::max(last, end_seen(task, token));
  const int64_t start = first_read(task), room = (last - start + LANES - 1) / LANES * LANES;
  const int64_t queries = task.heads * task.tokens, row = cached_bytes(task.kind, task.dim);
  float *rows = scratch, *asked = rows + row_room(task.kind, task.dim), *scores = asked + queries * task.dim;
  for (int64_t query = 0; query < queries; ++query) {
    const float* from = task.queries + query / task.heads * task.stride + query % task.heads * task.head_stride;
    for (int64_t at = 0; at < task.dim; ++at) asked[query * task.dim + at] = from[at] * task.scale;
  }
  using Score = void (*)(const float*, const float*, const float*, int64_t, float*, int64_t);
  static constexpr Score by_count[QUERIES] = {score<1>, score<2>, score<3>, score<4>};
  for (int64_t block = 0; block < room; block += LANES) {
    const int64_t later = block + ROWS_AHEAD;  // behind the last keys the first values are wanted
    const char* next = later < room ? task.keys + (start + later) * row : task.values + (start + later - room) * row;
    const float* keys = read_rows(task.kind, task.keys + (start + block) * row, next, task.dim, LANES, rows);
    for (int64_t query = 0; query < queries; query += QUERIES) {
      const int64_t count = std::min<int64_t>(QUERIES, queries - query);
      by_count[count - 1](keys, task.kind == FLOAT32 ? reinterpret_cast<const float*>(next) : keys, asked + query * task.dim, task.dim, scores + query * room + block, room);
    }
  }
  for (int64_t token = 0; token < task.tokens; ++token) {
    const int64_t first = first_seen(task, token), seen = end_seen(task, token) - first;
    for (int64_t head = 0; head < task.heads; ++head) {
      float* own = scores + (token * task.heads + head) * room;
      if (task.cap) cap_all(own, room, task.cap);
      soften(own, first - start, seen, room, task.sinks ? task.sinks + head : nullptr);
    }
  }
  const int64_t block = value_rows(task.dim);
  for (int64_t from = start; from < last; from += block) {
    const int64_t to = std::min(from + block, last);
    const char* own = task.values + (from + ROWS_AHEAD) * row;
    const char* next = task.following && from + ROWS_AHEAD >= last ? task.following + (from + ROWS_AHEAD - last) * row : own;
    const float* values = read_rows(task.kind, task.values + from * row, next, task.dim, to - from, rows);
    for (int64_t token = 0; token < task.tokens; ++token)
      mix_block(task, token, values, from, to, scores + token * task.heads * room - start, room);
  }
}

// Floats that a thread needs for tasks of `tokens` that see at most `positions`.
inline int64_t attention_scratch(Kind kind, int64_t dim, int64_t heads, int64_t tokens, int64_t positions) {
  return row_room(kind, dim) + heads * tokens * (dim + positions + 2 * LANES);
}

}  // namespace furrow
