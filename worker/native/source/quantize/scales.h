// The scale, or scale and minimum, with which a few weights are rounded to integers at the least squared error.
//
// Scales are found by trying: the lanes of a vector hold candidates, and each weight is met by all of them at once. The
// sums of a candidate are taken in the order of the weights, so its result is the same with vectors of any width.
// Scales that a format rounds are then tried once more as what they were rounded to.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "../simd.h"

namespace furrow {

constexpr int CANDIDATES = 16, VECTORS = CANDIDATES / LANES;
constexpr float WORTHWHILE = 4e-6f;  // of the weights' squares: an error that is smaller by less is the same one
constexpr float LEAST_MAGNITUDE = 1e-15f;  // weights below are zero: no float16 scale reaches them
constexpr float LARGEST_MAGNITUDE = 1e15f;  // squares of larger ones overflow; float16 scales saturate long before

// A number for each candidate.
struct Tries {
  Floats of[VECTORS];

  explicit Tries(float value) {
    for (Floats& one : of) one = all(value);
  }
  explicit Tries(const float* values) {
    for (int v = 0; v < VECTORS; ++v) of[v] = load(values + v * LANES);
  }
  void copy(float* to) const {
    for (int v = 0; v < VECTORS; ++v) store(to + v * LANES, of[v]);
  }
};

// Ways to lay the steps of integers over the weights' range; candidate `plain` lays them from end to end.
struct Steps {
  Tries more{0.0f};  // by how many the range is cut into more steps than there are integers: the highest weights are clipped
  Tries later{0.0f};  // by how many steps they begin above the lowest weight
  int plain;

  Steps(int plain, float apart, std::initializer_list<float> beginnings) : plain(plain) {
    float steps[CANDIDATES], begin[CANDIDATES];
    const int each = CANDIDATES / static_cast<int>(beginnings.size());
    for (int i = 0; i < CANDIDATES; ++i) {
      steps[i] = static_cast<float>(i % each - plain) * apart;
      begin[i] = beginnings.begin()[i / each];
    }
    more = Tries(steps), later = Tries(begin);
  }
};

inline Floats nearest(Floats values, float least, float most) {
  return to_floats(rounded(larger(all(least), smaller(all(most), values))));
}

// The candidate whose error is smaller by the largest gain; `plain` where none is worthwhile.
inline int best_of(const Tries& gains, int plain) {
  float values[CANDIDATES];
  gains.copy(values);
  const int best = static_cast<int>(std::max_element(values, values + CANDIDATES) - values);
  return values[best] > values[plain] * (1.0f + WORTHWHILE) ? best : plain;
}

// x ≈ scale · q with q in -levels … levels - 1. The scale's sign makes the largest magnitude a negative q.
inline float symmetric_scale(const float* x, int count, int levels, const Steps& steps) {
  float extreme = 0.0f;
  for (int i = 0; i < count; ++i)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  if (std::fabs(extreme) < LEAST_MAGNITUDE) return 0.0f;
  const float whole = static_cast<float>(levels);
  if (std::fabs(extreme) > LARGEST_MAGNITUDE) return -extreme / whole;
  Tries inverse(0.0f), products(0.0f), squares(0.0f), gains(0.0f);
  for (int v = 0; v < VECTORS; ++v) inverse.of[v] = (all(whole) + steps.more.of[v]) * all(-1.0f / extreme);
  for (int i = 0; i < count; ++i)
    for (int v = 0; v < VECTORS; ++v) {
      const Floats weight = all(x[i]), q = nearest(weight * inverse.of[v], -whole, whole - 1.0f);
      products.of[v] = fma(weight, q, products.of[v]);
      squares.of[v] = fma(q, q, squares.of[v]);
    }
  for (int v = 0; v < VECTORS; ++v) gains.of[v] = products.of[v] * products.of[v] / larger(squares.of[v], all(1.0f));
  float sums[CANDIDATES], divisors[CANDIDATES];
  products.copy(sums), squares.copy(divisors);
  const int best = best_of(gains, steps.plain);
  return sums[best] / std::max(1.0f, divisors[best]);
}

// x ≈ scale · q + minimum with q in 0 … levels.
struct Affine {
  float scale, minimum;
};

// `highest`: bound of the minimum.
inline Affine affine_scale(const float* x, int count, int levels, const Steps& steps, float highest) {
  float low = x[0], high = x[0];
  for (int i = 1; i < count; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  low = std::min(low, highest);
  const float range = high - low, whole = static_cast<float>(levels), n = static_cast<float>(count);
  if (range < LEAST_MAGNITUDE) return {0.0f, low};
  if (range > LARGEST_MAGNITUDE) return {range / whole, low};
  Tries inverse(0.0f), sums(0.0f), squares(0.0f), products(0.0f), minima(0.0f), scales(0.0f), gains(0.0f);
  float total = 0.0f;
  for (int v = 0; v < VECTORS; ++v) inverse.of[v] = (all(whole) + steps.more.of[v]) * all(1.0f / range);
  for (int i = 0; i < count; ++i) {
    total += x[i] - low;
    for (int v = 0; v < VECTORS; ++v) {
      const Floats weight = all(x[i] - low), q = nearest(weight * inverse.of[v] - steps.later.of[v], 0.0f, whole);
      sums.of[v] = sums.of[v] + q;
      squares.of[v] = fma(q, q, squares.of[v]);
      products.of[v] = fma(weight, q, products.of[v]);
    }
  }
  // Least squares: the minimum first, bounded, then the scale that is best beside it.
  for (int v = 0; v < VECTORS; ++v) {
    const Floats sum = sums.of[v], square = squares.of[v], product = products.of[v];
    const Floats determinant = all(n) * square - sum * sum;
    const Floats free = (square * all(total) - sum * product) / larger(determinant, all(1.0f));
    const Floats minimum = smaller(zero_where_below(all(0.5f), determinant, free), all(highest - low));
    const Floats rest = product - minimum * sum;
    minima.of[v] = minimum;
    scales.of[v] = rest / larger(square, all(1.0f));
    gains.of[v] = fma(scales.of[v], rest, minimum * (all(2.0f * total) - all(n) * minimum));
  }
  const int best = best_of(gains, steps.plain);
  float values[CANDIDATES], lowest[CANDIDATES];
  scales.copy(values), minima.copy(lowest);
  return {values[best], low + lowest[best]};
}

// The candidate (scale, minimum) that rounds the weights to integers in least … most at the least squared error.
inline int best_pair(const float* x, int count, const float* scales, const float* minima, int least, int most) {
  float inverses[CANDIDATES];
  for (int i = 0; i < CANDIDATES; ++i) inverses[i] = scales[i] == 0.0f ? 0.0f : 1.0f / scales[i];
  const Tries scale(scales), minimum(minima), inverse(inverses);
  Tries errors(0.0f);
  for (int i = 0; i < count; ++i)
    for (int v = 0; v < VECTORS; ++v) {
      const Floats rest = all(x[i]) - minimum.of[v];
      const Floats q = nearest(rest * inverse.of[v], static_cast<float>(least), static_cast<float>(most));
      const Floats error = rest - q * scale.of[v];
      errors.of[v] = fma(error, error, errors.of[v]);
    }
  float values[CANDIDATES];
  errors.copy(values);
  return static_cast<int>(std::min_element(values, values + CANDIDATES) - values);
}

// q = the nearest integer to (x - minimum) / scale, within bounds; zero for a scale of zero.
inline void to_integers(const float* x, int count, float scale, float minimum, int least, int most, int8_t* out) {
  const Floats inverse = all(scale == 0.0f ? 0.0f : 1.0f / scale), from = all(minimum);
  for (int i = 0; i < count; i += LANES) {
    const Floats q = larger(all(static_cast<float>(least)),
                            smaller(all(static_cast<float>(most)), (load(x + i) - from) * inverse));
    store_bytes(reinterpret_cast<uint8_t*>(out) + i, rounded(q));
  }
}

}  // namespace furrow
