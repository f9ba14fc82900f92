// From rows of weights, as a checkpoint has them, to the panels that product.h reads, and back for a table of embeddings.
#pragma once

#include <numeric>

#include "blocks/packing.h"
#include "product.h"

namespace furrow {

// Where the weight of an output for an input lies, counted in stored numbers.
inline int64_t position(Kind kind, int64_t inputs, int64_t output, int64_t input) {
  const int64_t per = kind == INT8 ? Int8::PER : 1, steps = (inputs + per - 1) / per;
  return ((output / PANEL * steps + input / per) * PANEL + output % PANEL) * per + input % per;
}

// A block of inputs of some outputs of one panel, `from` … `to`. Rows are often a power of two apart and would throw each
// other out of the cache, so a few numbers of each are fetched together.
template <typename T>
void place_block(Kind kind, int64_t inputs, const T* rows, int64_t from, int64_t to, int64_t input, T* packed) {
  constexpr int64_t BLOCK = 64 / sizeof(T);
  T fetched[PANEL][BLOCK];
  const int64_t count = std::min(BLOCK, inputs - input);
  for (int64_t row = 0; row < to - from; ++row)
    std::memcpy(fetched[row], rows + row * inputs + input, count * sizeof(T));
  T* out = packed + position(kind, inputs, from, input);
  for (int64_t i = 0; i < count; ++i, out += PANEL)
    for (int64_t row = 0; row < to - from; ++row) out[row] = fetched[row][i];
}

// Rows of numbers that stay as they are become the matrix's outputs from `first` on.
template <typename T>
void place(Hand& hand, const Matrix& matrix, int64_t inputs, const T* rows, int64_t count, int64_t first) {
  T* packed = static_cast<T*>(const_cast<void*>(matrix.weights));
  const int64_t front = first / PANEL, back = (first + count - 1) / PANEL;
  hand.each(back - front + 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = front + begin; panel < front + end; ++panel) {
      const int64_t from = std::max(first, panel * PANEL), to = std::min(first + count, (panel + 1) * PANEL);
      for (int64_t input = 0; input < inputs; input += 64 / sizeof(T))
        place_block(matrix.kind, inputs, rows + (from - first) * inputs, from, to, input, packed);
    }
  });
}

// One output's weights, whole numbers of 8 bits.
inline void place_bytes(const Matrix& matrix, int64_t inputs, const int8_t* values, int64_t output) {
  const int32_t sum = std::accumulate(values, values + inputs, 0);
  auto* packed = static_cast<int8_t*>(const_cast<void*>(matrix.weights)) + position(INT8, inputs, output, 0);
  const int64_t whole = inputs / Int8::PER * Int8::PER;
  for (int64_t input = 0; input < whole; input += Int8::PER, packed += PANEL * Int8::PER)
    std::memcpy(packed, values + input, Int8::PER);
  std::memcpy(packed, values + whole, inputs - whole);
  const_cast<int32_t*>(matrix.sums)[output] = OFFSET * sum;
}

// The same from floats: ± 127 of the largest of them; `bytes` is room for them, rounded up to whole vectors.
inline void round_and_place(const Matrix& matrix, int64_t inputs, const float* row, int64_t output, uint8_t* bytes) {
  float largest_of_row;
  scaled_bytes<0>(row, inputs, byte_stride(inputs), bytes, &largest_of_row);
  place_bytes(matrix, inputs, reinterpret_cast<const int8_t*>(bytes), output);
  const_cast<float*>(matrix.scales)[output] = largest_of_row / 127.0f / 127.0f;
}

inline void pack(Hand& hand, const Matrix& matrix, int64_t inputs, const void* rows, int64_t count, int64_t first) {
  if (in_blocks(matrix.kind)) return pack_blocks(hand, matrix, inputs, rows, count, first);
  if (matrix.kind == INT4_GROUPS || matrix.kind == E2M1_GROUPS) return place_nibbles(hand, matrix, inputs, static_cast<const uint8_t*>(rows), count, first);
  if (matrix.kind == E4M3_GROUPS) return place(hand, matrix, inputs, static_cast<const uint8_t*>(rows), count, first);
  if (matrix.kind == FLOAT32) return place(hand, matrix, inputs, static_cast<const float*>(rows), count, first);
  if (matrix.kind != INT8) return place(hand, matrix, inputs, static_cast<const uint16_t*>(rows), count, first);
  hand.each(count, 64, [&](int64_t from, int64_t to) {
    std::vector<uint8_t> bytes(byte_stride(inputs) + LANES);
    for (int64_t row = from; row < to; ++row)
      if (matrix.group)
        place_bytes(matrix, inputs, static_cast<const int8_t*>(rows) + row * inputs, first + row);
      else
        round_and_place(matrix, inputs, static_cast<const float*>(rows) + row * inputs, first + row, bytes.data());
  });
}

// The weights of one output of a matrix as floats.
inline void look_up(const Matrix& matrix, int64_t inputs, int64_t output, float* out) {
  const auto from_blocks = [&](auto format) { return look_up_blocks<decltype(format)>(matrix, inputs, output, out), true; };
  if (of_format(matrix.kind, from_blocks, false)) return;
  if (matrix.kind == INT8) {
    const auto* packed = static_cast<const int8_t*>(matrix.weights);
    const float scale = matrix.scales[output] * 127.0f;  // a scale is also that of an activation's 127 levels
    for (int64_t input = 0; input < inputs; ++input) out[input] = packed[position(INT8, inputs, output, input)] * scale;
    return;
  }
  for (int64_t input = 0; input < inputs; ++input) {
    const int64_t at = position(matrix.kind, inputs, output, input);
    if (matrix.kind == FLOAT32) {
      out[input] = static_cast<const float*>(matrix.weights)[at];
    } else {
      alignas(64) uint16_t lanes[LANES] = {static_cast<const uint16_t*>(matrix.weights)[at]};
      alignas(64) float wide[LANES];
      store(wide, matrix.kind == FLOAT16 ? load_half(lanes) : load_bfloat(lanes));
      out[input] = wide[0];
    }
  }
}

// The weights of the outputs `ids`, each as a row of `inputs` floats.
inline void look_up(const Linear& linear, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int one = 0; one < linear.count; ++one) {
      const Matrix& matrix = linear.matrices[one];
      if (ids[i] >= matrix.first && ids[i] < matrix.first + matrix.outputs)
        look_up(matrix, linear.inputs, ids[i] - matrix.first, out + i * linear.inputs);
    }
}

}  // namespace furrow
