// Rows of floats to ggml's blocks of 256 weights, whose groups have integers for scales.
#pragma once

#include "blocks_of_32.h"

namespace furrow {

// --- scales ------------------------------------------------------------------------------------------------------------

// The float16 next to `value` that is no smaller in magnitude; beyond its range the largest.
inline Half halved_away(float value) {
  const Half nearest = halved(value);
  const bool smaller = std::fabs(widened(nearest)) < std::min(std::fabs(value), LARGEST_HALF);
  return static_cast<Half>(nearest + smaller);  // as integers, float16 numbers grow with their magnitude
}

// The unit of which `extreme` is `range` times, or a little less where subnormal float16 values are too sparse for that.
inline Half unit_of(float extreme, int range) {
  constexpr float PRECISION = 1.0f / 2048;  // of normal float16 values
  const auto missed = [&](Half unit) {
    const float value = widened(unit), bound = static_cast<float>(range);
    return value == 0.0f ? std::fabs(extreme)
                         : std::fabs(extreme - value * std::nearbyint(std::clamp(extreme / value, -bound, bound)));
  };
  Half best = halved(extreme / static_cast<float>(range));
  if (missed(best) <= PRECISION * std::fabs(extreme) || std::fabs(extreme / static_cast<float>(range)) > LARGEST_HALF)
    return best;
  const auto consider = [&](Half unit) {
    if (missed(unit) < missed(best)) best = unit;
  };
  consider(halved_away(extreme / static_cast<float>(range)));
  for (int less = 1; less <= range / 32; ++less) consider(halved(extreme / static_cast<float>(range - less)));
  return best;
}

// --- blocks of 256, whose groups' scales are integers times the block's ------------------------------------------------

constexpr int LARGE = 256;

struct __attribute__((packed)) BlockQ2_K {
  static constexpr int WEIGHTS = LARGE;
  uint8_t scales[16];  // scale, and above it minimum, of 16 weights each
  uint8_t low[LARGE / 4];
  Half scale, minimum;
};
struct __attribute__((packed)) BlockQ3_K {
  static constexpr int WEIGHTS = LARGE;
  uint8_t high[LARGE / 8];
  uint8_t low[LARGE / 4];
  uint8_t scales[12];  // of 16 weights each, 6 bits
  Half scale;
};
struct __attribute__((packed)) BlockQ4_K {
  static constexpr int WEIGHTS = LARGE;
  Half scale, minimum;
  uint8_t scales[12];  // scale and minimum of 32 weights each, 6 bits
  uint8_t low[LARGE / 2];
};
struct __attribute__((packed)) BlockQ5_K {
  static constexpr int WEIGHTS = LARGE;
  Half scale, minimum;
  uint8_t scales[12];
  uint8_t high[LARGE / 8];
  uint8_t low[LARGE / 2];
};
struct __attribute__((packed)) BlockQ6_K {
  static constexpr int WEIGHTS = LARGE;
  uint8_t low[LARGE / 2];
  uint8_t high[LARGE / 4];
  int8_t scales[16];
  Half scale;
};

// Integers of a block of 256, and its groups' scales and minima as integers.
template <int GROUP>
struct Integers {
  static constexpr int GROUPS = LARGE / GROUP;
  int8_t q[LARGE];
  int8_t scales[GROUPS], minima[GROUPS];
  Half scale, minimum;
};

// The candidates 0 and `around` - 7 … `around` + 7, within bounds.
inline void integers_near(float around, int least, int most, int8_t* out) {
  const float bounded = std::clamp(around, static_cast<float>(least), static_cast<float>(most));
  const int first = static_cast<int>(std::nearbyint(bounded)) - CANDIDATES / 2;
  for (int i = 1; i < CANDIDATES; ++i) out[i] = static_cast<int8_t>(std::clamp(first + i, least, most));
  out[0] = 0;
}

// q in -LEVELS … LEVELS - 1 here, stored LEVELS higher; scales in -RANGE … RANGE - 1.
template <int GROUP, int LEVELS, int RANGE>
inline void symmetric_large(const float* x, const Steps& steps, Integers<GROUP>& out) {
  constexpr int GROUPS = LARGE / GROUP;
  static const float no_minima[CANDIDATES] = {};
  float scales[GROUPS], extreme = 0.0f;
  for (int group = 0; group < GROUPS; ++group) {
    scales[group] = symmetric_scale(x + group * GROUP, GROUP, LEVELS, steps);
    if (std::fabs(scales[group]) > std::fabs(extreme)) extreme = scales[group];
  }
  out.scale = unit_of(-extreme, RANGE);
  const float unit = widened(out.scale);
  for (int group = 0; group < GROUPS; ++group) {
    const float* from = x + group * GROUP;
    int8_t near[CANDIDATES];
    float tried[CANDIDATES];
    integers_near(unit == 0.0f ? 0.0f : scales[group] / unit, -RANGE, RANGE - 1, near);
    for (int i = 0; i < CANDIDATES; ++i) tried[i] = unit * near[i];
    const int best = best_pair(from, GROUP, tried, no_minima, -LEVELS, LEVELS - 1);
    out.scales[group] = near[best];
    int8_t* q = out.q + group * GROUP;
    to_integers(from, GROUP, tried[best], 0.0f, -LEVELS, LEVELS - 1, q);
    for (int i = 0; i < GROUP; ++i) q[i] = static_cast<int8_t>(q[i] + LEVELS);
  }
}

// q in 0 … LEVELS, scales and minima in 0 … RANGE; a minimum is subtracted.
template <int GROUP, int LEVELS, int RANGE>
inline void affine_large(const float* x, const Steps& steps, Integers<GROUP>& out) {
  constexpr int GROUPS = LARGE / GROUP;
  Affine found[GROUPS];
  float scale = 0.0f, minimum = 0.0f;
  for (int group = 0; group < GROUPS; ++group) {
    found[group] = affine_scale(x + group * GROUP, GROUP, LEVELS, steps, 0.0f);
    scale = std::max(scale, found[group].scale), minimum = std::min(minimum, found[group].minimum);
  }
  out.scale = unit_of(scale, RANGE), out.minimum = unit_of(-minimum, RANGE);
  const float unit = widened(out.scale), below = widened(out.minimum);
  for (int group = 0; group < GROUPS; ++group) {
    const float* from = x + group * GROUP;
    const float scale_steps = unit == 0.0f ? 0.0f : found[group].scale / unit;
    const float minimum_steps = below == 0.0f ? 0.0f : -found[group].minimum / below;
    const int first_scale = static_cast<int>(std::min<float>(RANGE, scale_steps)) - 1;
    const int first_minimum = static_cast<int>(std::min<float>(RANGE, minimum_steps)) - 1;
    int8_t scales[CANDIDATES], minima[CANDIDATES];
    float tried[CANDIDATES], subtracted[CANDIDATES];
    for (int i = 0; i < CANDIDATES; ++i) {
      const bool none = i == CANDIDATES - 1;  // in place of the largest of both
      scales[i] = static_cast<int8_t>(none ? 0 : std::clamp(first_scale + i % 4, 0, RANGE));
      minima[i] = static_cast<int8_t>(none ? 0 : std::clamp(first_minimum + i / 4, 0, RANGE));
      tried[i] = unit * scales[i], subtracted[i] = -below * minima[i];
    }
    const int best = best_pair(from, GROUP, tried, subtracted, 0, LEVELS);
    out.scales[group] = scales[best], out.minima[group] = minima[best];
    to_integers(from, GROUP, tried[best], subtracted[best], 0, LEVELS, out.q + group * GROUP);
  }
}

// Two bits each of 256 values: byte i of a half has values i, i + 32, i + 64 and i + 96 of it.
inline void write_pairs(const int8_t* q, int shift, uint8_t* out) {
  for (int half = 0; half < LARGE; half += 128)
    for (int i = 0; i < 32; ++i) {
      const int8_t* from = q + half + i;
      out[half / 4 + i] = (from[0] >> shift & 3) | (from[32] >> shift & 3) << 2 | (from[64] >> shift & 3) << 4 |
                          (from[96] >> shift & 3) << 6;
    }
}

// One bit each of 256 values: bit k of byte i is that of value 32 · k + i.
inline void write_bits(const int8_t* q, int shift, uint8_t* out) {
  for (int i = 0; i < 32; ++i) {
    uint8_t bits = 0;
    for (int k = 0; k < 8; ++k) bits |= (q[32 * k + i] >> shift & 1) << k;
    out[i] = bits;
  }
}

// Four bits each of 256 values; `apart` values lie between the two of a byte.
inline void write_nibbles(const int8_t* q, int apart, uint8_t* out) {
  for (int run = 0; run < LARGE; run += 2 * apart)
    for (int i = 0; i < apart; ++i) *out++ = (q[run + i] & 15) | (q[run + apart + i] & 15) << 4;
}

// Eight scales and eight minima of 6 bits: the upper two bits of the last four lie above the first ones.
inline void write_scales(const Integers<32>& from, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    const int scale = from.scales[i + 4], minimum = from.minima[i + 4];
    out[i] = from.scales[i] | scale >> 4 << 6;
    out[i + 4] = from.minima[i] | minimum >> 4 << 6;
    out[i + 8] = (scale & 15) | (minimum & 15) << 4;
  }
}

inline void quantize_block(const float* x, BlockQ2_K& out) {
  static const Steps steps(2, 0.2f, {0.0f, 0.35f});
  Integers<16> found;
  affine_large<16, 3, 15>(x, steps, found);
  for (int group = 0; group < 16; ++group) out.scales[group] = found.scales[group] | found.minima[group] << 4;
  write_pairs(found.q, 0, out.low);
  out.scale = found.scale, out.minimum = found.minimum;
}

inline void quantize_block(const float* x, BlockQ3_K& out) {
  static const Steps steps(8, 0.125f, {0.0f});
  Integers<16> found;
  symmetric_large<16, 4, 32>(x, steps, found);
  write_bits(found.q, 2, out.high);
  write_pairs(found.q, 0, out.low);
  uint8_t scales[16];
  for (int group = 0; group < 16; ++group) scales[group] = static_cast<uint8_t>(found.scales[group] + 32);
  for (int i = 0; i < 8; ++i) out.scales[i] = (scales[i] & 15) | (scales[i + 8] & 15) << 4;
  for (int i = 0; i < 4; ++i)
    out.scales[i + 8] = scales[i] >> 4 | scales[i + 4] >> 4 << 2 | scales[i + 8] >> 4 << 4 | scales[i + 12] >> 4 << 6;
  out.scale = found.scale;
}

inline void quantize_block(const float* x, BlockQ4_K& out) {
  static const Steps steps(4, 0.25f, {0.0f, 0.35f});
  Integers<32> found;
  affine_large<32, 15, 63>(x, steps, found);
  out.scale = found.scale, out.minimum = found.minimum;
  write_scales(found, out.scales);
  write_nibbles(found.q, 32, out.low);
}

inline void quantize_block(const float* x, BlockQ5_K& out) {
  static const Steps steps(4, 0.25f, {0.0f, 0.35f});
  Integers<32> found;
  affine_large<32, 31, 63>(x, steps, found);
  out.scale = found.scale, out.minimum = found.minimum;
  write_scales(found, out.scales);
  write_bits(found.q, 4, out.high);
  write_nibbles(found.q, 32, out.low);
}

inline void quantize_block(const float* x, BlockQ6_K& out) {
  static const Steps steps(8, 0.125f, {0.0f});
  Integers<16> found;
  symmetric_large<16, 32, 128>(x, steps, found);
  write_nibbles(found.q, 64, out.low);
  write_pairs(found.q, 4, out.high);
  std::copy(found.scales, found.scales + 16, out.scales);
  out.scale = found.scale;
}

}  // namespace furrow
