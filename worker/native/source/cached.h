// Keys and values as they are cached: of each position and head a row of `dim` numbers, in float32, float16 or bfloat16, or
// (Q8_0_BLOCKS) as bytes with a scale of 16 bits for each 32 of them; scales lie behind the bytes.
#pragma once

#include <algorithm>

#include "blocks/format.h"
#include "layer.h"
#include "simd.h"

namespace furrow {

constexpr int64_t ROWS_AHEAD = 2 * LANES;  // rows are asked for so long before they are read

inline int64_t cached_bytes(Kind kind, int64_t dim) {
  if (kind == Q8_0_BLOCKS) return dim + 2 * ((dim + BLOCK - 1) / BLOCK);
  return dim * (kind == FLOAT32 ? 4 : 2);
}

// The nearest, even where two are as near. Infinity where it is too large; NaN stays NaN.
inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest);
}

// The largest of 32 values becomes ± 127. Where they hold NaN or infinity the scale is NaN or infinite.
inline void write_codes(const float* row, int64_t dim, char* to) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(to + dim);
  for (int64_t from = 0; from < dim; from += BLOCK) {
    const int64_t end = std::min<int64_t>(from + BLOCK, dim);
    Floats most = all(0.0f), poison = all(0.0f);
    for (int64_t at = from; at < end; at += LANES) {
      most = larger(most, magnitude(load(row + at)));
      poison = fma(load(row + at), all(0.0f), poison);
    }
    const uint16_t half = float_to_half((largest(most) + sum(poison)) / 127.0f);
    const float scale = half_to_float(half);
    const Floats by = all(scale > 0 ? 1.0f / scale : 0.0f);
    for (int64_t at = from; at < end; at += LANES)  // a small scale is rounded coarsely: codes are bounded
      store_bytes(reinterpret_cast<uint8_t*>(to) + at, rounded(larger(all(-127.0f), smaller(all(127.0f), load(row + at) * by))));
    *scales++ = half;
  }
}

inline void write_row(Kind kind, const float* row, int64_t dim, char* to) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
  switch (kind) {
    case FLOAT16:
      for (int64_t at = 0; at < dim; at += LANES) store_half(halves + at, load(row + at));
      return;
    case BFLOAT16:
      for (int64_t at = 0; at < dim; ++at) halves[at] = float_to_bfloat(row[at]);
      return;
    case Q8_0_BLOCKS:
      return write_codes(row, dim, to);
    default:
      std::memcpy(to, row, dim * sizeof(float));
  }
}

template <typename Load>
void read_each(const char* from, const char* next, int64_t bytes, int64_t dim, int64_t count, float* out, const Load& load_at) {
  for (int64_t row = 0; row < count; ++row, from += bytes, next += bytes, out += dim) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 1);
    for (int64_t at = 0; at < dim; at += LANES) store(out + at, load_at(from, at));
  }
}

// `count` rows as floats: where they are, or else in `room`. As many of `next` are asked for on the way, unless the rows are floats.
inline const float* read_rows(Kind kind, const char* from, const char* next, int64_t dim, int64_t count, float* room) {
  const int64_t bytes = cached_bytes(kind, dim);
  const auto halves = [](const char* row) { return reinterpret_cast<const uint16_t*>(row); };
  switch (kind) {
    case FLOAT16:
      read_each(from, next, bytes, dim, count, room, [&](const char* row, int64_t at) { return load_half(halves(row) + at); });
      return room;
    case BFLOAT16:
      read_each(from, next, bytes, dim, count, room, [&](const char* row, int64_t at) { return load_bfloat(halves(row) + at); });
      return room;
    case Q8_0_BLOCKS:
      read_each(from, next, bytes, dim, count, room, [&](const char* row, int64_t at) {
        return load_codes(reinterpret_cast<const int8_t*>(row) + at) * all(half_to_float(halves(row + dim)[at / BLOCK]));
      });
      return room;
    default:
      return reinterpret_cast<const float*>(from);
  }
}

}  // namespace furrow
