// Rows of activations in the numbers that the kinds of weights are multiplied by: floats, bytes with a scale for each row, or
// bytes with a scale for each 32 inputs.
#pragma once

#include <algorithm>

#include "blocks/format.h"
#include "layer.h"

namespace furrow {

constexpr float SMALLEST = 1.17549435e-38f;  // divides a row of zeros
constexpr int64_t LINE_BYTES = 64;

// Rows to multiply: `rows` of them, `stride` apart, counted in a kind's inputs. INT8: in bytes, with a scale for each.
struct Rows {
  const void* data;
  const float* scales;
  int64_t rows, stride;
};

// Rows in blocks of 32 inputs, so that an outlier costs its own block only; `stride` blocks from row to row. The sums are those
// that offsets and minima of weights are multiplied by.
struct BlockRows {
  int8_t* bytes;
  float* scales;
  int32_t* negated[2];  // -Σ bytes: over 32 inputs, over 16
  float* weighted[2];   // scale · Σ bytes, likewise
  int64_t rows, stride;

  BlockRows part(int64_t first, int64_t count) const {
    const int64_t at = first * stride;
    return {bytes + at * BLOCK, scales + at, {negated[0] + at, negated[1] + 2 * at}, {weighted[0] + at, weighted[1] + 2 * at}, count, stride};
  }
};

// Memory for rows in every form; floats stay where they are. Bytes: see `quantized_room`.
struct Quantized {
  char* memory;
};

// The rows of a product in every form.
struct Inputs {
  Rows floats, bytes;
  BlockRows blocks;

  // `count` of the rows from `first` on.
  Inputs part(int64_t first, int64_t count) const {
    const float* x = static_cast<const float*>(floats.data) + first * floats.stride;
    const uint8_t* room = static_cast<const uint8_t*>(bytes.data) + first * bytes.stride * 4;
    return {{x, nullptr, count, floats.stride}, {room, bytes.scales + first, count, bytes.stride}, blocks.part(first, count)};
  }
};

inline int64_t byte_stride(int64_t inputs) { return (inputs + 3) / 4 * 4; }
inline int64_t block_stride(int64_t inputs) { return (inputs + BLOCK - 1) / BLOCK; }
inline int64_t whole_lines(int64_t bytes) { return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES; }

// `x`: `rows` rows, `width` floats apart, which is at least as many as a linear layer has inputs.
inline Inputs inputs_of(const float* x, int64_t width, int64_t rows, Quantized room) {
  char* memory = room.memory;
  const auto take = [&](int64_t bytes) { return std::exchange(memory, memory + whole_lines(bytes)); };
  const int64_t stride = byte_stride(width), blocks = rows * block_stride(width);
  Inputs inputs{{x, nullptr, rows, width}, {nullptr, nullptr, rows, stride / 4}, {}};
  inputs.bytes.data = take(rows * stride + LANES);
  inputs.bytes.scales = reinterpret_cast<float*>(take(rows * 4));
  BlockRows& to = inputs.blocks;
  to.rows = rows, to.stride = block_stride(width);
  to.bytes = reinterpret_cast<int8_t*>(take(blocks * BLOCK));
  to.scales = reinterpret_cast<float*>(take(blocks * 4));
  for (int form = 0; form < 2; ++form) {
    to.negated[form] = reinterpret_cast<int32_t*>(take(blocks * 4 * (form + 1)));
    to.weighted[form] = reinterpret_cast<float*>(take(blocks * 4 * (form + 1)));
  }
  return inputs;
}

// Bytes for `rows` rows of `width`.
inline int64_t quantized_room(int64_t rows, int64_t width) {
  const int64_t blocks = rows * block_stride(width);
  return whole_lines(rows * byte_stride(width) + LANES) + whole_lines(rows * 4) + whole_lines(blocks * BLOCK) +
         3 * whole_lines(blocks * 4) + 2 * whole_lines(blocks * 8);
}

// A row's values as bytes, its own largest becoming ± 127, each ABOVE its value; and that largest. Where the row holds NaN or
// infinity the largest is NaN. `bytes` has room for `room` of them and a vector.
template <int ABOVE>
void scaled_bytes(const float* row, int64_t count, int64_t room, uint8_t* bytes, float* largest_of_row) {
  Floats most = all(0.0f), poison = all(0.0f);
  float rest = 0.0f, spoilt = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    most = larger(most, magnitude(load(row + at)));
    poison = fma(load(row + at), all(0.0f), poison);
  }
  for (int64_t i = at; i < count; ++i) rest = std::max(rest, std::fabs(row[i])), spoilt += row[i] * 0.0f;
  const float divisor = std::max({largest(most), rest, SMALLEST});
  for (int64_t i = 0; i < at; i += LANES)
    store_bytes(bytes + i, plus(rounded(load(row + i) / all(divisor) * all(127.0f)), all(ABOVE)));
  for (int64_t i = at; i < count; ++i)
    bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyintf(row[i] / divisor * 127.0f)) + ABOVE);
  for (int64_t i = count; i < room; ++i) bytes[i] = ABOVE;
  *largest_of_row = divisor + spoilt + sum(poison);
}

// 32 values: their largest becomes ± 127. Where they hold NaN or infinity the scale is NaN. `block`: of all rows.
inline void quantize_block(const float* x, int64_t block, const BlockRows& to) {
  Floats most = all(0.0f), poison = all(0.0f);
  for (int64_t at = 0; at < BLOCK; at += LANES) {
    most = larger(most, magnitude(load(x + at)));
    poison = fma(load(x + at), all(0.0f), poison);
  }
  const float divisor = std::max(largest(most), SMALLEST), scale = (divisor + sum(poison)) / 127.0f;
  Ints vectors[2] = {all(0), all(0)};
  for (int64_t at = 0; at < BLOCK; at += LANES) {
    const Ints values = rounded(load(x + at) / all(divisor) * all(127.0f));
    store_bytes(reinterpret_cast<uint8_t*>(to.bytes) + block * BLOCK + at, values);
    vectors[at / 16] = plus(vectors[at / 16], values);
  }
  const int32_t sums[2] = {sum(vectors[0]), sum(vectors[1])};
  to.scales[block] = scale;
  to.negated[0][block] = -(sums[0] + sums[1]);
  to.weighted[0][block] = scale * static_cast<float>(sums[0] + sums[1]);
  for (int half = 0; half < 2; ++half) {
    to.negated[1][2 * block + half] = -sums[half];
    to.weighted[1][2 * block + half] = scale * static_cast<float>(sums[half]);
  }
}

inline bool has(const Linear& linear, Kind kind) {
  for (int i = 0; i < linear.count; ++i)
    if (linear.matrices[i].kind == kind) return true;
  return false;
}

inline bool has_blocks(const Linear& linear) {
  for (int i = 0; i < linear.count; ++i)
    if (in_blocks(linear.matrices[i].kind)) return true;
  return false;
}

inline bool must_prepare(const Linear& linear) { return has(linear, INT8) || has_blocks(linear); }

// Converts a row from floats into the other forms that the layer needs.
inline void prepare(const Linear& linear, const Inputs& inputs, int64_t row) {
  const float* x = static_cast<const float*>(inputs.floats.data) + row * inputs.floats.stride;
  if (has(linear, INT8)) {
    uint8_t* bytes = static_cast<uint8_t*>(const_cast<void*>(inputs.bytes.data)) + row * inputs.bytes.stride * 4;
    scaled_bytes<OFFSET>(x, linear.inputs, byte_stride(linear.inputs), bytes, const_cast<float*>(inputs.bytes.scales) + row);
  }
  if (has_blocks(linear))
    for (int64_t block = 0; block < linear.inputs / BLOCK; ++block)
      quantize_block(x + block * BLOCK, row * inputs.blocks.stride + block, inputs.blocks);
}

}  // namespace furrow
