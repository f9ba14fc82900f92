// The operations on one token's row between two products.
#pragma once

#include "layer.h"
#include "simd.h"

namespace furrow {

// x / √(mean(x²) + ε) · weight; `out` may be `x`.
inline void normalize(const Norm& norm, const float* x, int64_t count, float* out) {
  Floats squares = all(0.0f);
  float rest = 0.0f;
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) squares = fma(load(x + at), load(x + at), squares);
  for (; at < count; ++at) rest += x[at] * x[at];
  const float scale = 1.0f / std::sqrt((sum(squares) + rest) / static_cast<float>(count) + norm.epsilon);
  for (at = 0; at + LANES <= count; at += LANES)
    store(out + at, load(x + at) * all(scale) * load(norm.weight + at));
  for (; at < count; ++at) out[at] = x[at] * scale * norm.weight[at];
}

// silu(gate) · up, from both side by side.
inline void gate(const float* both, int64_t count, float* out) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    const Floats x = load(both + at);
    store(out + at, x / (all(1.0f) + exponential(all(0.0f) - x)) * load(both + count + at));
  }
  for (; at < count; ++at) out[at] = both[at] / (1.0f + std::exp(-both[at])) * both[count + at];
}

// The sines and cosines of a position: (cosines of dim / 2, sines of dim / 2).
inline void angles(const Model& model, int64_t position, float* out) {
  const int64_t half = model.head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * model.frequencies[i];
    out[i] = std::cos(angle) * model.rotary_scale;
    out[half + i] = std::sin(angle) * model.rotary_scale;
  }
}

// Turns the pairs of a head, which lie half a head apart, by the position's angles.
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

}  // namespace furrow
