// Rows of floats to rows of blocks, by all threads.
#pragma once

#include "../layer.h"
#include "../pool.h"
#include "blocks_of_256.h"

namespace furrow {

// True if no weight is NaN or infinite.
inline bool finite(const float* x, int64_t count) {
  bool found = true;
  for (int64_t i = 0; i < count; ++i) found &= std::fabs(x[i]) <= 3.402823466e38f;
  return found;
}

template <typename Block>
inline void quantize_rows(Hand& hand, const float* rows, int64_t count, int64_t inputs, char* out,
                          std::atomic<int64_t>& result) {
  const int64_t blocks = inputs / Block::WEIGHTS;
  hand.each(count, 4, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const float* x = rows + row * inputs;
      if (!finite(x, inputs)) {
        result.store(row);
        continue;
      }
      auto* place = reinterpret_cast<Block*>(out) + row * blocks;
      for (int64_t block = 0; block < blocks; ++block) quantize_block(x + block * Block::WEIGHTS, place[block]);
    }
  });
}

constexpr int64_t UNKNOWN_FORMAT = -2;  // or one that is not included

template <typename Block, Kind KIND>
inline void quantize_if_included(Hand& hand, const float* rows, int64_t count, int64_t inputs, char* out,
                                 std::atomic<int64_t>& result) {
  if constexpr (included(KIND))
    quantize_rows<Block>(hand, rows, count, inputs, out, result);
  else
    result.store(UNKNOWN_FORMAT);
}

// `type`: the format's number in a GGUF file. `result` becomes the index of a row with NaN or infinity, or UNKNOWN_FORMAT.
inline void quantize(Hand& hand, int32_t type, const float* rows, int64_t count, int64_t inputs, char* out,
                     std::atomic<int64_t>& result) {
  switch (type) {
    case 2: return quantize_if_included<BlockQ4_0, Q4_0_BLOCKS>(hand, rows, count, inputs, out, result);
    case 3: return quantize_if_included<BlockQ4_1, Q4_1_BLOCKS>(hand, rows, count, inputs, out, result);
    case 6: return quantize_if_included<BlockQ5_0, Q5_0_BLOCKS>(hand, rows, count, inputs, out, result);
    case 7: return quantize_if_included<BlockQ5_1, Q5_1_BLOCKS>(hand, rows, count, inputs, out, result);
    case 8: return quantize_if_included<BlockQ8_0, Q8_0_BLOCKS>(hand, rows, count, inputs, out, result);
    case 10: return quantize_if_included<BlockQ2_K, Q2_K_BLOCKS>(hand, rows, count, inputs, out, result);
    case 11: return quantize_if_included<BlockQ3_K, Q3_K_BLOCKS>(hand, rows, count, inputs, out, result);
    case 12: return quantize_if_included<BlockQ4_K, Q4_K_BLOCKS>(hand, rows, count, inputs, out, result);
    case 13: return quantize_if_included<BlockQ5_K, Q5_K_BLOCKS>(hand, rows, count, inputs, out, result);
    case 14: return quantize_if_included<BlockQ6_K, Q6_K_BLOCKS>(hand, rows, count, inputs, out, result);
    default: result.store(UNKNOWN_FORMAT);
  }
}

}  // namespace furrow
