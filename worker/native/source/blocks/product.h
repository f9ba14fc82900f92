// Products of rows with a panel of blocks: y = Σ over blocks of activation scale · (weight scale · Σ value · activation) + minima.
// Sums over a scale's inputs are exact integers, and those of the blocks are added in the order of the inputs.
#pragma once

#include <algorithm>
#include <array>

#include "format.h"
#include "../inputs.h"

namespace furrow {

constexpr int BLOCK_TILE = LANES == 16 ? 8 : BYTE_WEIGHTS ? 6 : 4;  // rows whose integer sums fill the registers
constexpr int64_t GROUP = 128;  // rows for which a panel is unpacked once

// How a scale's inputs are summed.
enum class Form { OFFSET_VALUES, MINIMA, SIGNED };

// Adds a run's blocks, `blocks` of them from `block` on, to the totals (ROWS, PANEL) of the rows from `row` on.
template <int ROWS, int SUB, Form FORM>
void block_tile(const Unpacked& run, int64_t blocks, const BlockRows& x, int64_t row, int64_t block, int shift, float* totals) {
  constexpr int SUBS = BLOCK / SUB, WHICH = SUBS - 1;
  const int64_t stride = x.stride, front = row * stride + block;
  const auto* words = reinterpret_cast<const int32_t*>(x.bytes) + front * STEPS;
  const float *scales = x.scales + front, *weighted = x.weighted[WHICH] + front * SUBS;
  const int32_t* negated = x.negated[WHICH] + front * SUBS;
  const uint8_t* values = run.values;
  for (int64_t sub = 0; sub < blocks * SUBS; ++sub) {
    Ints sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
      sums[i][0] = sums[i][1] =
          FORM == Form::OFFSET_VALUES ? times_power_of_two(all(negated[i * stride * SUBS + sub]), shift) : all(0);
#pragma GCC unroll 8
    for (int step = 0; step < SUB / 4; ++step, values += 2 * VECTOR, ++words) {
      const Ints low = load(values), high = load(values + VECTOR);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Ints four = all(words[i * stride * STEPS]);
        sums[i][0] = FORM == Form::SIGNED ? dot4_signed(low, four, sums[i][0]) : dot4_unsigned(low, four, sums[i][0]);
        sums[i][1] = FORM == Form::SIGNED ? dot4_signed(high, four, sums[i][1]) : dot4_unsigned(high, four, sums[i][1]);
      }
    }
    const float *worth = run.scales + sub * PANEL, *least = run.minima + sub * PANEL;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Floats scale = all(scales[i * stride + sub / SUBS]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* total = totals + i * PANEL + half * LANES;
        Floats value = fma(to_floats(sums[i][half]) * load(worth + half * LANES), scale, load(total));
        if (FORM == Form::MINIMA) value = fma(load(least + half * LANES), all(weighted[i * stride * SUBS + sub]), value);
        store(total, value);
      }
    }
  }
}

using BlockTile = void (*)(const Unpacked&, int64_t, const BlockRows&, int64_t, int64_t, int, float*);

template <int SUB, Form FORM, int... ROWS>
constexpr std::array<BlockTile, sizeof...(ROWS)> block_tiles(std::integer_sequence<int, ROWS...>) {
  return {block_tile<ROWS + 1, SUB, FORM>...};
}

// For `rows` rows, at most BLOCK_TILE. There is one set for each form, not for each format.
template <int SUB, Form FORM>
BlockTile block_tile_for(int64_t rows) {
  static constexpr auto known = block_tiles<SUB, FORM>(std::make_integer_sequence<int, BLOCK_TILE>{});
  return known[rows - 1];
}

// The products of a panel with rows, at most GROUP: totals (rows, PANEL).
template <typename F>
void block_panel(const uint8_t* packed, int64_t inputs, const BlockRows& x, float* totals) {
  constexpr Form FORM = F::MINIMA ? Form::MINIMA : F::LOW == 8 && !BYTE_WEIGHTS ? Form::SIGNED : Form::OFFSET_VALUES;
  Unpacked run;
  std::fill(totals, totals + x.rows * PANEL, 0.0f);
  const int64_t tiles = (x.rows + BLOCK_TILE - 1) / BLOCK_TILE;
  for (int64_t first = 0; first < inputs; first += RUN) {
    const int64_t blocks = std::min(RUN, inputs - first) / BLOCK;
    unpack<F>(packed + first / F::UNIT * F::BYTES * PANEL, blocks, run);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t from = x.rows * tile / tiles, to = x.rows * (tile + 1) / tiles;
      block_tile_for<F::SUB, FORM>(to - from)(run, blocks, x, from, first / BLOCK, F::SHIFT, totals + from * PANEL);
    }
  }
}

}  // namespace furrow
