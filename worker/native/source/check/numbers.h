// Numbers for the check: random values that every kind of weights holds exactly, and the comparison with plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace furrow::check {

using Values = std::vector<float>;

// Multiples of 1/64 in [-1, 1]: seven bits, which bfloat16 and float16 hold without rounding.
inline Values random_values(int64_t count, uint32_t seed) {
  Values values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>((seed >> 16) % 129) - 64) / 64.0f;
  }
  return values;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline uint16_t bfloat_of(float value) { return static_cast<uint16_t>(bits_of(value) >> 16); }

// Of a value that float16 holds exactly as a normal number, or 0.
inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  if (value == 0.0f) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | ((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff));
}

// "" where all values are within `tolerance` of the expected ones, else the first difference. NaN is a difference.
inline std::string difference(const std::string& name, const Values& values, const std::vector<double>& expected,
                              double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(std::fabs(values[i] - expected[i]) <= tolerance))
      return name + " gives " + std::to_string(values[i]) + " instead of " + std::to_string(expected[i]);
  return "";
}

}  // namespace furrow::check
