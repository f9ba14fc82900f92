// Rows of floats to blocks of 32 weights as ggml lays them out: its structs block_q… (github.com/ggml-org/ggml,
// src/ggml-common.h).
#pragma once

#include "scales.h"

namespace furrow {

// --- float16 scales --------------------------------------------------------------------------------------------------

using Half = uint16_t;
constexpr float LARGEST_HALF = 65504.0f;

inline float widened(Half value) { return half_to_float(value); }

// The nearest float16; beyond its range the largest.
inline Half halved(float value) { return float_to_half(std::clamp(value, -LARGEST_HALF, LARGEST_HALF)); }

// --- blocks of 32 ----------------------------------------------------------------------------------------------------

constexpr int SMALL = 32;

struct __attribute__((packed)) BlockQ4_0 {
  static constexpr int WEIGHTS = SMALL;
  Half scale;
  uint8_t low[SMALL / 2];
};
struct __attribute__((packed)) BlockQ4_1 {
  static constexpr int WEIGHTS = SMALL;
  Half scale, minimum;
  uint8_t low[SMALL / 2];
};
struct __attribute__((packed)) BlockQ5_0 {
  static constexpr int WEIGHTS = SMALL;
  Half scale;
  uint32_t high;
  uint8_t low[SMALL / 2];
};
struct __attribute__((packed)) BlockQ5_1 {
  static constexpr int WEIGHTS = SMALL;
  Half scale, minimum;
  uint32_t high;
  uint8_t low[SMALL / 2];
};
struct __attribute__((packed)) BlockQ8_0 {
  static constexpr int WEIGHTS = SMALL;
  Half scale;
  int8_t values[SMALL];
};

// The lower four bits of 32 values: the first half of them below, the second above.
inline void write_low(const int8_t* q, uint8_t* low) {
  for (int i = 0; i < SMALL / 2; ++i) low[i] = (q[i] & 15) | (q[i + SMALL / 2] & 15) << 4;
}

// The fifth bit of 32 values.
inline uint32_t fifth_bits(const int8_t* q) {
  uint32_t bits = 0;
  for (int i = 0; i < SMALL; ++i) bits |= static_cast<uint32_t>(q[i] >> 4 & 1) << i;
  return bits;
}

template <int LEVELS>
inline Half symmetric_small(const float* x, int8_t* q) {
  static const Steps steps(8, 0.125f, {0.0f});
  const Half scale = halved(symmetric_scale(x, SMALL, LEVELS, steps));
  to_integers(x, SMALL, widened(scale), 0.0f, -LEVELS, LEVELS - 1, q);
  for (int i = 0; i < SMALL; ++i) q[i] = static_cast<int8_t>(q[i] + LEVELS);
  return scale;
}

template <int LEVELS, typename Block>
inline void affine_small(const float* x, Block& out, int8_t* q) {
  static const Steps steps(4, 0.25f, {0.0f, 0.35f});
  const Affine found = affine_scale(x, SMALL, LEVELS, steps, INFINITY);
  out.scale = halved(found.scale), out.minimum = halved(found.minimum);
  to_integers(x, SMALL, widened(out.scale), widened(out.minimum), 0, LEVELS, q);
}

inline void quantize_block(const float* x, BlockQ4_0& out) {
  int8_t q[SMALL];
  out.scale = symmetric_small<8>(x, q);
  write_low(q, out.low);
}

inline void quantize_block(const float* x, BlockQ4_1& out) {
  int8_t q[SMALL];
  affine_small<15>(x, out, q);
  write_low(q, out.low);
}

inline void quantize_block(const float* x, BlockQ5_0& out) {
  int8_t q[SMALL];
  out.scale = symmetric_small<16>(x, q);
  out.high = fifth_bits(q);
  write_low(q, out.low);
}

inline void quantize_block(const float* x, BlockQ5_1& out) {
  int8_t q[SMALL];
  affine_small<31>(x, out, q);
  out.high = fifth_bits(q);
  write_low(q, out.low);
}

inline void quantize_block(const float* x, BlockQ8_0& out) {
  float most = 0.0f;
  for (int i = 0; i < SMALL; ++i) most = std::max(most, std::fabs(x[i]));
  out.scale = halved(most / 127.0f);
  to_integers(x, SMALL, widened(out.scale), 0.0f, -127, 127, out.values);
}

}  // namespace furrow
