// From rows of weights, as a checkpoint has them, to the panels that product.h reads, and back for a table of embeddings.
#pragma once

#include "product.h"

namespace furrow {

// Where the weight of an output for an input lies, counted in stored numbers.
inline int64_t position(const Linear& linear, int64_t output, int64_t input) {
  const int64_t per = linear.kind == INT8 ? Int8::PER : 1, steps = (linear.inputs + per - 1) / per;
  return ((output / PANEL * steps + input / per) * PANEL + output % PANEL) * per + input % per;
}

// Rows of numbers that stay as they are become the outputs from `first` on. Written panel by panel, input by input.
template <typename T>
void place(Hand& hand, const Linear& linear, const T* rows, int64_t count, int64_t first) {
  T* packed = static_cast<T*>(const_cast<void*>(linear.weights));
  const int64_t front = first / PANEL, back = (first + count - 1) / PANEL;
  hand.each(back - front + 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = front + begin; panel < front + end; ++panel) {
      const int64_t from = std::max(first, panel * PANEL), to = std::min(first + count, (panel + 1) * PANEL);
      for (int64_t input = 0; input < linear.inputs; ++input) {
        T* out = packed + position(linear, from, input);
        const T* in = rows + (from - first) * linear.inputs + input;
        for (int64_t output = from; output < to; ++output, in += linear.inputs) *out++ = *in;
      }
    }
  });
}

// One output's weights in ± 127 of the largest of them.
inline void place_bytes(const Linear& linear, const float* row, int64_t output) {
  Floats most = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= linear.inputs; at += LANES) most = larger(most, magnitude(load(row + at)));
  for (; at < linear.inputs; ++at) rest = std::max(rest, std::fabs(row[at]));
  const float scale = std::max(std::max(largest(most), rest) / 127.0f, 1.17549435e-38f);
  int8_t* packed = static_cast<int8_t*>(const_cast<void*>(linear.weights));
  int32_t sum = 0;
  for (int64_t input = 0; input < linear.inputs; ++input) {
    const int32_t value = static_cast<int32_t>(std::nearbyintf(row[input] / scale));
    packed[position(linear, output, input)] = static_cast<int8_t>(value);
    sum += value;
  }
  const_cast<int32_t*>(linear.sums)[output] = OFFSET * sum;
  const_cast<float*>(linear.scales)[output] = scale / 127.0f;
}

inline void pack(Hand& hand, const Linear& linear, const void* rows, int64_t count, int64_t first) {
  if (linear.kind == FLOAT32) return place(hand, linear, static_cast<const float*>(rows), count, first);
  if (linear.kind != INT8) return place(hand, linear, static_cast<const uint16_t*>(rows), count, first);
  hand.each(count, 64, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row)
      place_bytes(linear, static_cast<const float*>(rows) + row * linear.inputs, first + row);
  });
}

// The weights of the outputs `ids`, each as a row of `inputs` floats; not from INT8.
inline void look_up(const Linear& linear, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t input = 0; input < linear.inputs; ++input, ++out) {
      const int64_t at = position(linear, ids[i], input);
      if (linear.kind == FLOAT32) {
        *out = static_cast<const float*>(linear.weights)[at];
      } else {
        alignas(64) uint16_t lanes[LANES] = {static_cast<const uint16_t*>(linear.weights)[at]};
        alignas(64) float wide[LANES];
        store(wide, linear.kind == FLOAT16 ? load_half(lanes) : load_bfloat(lanes));
        *out = wide[0];
      }
    }
}

}  // namespace furrow
