// y = x · Wᵀ for any number of rows, with weights in four kinds of numbers. The sums of a row are taken in one order,
// whatever rows are beside it: its bits never depend on its company.
//
// Weights lie in panels of PANEL outputs: for each input, or group of four bytes, what all of the panel's outputs have
// for it, side by side. So one input meets a whole vector of weights, nothing is summed across a vector, and weights are
// read once, from front to back, for as many rows as have room in registers.
#pragma once

#include <array>

#include "blocks/product.h"
#include "blocks/groups.h"
#include "inputs.h"
#include "pool.h"

namespace furrow {

constexpr int TILE = LANES == 16 ? 8 : 6;  // rows: 2 · TILE sums, two weights and one input fill the registers
constexpr int64_t LEAST_BYTES = 64 * 1024, MOST_BYTES = 256 * 1024;  // of weights, for a thread at a time: see `piece_of`
constexpr int64_t AHEAD_BYTES = 3 * 1024;   // see `ask_ahead`

inline int64_t panels(const Matrix& matrix) { return (matrix.outputs + PANEL - 1) / PANEL; }

inline int64_t panels(const Linear& linear) {
  int64_t sum = 0;
  for (int i = 0; i < linear.count; ++i) sum += panels(linear.matrices[i]);
  return sum;
}

// A kind of weights: `PER` of them are taken together, with one `Input`; `Sum` holds a vector of sums.
struct Wide {
  static constexpr int PER = 1;
  using Input = float;
  using Sum = Floats;
  static Sum zero() { return all(0.0f); }
  static Sum add(Input input, Floats weights, Sum sum) { return fma(all(input), weights, sum); }
};
struct Float32 : Wide {
  using Stored = float;
  static Floats read(const Stored* from) { return load(from); }
};
struct BFloat16 : Wide {
  using Stored = uint16_t;
  static Floats read(const Stored* from) { return load_bfloat(from); }
};
struct Float16 : Wide {
  using Stored = uint16_t;
  static Floats read(const Stored* from) { return load_half(from); }
};
struct Int8 {
  static constexpr int PER = 4;
  using Stored = int8_t;
  using Input = int32_t;  // four bytes
  using Sum = Ints;
  static Sum zero() { return all(0); }
  static Ints read(const Stored* from) { return load(from); }
  static Sum add(Input inputs, Ints weights, Sum sum) { return dot4(all(inputs), weights, sum); }
};

// `bias`: of the outputs from `output` on, or null.
inline Floats finished(Floats sum, const Matrix&, int64_t, const float* bias, float) { return bias ? sum + load(bias) : sum; }

inline Floats finished(Ints sum, const Matrix& matrix, int64_t output, const float* bias, float scale) {
  if (OFFSET) sum = minus(sum, load(matrix.sums + output));  // every activation was OFFSET too large
  const Floats product = to_floats(sum) * load(matrix.scales + output);
  return bias ? fma(product, all(scale), load(bias)) : product * all(scale);
}

// Of the last panel, which may reach beyond the outputs. Apart from `put`: it would be compiled again for each row of each tile.
__attribute__((noinline, cold)) inline void put_part(float* out, Floats values, int64_t room, bool add) {
  float lanes[LANES];
  store(lanes, values);
  for (int64_t lane = 0; lane < room; ++lane) out[lane] = add ? out[lane] + lanes[lane] : lanes[lane];
}

// Adds to what `out` holds where `add`.
inline void put(float* out, Floats values, int64_t room, bool add) {
  if (room >= LANES) return store(out, add ? load(out) + values : values);
  put_part(out, values, room, add);
}

// A processor foresees what is read from front to back, but not beyond a page of 4 KiB. Where few rows meet a line of weights it
// comes to the next page early enough by itself; with more of them each page's begin would be waited for.
template <typename K, int ROWS>
inline void ask_ahead(const typename K::Stored* weights) {
  constexpr int64_t BYTES = PANEL * K::PER * static_cast<int64_t>(sizeof(*weights));
  if constexpr (ROWS * LINE_BYTES >= 3 * BYTES)
    for (int64_t at = 0; at < BYTES; at += LINE_BYTES)
      __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD_BYTES + at);
}

// What ends a panel's sums is asked for at their begin. The scales of an expert were not read for many steps.
inline void ask_for_scales(const Matrix& matrix, int64_t output) {
  if (matrix.kind != INT8) return;
  for (int64_t at = output; at < output + PANEL; at += LINE_BYTES / 4) {
    __builtin_prefetch(matrix.scales + at);
    if (OFFSET) __builtin_prefetch(matrix.sums + at);
  }
}

template <typename K, int ROWS>
void tile(const Linear& linear, const Matrix& matrix, const Rows& inputs, int64_t row, int64_t panel, float* out, bool add) {
  const int64_t steps = (linear.inputs + K::PER - 1) / K::PER;
  const auto* weights = static_cast<const typename K::Stored*>(matrix.weights) + panel * steps * PANEL * K::PER;
  const auto* values = static_cast<const typename K::Input*>(inputs.data) + row * inputs.stride;
  ask_for_scales(matrix, panel * PANEL);
  typename K::Sum sums[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) sums[i][0] = sums[i][1] = K::zero();
  for (int64_t step = 0; step < steps; ++step, weights += PANEL * K::PER) {
    ask_ahead<K, ROWS>(weights);
    const auto low = K::read(weights), high = K::read(weights + LANES * K::PER);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      sums[i][0] = K::add(values[i * inputs.stride + step], low, sums[i][0]);
      sums[i][1] = K::add(values[i * inputs.stride + step], high, sums[i][1]);
    }
  }
  const int64_t output = panel * PANEL, first = matrix.first + output, room = matrix.outputs - output;
  const float* bias = linear.bias ? linear.bias + first : nullptr;
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    float* place = out + (row + i) * linear.outputs + first;
    const float scale = inputs.scales ? inputs.scales[row + i] : 1.0f;
    put(place, finished(sums[i][0], matrix, output, bias, scale), room, add);
    put(place + LANES, finished(sums[i][1], matrix, output + LANES, bias ? bias + LANES : nullptr, scale), room - LANES, add);
  }
}

using Tile = void (*)(const Linear&, const Matrix&, const Rows&, int64_t, int64_t, float*, bool);

template <typename K, Kind KIND, int... ROWS>
constexpr std::array<Tile, sizeof...(ROWS)> tiles(std::integer_sequence<int, ROWS...>) {
  if constexpr (included(KIND))
    return {tile<K, ROWS + 1>...};
  else
    return {};
}

// By kind, then by the number of rows less one.
inline Tile tile_for(Kind kind, int64_t rows) {
  using Counts = std::make_integer_sequence<int, TILE>;
  static constexpr std::array<std::array<Tile, TILE>, 4> known = {
      tiles<Float32, FLOAT32>(Counts{}), tiles<BFloat16, BFLOAT16>(Counts{}), tiles<Float16, FLOAT16>(Counts{}),
      tiles<Int8, INT8>(Counts{})};
  return known[kind][rows - 1];
}

// One panel for all rows, in tiles of nearly equal size.
inline void panel_product(const Linear& linear, const Matrix& matrix, const Rows& inputs, int64_t panel, float* out, bool add) {
  const int64_t parts = (inputs.rows + TILE - 1) / TILE;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = inputs.rows * part / parts, to = inputs.rows * (part + 1) / parts;
    tile_for(matrix.kind, to - from)(linear, matrix, inputs, from, panel, out, add);
  }
}

// Of one panel.
inline int64_t panel_bytes(Kind kind, int64_t inputs) {
  constexpr int64_t BYTES[] = {4, 2, 2};
  if (in_blocks(kind)) return block_panel_bytes(kind, inputs);
  if (in_groups(kind)) return group_panel_bytes(kind, inputs);
  return PANEL * (kind == INT8 ? byte_stride(inputs) : inputs * BYTES[kind]);
}

// Of a matrix's packed weights.
inline int64_t matrix_bytes(Kind kind, int64_t inputs, int64_t outputs) {
  return (outputs + PANEL - 1) / PANEL * panel_bytes(kind, inputs);
}

inline int64_t average_panel_bytes(const Linear& linear) {
  int64_t whole = 0;
  for (int i = 0; i < linear.count; ++i)
    whole += panels(linear.matrices[i]) * panel_bytes(linear.matrices[i].kind, linear.inputs);
  return std::max<int64_t>(1, whole / panels(linear));
}

// Panels for a thread at a time. Memory is read faster in long runs, but where a piece is a large part of a product, or somebody else
// takes the processor in the middle of one, the others wait for it.
inline int64_t piece_of(const Linear& linear, int threads) {
  const int64_t panel = average_panel_bytes(linear), whole = panel * panels(linear);
  return std::max<int64_t>(1, std::clamp(whole / (4 * threads), LEAST_BYTES, MOST_BYTES) / panel);
}

// A panel of blocks for all rows, some of them at a time.
inline void block_panel_product(const Linear& linear, const Matrix& matrix, const BlockRows& x, int64_t panel, float* out, bool add) {
  const auto* packed = static_cast<const uint8_t*>(matrix.weights) + panel * block_panel_bytes(matrix.kind, linear.inputs);
  const int64_t first = matrix.first + panel * PANEL, room = matrix.outputs - panel * PANEL;
  alignas(64) float totals[GROUP * PANEL];
  for (int64_t row = 0; row < x.rows; row += GROUP) {
    const int64_t count = std::min(GROUP, x.rows - row);
    const auto multiply = [&](auto format) {
      block_panel<decltype(format)>(packed, linear.inputs, x.part(row, count), totals);
      return true;
    };
    of_format(matrix.kind, multiply, false);
    for (int64_t i = 0; i < count * 2; ++i) {
      const int64_t at = i % 2 * LANES;
      const Floats total = load(totals + i * LANES);
      put(out + (row + i / 2) * linear.outputs + first + at, linear.bias ? total + load(linear.bias + first + at) : total,
          room - at, add);
    }
  }
}

// A panel of groups for all rows, in tiles of nearly equal size.
inline void group_panel_product(const Linear& linear, const Matrix& matrix, const Rows& x, int64_t panel, float* out, bool add) {
  const int64_t first = matrix.first + panel * PANEL, room = matrix.outputs - panel * PANEL;
  const int64_t parts = (x.rows + TILE - 1) / TILE;
  alignas(64) float totals[TILE * PANEL];
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = x.rows * part / parts, count = x.rows * (part + 1) / parts - from;
    const float* rows = static_cast<const float*>(x.data) + from * x.stride;
    group_tile_for<TILE>(matrix.kind, count)(matrix, linear.inputs, rows, x.stride, panel, totals);
    for (int64_t i = 0; i < count * 2; ++i) {
      const int64_t at = i % 2 * LANES;
      const Floats total = load(totals + i * LANES);
      put(out + (from + i / 2) * linear.outputs + first + at, linear.bias ? total + load(linear.bias + first + at) : total,
          room - at, add);
    }
  }
}

// The panels `from` … `to` of a layer, counted over its matrices, for rows that are prepared.
inline void panels_product(const Linear& linear, const Inputs& inputs, int64_t from, int64_t to, float* out, bool add) {
  int64_t front = 0;  // panels of the matrices before
  for (int i = 0; i < linear.count; front += panels(linear.matrices[i]), ++i) {
    const Matrix& matrix = linear.matrices[i];
    for (int64_t panel = std::max(from, front); panel < std::min(to, front + panels(matrix)); ++panel)
      if (in_blocks(matrix.kind))
        block_panel_product(linear, matrix, inputs.blocks, panel - front, out, add);
      else if (in_groups(matrix.kind))
        group_panel_product(linear, matrix, inputs.floats, panel - front, out, add);
      else
        panel_product(linear, matrix, matrix.kind == INT8 ? inputs.bytes : inputs.floats, panel - front, out, add);
  }
}

// out (rows, outputs) = x (rows, inputs) · Wᵀ, by all threads; added to `out` where `add`.
inline void product(Hand& hand, const Linear& linear, const float* x, int64_t rows, float* out, bool add, Quantized room) {
  const Inputs inputs = inputs_of(x, linear.inputs, rows, room);
  if (must_prepare(linear))
    hand.each(rows, 1, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) prepare(linear, inputs, row);
    });
  hand.each(panels(linear), piece_of(linear, hand.threads()),
            [&](int64_t from, int64_t to) { panels_product(linear, inputs, from, to, out, add); });
}

}  // namespace furrow
