// The operations on one token's row between two products.
#pragma once

#include "layer.h"
#include "simd.h"

namespace furrow {

// (x - mean(x)) / √(variance(x) + ε) · weight + bias; `out` may be `x`.
inline void normalize_centered(const Norm& norm, const float* x, int64_t count, float* out) {
  Floats total = all(0.0f), squares = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) total = total + load(x + at);
  for (; at < count; ++at) rest += x[at];
  const float mean = (sum(total) + rest) / static_cast<float>(count);
  rest = 0.0f;
  for (at = 0; at + LANES <= count; at += LANES) {
    const Floats apart = load(x + at) - all(mean);
    squares = fma(apart, apart, squares);
  }
  for (; at < count; ++at) rest += (x[at] - mean) * (x[at] - mean);
  const float scale = 1.0f / std::sqrt((sum(squares) + rest) / static_cast<float>(count) + norm.epsilon);
  for (at = 0; at + LANES <= count; at += LANES) {
    const Floats bias = norm.bias ? load(norm.bias + at) : all(0.0f);
    store(out + at, fma((load(x + at) - all(mean)) * all(scale), load(norm.weight + at), bias));
  }
  for (; at < count; ++at) out[at] = (x[at] - mean) * scale * norm.weight[at] + (norm.bias ? norm.bias[at] : 0.0f);
}

inline float sum_of_squares(const float* x, int64_t count) {
  Floats squares = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) squares = fma(load(x + at), load(x + at), squares);
  for (; at < count; ++at) rest += x[at] * x[at];
  return sum(squares) + rest;
}

inline float dot(const float* x, const float* y, int64_t count) {
  Floats products = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) products = fma(load(x + at), load(y + at), products);
  for (; at < count; ++at) rest += x[at] * y[at];
  return sum(products) + rest;
}

inline float sum_of(const float* x, int64_t count) {
  Floats total = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) total = total + load(x + at);
  for (; at < count; ++at) rest += x[at];
  return sum(total) + rest;
}

// Σ (x - mean)².
inline float sum_of_deviations(const float* x, float mean, int64_t count) {
  Floats squares = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    const Floats apart = load(x + at) - all(mean);
    squares = fma(apart, apart, squares);
  }
  for (; at < count; ++at) rest += (x[at] - mean) * (x[at] - mean);
  return sum(squares) + rest;
}

// x += factor · y.
inline void add_scaled(float* x, const float* y, int64_t count, float factor) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(x + at, fma(all(factor), load(y + at), load(x + at)));
  for (; at < count; ++at) x[at] += factor * y[at];
}

// max(0, x - least); NaN stays NaN.
inline void keep_above(float* x, int64_t count, float least) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(x + at, larger(all(0.0f), load(x + at) - all(least)));
  for (; at < count; ++at) x[at] = x[at] - least < 0.0f ? 0.0f : x[at] - least;
}

// x / √(mean_square + ε) · weight; `out` may be `x`.
inline void normalize_by(const Norm& norm, float mean_square, const float* x, int64_t count, float* out) {
  const float scale = 1.0f / std::sqrt(mean_square + norm.epsilon);
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES)
    store(out + at, load(x + at) * all(scale) * load(norm.weight + at));
  for (; at < count; ++at) out[at] = x[at] * scale * norm.weight[at];
}

// x / √(mean(x²) + ε) · weight, or as above; `out` may be `x`.
inline void normalize(const Norm& norm, const float* x, int64_t count, float* out) {
  if (norm.centered) return normalize_centered(norm, x, count, out);
  normalize_by(norm, sum_of_squares(x, count) / static_cast<float>(count), x, count, out);
}

// activation(x) as x / (1 + e^-slope). GELU_TANH: 0.5 · (1 + tanh(u)) is 1 / (1 + e^-2u), where u = √(2/π) · (x + 0.044715 x³).
template <Activation KIND>
inline Floats slope(Floats x) {
  if constexpr (KIND == SILU) return x;
  return x * fma(all(0.0713548163f) * x, x, all(1.5957691216f));
}

template <Activation KIND>
inline float slope(float x) {
  return KIND == SILU ? x : x * (0.0713548163f * x * x + 1.5957691216f);
}

// activation(gate) · up, from both side by side; activation(up) where it is ALONE.
template <Activation KIND, bool ALONE>
inline void gate(const float* both, int64_t count, float* out) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    const Floats x = load(both + at), active = x / (all(1.0f) + exponential(all(0.0f) - slope<KIND>(x)));
    store(out + at, ALONE ? active : active * load(both + count + at));
  }
  for (; at < count; ++at) out[at] = both[at] / (1.0f + std::exp(-slope<KIND>(both[at]))) * (ALONE ? 1.0f : both[count + at]);
}

inline void clamped_swiglu(const Gate& by, const float* both, int64_t count, float* out) {
  int64_t at = 0;
  const Floats limit = all(by.limit), least = all(-by.limit), one = all(1.0f);
  for (; at + LANES <= count; at += LANES) {  // NaN stays NaN
    const Floats x = smaller(limit, load(both + at)), up = larger(least, smaller(limit, load(both + count + at)));
    store(out + at, x / (one + exponential(all(-by.slope) * x)) * (up + one));
  }
  for (; at < count; ++at) {
    const float gated = both[at], up = both[count + at], x = gated > by.limit ? by.limit : gated;
    const float clamped = up > by.limit ? by.limit : up < -by.limit ? -by.limit : up;
    out[at] = x / (1.0f + std::exp(-by.slope * x)) * (clamped + 1.0f);
  }
}

inline void square_positive(const float* x, int64_t count, float* out) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    const Floats kept = larger(all(0.0f), load(x + at));  // NaN stays NaN
    store(out + at, kept * kept);
  }
  for (; at < count; ++at) out[at] = x[at] < 0.0f ? 0.0f : x[at] * x[at];
}

inline void xielu(const Gate& by, const float* x, int64_t count, float* out) {
  const Floats zero = all(0.0f);
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {  // NaN stays NaN
    const Floats u = load(x + at), above = larger(zero, u), power = exponential(smaller(all(by.least), u));
    const Floats below = zero_where_below(zero, zero - u, (power - all(1.0f) - u) * all(by.negative));
    store(out + at, fma(all(by.positive) * above, above, fma(all(by.linear), u, below)));
  }
  for (; at < count; ++at) {
    const float u = x[at], bent = u > 0.0f ? by.positive * u * u : (std::expm1(std::min(u, by.least)) - u) * by.negative;
    out[at] = bent + by.linear * u;
  }
}

inline void gate(const Gate& by, const float* both, int64_t count, float* out) {
  if (by.activation == SILU) return by.alone ? gate<SILU, true>(both, count, out) : gate<SILU, false>(both, count, out);
  if (by.activation == GELU_TANH)
    return by.alone ? gate<GELU_TANH, true>(both, count, out) : gate<GELU_TANH, false>(both, count, out);
  if (by.activation == RELU_SQUARED) return square_positive(both, count, out);
  if (by.activation == XIELU) return xielu(by, both, count, out);
  clamped_swiglu(by, both, count, out);
}

// out · sigmoid(gate).
inline void gate_output(const float* gate, int64_t count, float* out) {
  for (int64_t at = 0; at < count; at += LANES)
    store(out + at, load(out + at) / (all(1.0f) + exponential(all(0.0f) - load(gate + at))));
}

// out · gate · sigmoid(gate).
inline void gate_by_silu(const float* gate, int64_t count, float* out) {
  for (int64_t at = 0; at < count; at += LANES) {
    const Floats x = load(gate + at);
    store(out + at, load(out + at) * (x / (all(1.0f) + exponential(all(0.0f) - x))));
  }
}

// The sines and cosines of a token: (cosines of dim / 2, sines of dim / 2). position(i) is that by which frequency i turns.
template <typename Position>
void angles(const Rotary& rotary, const Position& position, float* out) {
  const int64_t half = rotary.dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position(i)) * rotary.frequencies[i];
    out[i] = std::cos(angle) * rotary.scale;
    out[half + i] = std::sin(angle) * rotary.scale;
  }
}

inline void multiply_all(float* values, int64_t count, float factor) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(values + at, load(values + at) * all(factor));
  for (; at < count; ++at) values[at] *= factor;
}

// What a query at `position` is multiplied by.
inline float grown(const Rotary& rotary, int64_t position) {
  if (!rotary.growth) return 1.0f;
  return 1.0f + rotary.growth * std::log(1.0f + std::floor((static_cast<float>(position) + rotary.offset) / rotary.period));
}

// Turns the pairs of a head's first `dim` numbers, which lie half of `dim` apart, by the position's angles.
inline void rotate(float* head, const float* turns, int64_t dim) {
  const int64_t half = dim / 2;
  float* other = head + half;
  int64_t at = 0;
  for (; at + LANES <= half; at += LANES) {
    const Floats x = load(head + at), y = load(other + at), cosine = load(turns + at), sine = load(turns + half + at);
    store(head + at, x * cosine - y * sine);
    store(other + at, y * cosine + x * sine);
  }
  for (; at < half; ++at) {
    const float x = head[at], y = other[at], cosine = turns[at], sine = turns[half + at];
    head[at] = x * cosine - y * sine;
    other[at] = y * cosine + x * sine;
  }
}

// The same for pairs of neighbours.
inline void rotate_neighbours(float* head, const float* turns, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float x = head[2 * i], y = head[2 * i + 1], cosine = turns[i], sine = turns[half + i];
    head[2 * i] = x * cosine - y * sine;
    head[2 * i + 1] = y * cosine + x * sine;
  }
}

}  // namespace furrow
