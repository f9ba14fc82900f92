// Products of rows with a panel of blocks: y = Σ over blocks of activation scale · (weight scale · Σ value · activation) + minima.
// Sums over a scale's inputs are exact integers, and those of the blocks are added in the order of the inputs.
#pragma once

#include <algorithm>
#include <array>

#include "format.h"
#include "../inputs.h"

namespace furrow {

constexpr int BLOCK_TILE = LANES == 16 ? 8 : BYTE_WEIGHTS ? 6 : 4;  // rows whose integer sums fill the registers
constexpr bool TOTALS_STAY = LANES == 16;   // in registers over a run: other processors have half as many
constexpr int RUN_TILE = TOTALS_STAY ? 6 : BLOCK_TILE;  // rows whose sums and totals fill the registers
constexpr int64_t FEW = 3;      // rows that wait for memory longer than they are multiplied
constexpr int64_t GROUP = 128;  // rows for which a panel is unpacked once

// How a scale's inputs are summed.
enum class Form { OFFSET_VALUES, MINIMA, SIGNED };

// Memory that is read soon: `bytes` of it are asked for with each block that is multiplied, so that memory and products take
// their time together. A processor foresees what is read from front to back, but not beyond a page, and not in bursts.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;
};

// The number of steps whose pairs of products are added in 16 bits before they are widened, where that takes fewer instructions.
// Activations lie within ± 127.
template <typename F>
constexpr int chain_of() {
  int chain = 1;
  if (IN_PAIRS && !F::WIDE)
    while (2 * chain <= F::SUB / 4 && 2 * chain * 2 * 127 * F::MOST <= 32767) chain *= 2;
  return chain;
}

// The sums after CHAIN steps of a block, from `step` on. `words`: four activations of the first row; those of the next row lie `stride`
// further. `before(row, half)`: the sums before.
template <typename Values, Form FORM, int CHAIN, int ROWS, typename Before>
[[gnu::always_inline]] inline void add_steps(const uint8_t* values, int step, const int32_t* words, int64_t stride, const Before& before,
                                             Ints (&sums)[ROWS][2]) {
  if constexpr (CHAIN == 1) {
    const Ints low = Values::read(values, 0, step), high = Values::read(values, 1, step);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Ints four = all(words[i * stride]);
      sums[i][0] = FORM == Form::SIGNED ? dot4_signed(low, four, before(i, 0)) : dot4_unsigned(low, four, before(i, 0));
      sums[i][1] = FORM == Form::SIGNED ? dot4_signed(high, four, before(i, 1)) : dot4_unsigned(high, four, before(i, 1));
    }
  } else {
    Ints pairs[ROWS][2];
#pragma GCC unroll 8
    for (int link = 0; link < CHAIN; ++link) {
      const Ints low = in_register(Values::read(values, 0, step + link)), high = in_register(Values::read(values, 1, step + link));
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Ints four = all(words[i * stride + link]);
        pairs[i][0] = link == 0 ? multiplied_pairs(low, four) : plus_pairs(pairs[i][0], multiplied_pairs(low, four));
        pairs[i][1] = link == 0 ? multiplied_pairs(high, four) : plus_pairs(pairs[i][1], multiplied_pairs(high, four));
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * ROWS; ++i) sums[i / 2][i % 2] = widened_pairs(pairs[i / 2][i % 2], before(i / 2, i % 2));
  }
}

// Adds `blocks` blocks, from `block` of the rows on, to the totals (ROWS, PANEL) of the rows from `row` on. `Values` is the form of
// `values`.
template <typename Values, int ROWS, int SUB, Form FORM, int CHAIN>
void block_tile(const uint8_t* values, const UnpackedScales& unpacked, int64_t blocks, const BlockRows& x, int64_t row, int64_t block,
                int shift, float* totals, Ahead ahead) {
  constexpr int SUBS = BLOCK / SUB, WHICH = SUBS - 1;
  const int64_t stride = x.stride, front = row * stride + block;
  const auto* words = reinterpret_cast<const int32_t*>(x.bytes) + front * STEPS;
  const float *scales = x.scales + front, *weighted = x.weighted[WHICH] + front * SUBS;
  const int32_t* negated = x.negated[WHICH] + front * SUBS;
  const float *worth = unpacked.scales, *least = unpacked.minima;
  Floats running[ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < (TOTALS_STAY ? 2 * ROWS : 0); ++i) running[i / 2][i % 2] = load(totals + i * LANES);
  for (int64_t number = 0; number < blocks; ++number, values += Values::BYTES, words += STEPS, ahead.from += ahead.bytes) {
    for (int64_t at = 0; at < ahead.bytes; at += LINE_BYTES) __builtin_prefetch(ahead.from + at);
#pragma GCC unroll 2
    for (int part = 0; part < SUBS; ++part, worth += PANEL, least += PANEL) {
      const int64_t sub = number * SUBS + part;
      Ints sums[ROWS][2];
#pragma GCC unroll 8
      for (int step = part * (SUB / 4); step < (part + 1) * (SUB / 4); step += CHAIN) {
        const auto before = [&](int i, int half) {
          if (step > part * (SUB / 4)) return sums[i][half];
          return FORM == Form::OFFSET_VALUES ? times_power_of_two(all(negated[i * stride * SUBS + sub]), shift) : all(0);
        };
        add_steps<Values, FORM, CHAIN>(values, step, words + step, stride * STEPS, before, sums);
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Floats scale = all(scales[i * stride + number]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          float* total = totals + i * PANEL + half * LANES;
          const Floats before = TOTALS_STAY ? running[i][half] : load(total);
          Floats value = fma(to_floats(sums[i][half]) * load(worth + half * LANES), scale, before);
          if (FORM == Form::MINIMA) value = fma(load(least + half * LANES), all(weighted[i * stride * SUBS + sub]), value);
          if (TOTALS_STAY)
            running[i][half] = value;
          else
            store(total, value);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < (TOTALS_STAY ? 2 * ROWS : 0); ++i) store(totals + i * LANES, running[i / 2][i % 2]);
}

using BlockTile = void (*)(const uint8_t*, const UnpackedScales&, int64_t, const BlockRows&, int64_t, int64_t, int, float*, Ahead);

template <typename Values, int SUB, Form FORM, int CHAIN, int... ROWS>
constexpr std::array<BlockTile, sizeof...(ROWS)> block_tiles(std::integer_sequence<int, ROWS...>) {
  return {block_tile<Values, ROWS + 1, SUB, FORM, CHAIN>...};
}

// By the number of rows less one, at most MOST of them.
template <typename Values, int SUB, Form FORM, int CHAIN, int MOST>
constexpr auto TILES = block_tiles<Values, SUB, FORM, CHAIN>(std::make_integer_sequence<int, MOST>{});

template <typename F>
constexpr Form FORM_OF = F::MINIMA ? Form::MINIMA : F::WIDE && !BYTE_WEIGHTS ? Form::SIGNED : Form::OFFSET_VALUES;

// The products of a panel with few rows, added to the totals. They wait for memory, and a processor foresees best what is read from
// front to back: scales are read just before their values, and nothing is asked for.
template <typename F>
void block_panel_in_order(const uint8_t* packed, int64_t inputs, const BlockRows& x, BlockTile tile, float* totals) {
  UnpackedScales scales;
  for (int64_t first = 0; first < inputs; first += F::UNIT, packed += F::BYTES * PANEL) {
    unpack_scales<F>(packed, scales.scales, scales.minima);
    tile(packed + F::VALUES * PANEL, scales, F::UNIT / BLOCK, x, 0, first / BLOCK, F::SHIFT, totals, {packed, 0});
  }
}

// The products of a panel with rows, at most GROUP: totals (rows, PANEL). The order of the sums is the same for any number of rows.
template <typename F>
void block_panel(const uint8_t* packed, int64_t inputs, const BlockRows& x, float* totals) {
  for (int64_t at = 0; at < x.rows * PANEL; at += LANES) store(totals + at, all(0.0f));  // std::fill stores them one by one
  const auto tile_of = [](int64_t rows) { return TILES<Packed<F>, F::SUB, FORM_OF<F>, chain_of<F>(), BLOCK_TILE>[rows - 1]; };
  if (x.rows <= FEW) return block_panel_in_order<F>(packed, inputs, x, tile_of(x.rows), totals);
  constexpr int64_t UNIT_BLOCKS = F::UNIT / BLOCK, BYTES_OF_BLOCK = F::BYTES * PANEL / UNIT_BLOCKS;
  Unpacked run;
  const int64_t tiles = (x.rows + RUN_TILE - 1) / RUN_TILE;
  for (int64_t first = 0; first < inputs; first += RUN) {
    const int64_t blocks = std::min(RUN, inputs - first) / BLOCK, block = first / BLOCK;
    const uint8_t *values = packed + F::VALUES * PANEL, *next = packed + blocks * BYTES_OF_BLOCK;
    unpack_scales<F>(packed, blocks / UNIT_BLOCKS, run);
    if (x.rows <= BLOCK_TILE) {
      tile_of(x.rows)(values, run, blocks, x, 0, block, F::SHIFT, totals, {next, BYTES_OF_BLOCK});
    } else {
      unpack_values<F>(values, blocks, run.values);
      for (int64_t number = 0; number < tiles; ++number) {
        const int64_t from = x.rows * number / tiles, to = x.rows * (number + 1) / tiles;
        const BlockTile tile = TILES<Ready, F::SUB, FORM_OF<F>, chain_of<F>(), RUN_TILE>[to - from - 1];
        tile(run.values, run, blocks, x, from, block, F::SHIFT, totals + from * PANEL, {next, number == 0 ? BYTES_OF_BLOCK : 0});
      }
    }
    packed = next;
  }
}

}  // namespace furrow
