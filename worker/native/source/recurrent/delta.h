// Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464) over a step's tokens.
//
// A token changes the matrix S of a value head to γ·S + k·(β·(v - γ·Sᵀk))ᵀ and puts out Sᵀq. A column's sums are over its rows in
// order: see pass.h. Columns, heads and sequences are the work of the threads.
#pragma once

#include "pass.h"

namespace furrow {

constexpr float SHORTEST_SQUARE = 1e-6f;  // added to the squares of a query or key

class DeltaPass : public RecurrentPass {
 public:
  using RecurrentPass::RecurrentPass;

  void run(Hand& hand) const {
    keep_all_guesses(hand);
    advance_all(hand);
    each(hand, layer_.value_heads, [&](const Span& span, int64_t head, float*) { finish(span, head); });
  }

  // The states, and `out` without its norm and gate.
  void advance_all(Hand& hand) const {
    const int64_t heads = 2 * layer_.key_heads + layer_.value_heads, parts = heads + 1;
    each(hand, parts, [&](const Span& span, int64_t part, float* held) { part < heads ? convolve(span, part, held) : turn_rates(span); });
    const int64_t blocks = (layer_.value_dim + COLUMNS * LANES - 1) / (COLUMNS * LANES);
    each(hand, layer_.value_heads * blocks,
         [&](const Span& span, int64_t part, float* held) { advance(span, part / blocks, part % blocks, held); });
  }

 private:
  int64_t key_head(int64_t head) const { return layer_.tiled ? head % layer_.key_heads : head / group(); }
  int64_t group() const { return layer_.value_heads / layer_.key_heads; }
  int64_t keys() const { return layer_.key_heads * layer_.key_dim; }
  int64_t of_value_head(const Place& place, int64_t head, int64_t width) const {
    return place.of(head / group()) + head % group() * width;
  }

  // The convolution of one head's queries, keys or values, in place, and their length.
  void convolve(const Span& span, int64_t part, float* held) const {
    const int64_t heads = layer_.key_heads;
    const bool query = part < heads, value = part >= 2 * heads;
    const int64_t head = value ? part - 2 * heads : query ? part : part - heads;
    const int64_t width = value ? layer_.value_dim : layer_.key_dim;
    const int64_t place = value ? of_value_head(layer_.value, head, width) : (query ? layer_.query : layer_.key).of(head);
    const int64_t channel = value ? 2 * keys() + head * width : (query ? 0 : keys()) + head * width;
    for (int64_t at = 0; at < width; at += LANES) filter_by_silu(span, place + at, channel + at, held);
    if (value) return;
    const float scale = query ? 1.0f / std::sqrt(static_cast<float>(width)) : 1.0f;
    for (int64_t token = 0; token < span.count; ++token) shorten(row(span, token) + place, width, scale);
  }

  // x / √(Σ x² + ε) · scale.
  static void shorten(float* x, int64_t count, float scale) {
    Floats squares = all(0.0f);
    for (int64_t at = 0; at < count; at += LANES) squares = fma(load(x + at), load(x + at), squares);
    const Floats factor = all(scale / std::sqrt(sum(squares) + SHORTEST_SQUARE));
    for (int64_t at = 0; at < count; at += LANES) store(x + at, load(x + at) * factor);
  }

  // In place: β of each value head, and γ, by which its matrix shrinks.
  void turn_rates(const Span& span) const {
    for (int64_t token = 0; token < span.count; ++token) {
      float* both = rates(span, token);
      for (int64_t head = 0; head < layer_.value_heads; ++head) {
        float& learning = both[of_value_head(layer_.learning, head, 1)];
        float& keeping = both[of_value_head(layer_.keeping, head, 1)];
        learning = 1.0f / (1.0f + std::exp(-learning));
        const float x = keeping + layer_.decay_bias[head];
        keeping = std::exp(layer_.decay[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
      }
    }
  }

  // All tokens of a sequence through some columns of one head's matrix.
  void advance(const Span& span, int64_t head, int64_t block, float* held) const {
    const int64_t first = block * COLUMNS * LANES, vectors = std::min<int64_t>(COLUMNS, (layer_.value_dim - first) / LANES);
    if (vectors == COLUMNS) return columns<COLUMNS>(span, head, first, held);
    for (int64_t vector = 0; vector < vectors; ++vector) columns<1>(span, head, first + vector * LANES, held);
  }

  // A copy of the columns goes on over guesses.
  template <int WIDTH>
  void columns(const Span& span, int64_t head, int64_t first, float* held) const {
    const int64_t width = layer_.value_dim, depth = layer_.key_dim, sure = span.count - span.guesses;
    float* matrix = matrix_of(span, head) + first;
    tokens<WIDTH>(span, head, first, matrix, width, 0, sure);
    if (!span.guesses) return;
    for (int64_t line = 0; line < depth; ++line)
      for (int j = 0; j < WIDTH; ++j) store(held + (line * WIDTH + j) * LANES, load(matrix + line * width + j * LANES));
    tokens<WIDTH>(span, head, first, held, WIDTH * LANES, sure, span.count);
  }

  // Tokens [begin, end) through the columns from `first` on, whose lines lie `width` apart in `matrix`.
  template <int WIDTH>
  __attribute__((noinline)) void tokens(const Span& span, int64_t head, int64_t first, float* const matrix, const int64_t width,
                                        int64_t begin, int64_t end) const {
    const int64_t depth = layer_.key_dim;
    const int64_t query = layer_.query.of(key_head(head)), key = layer_.key.of(key_head(head));
    const int64_t value = of_value_head(layer_.value, head, layer_.value_dim) + first;
    const int64_t learning = of_value_head(layer_.learning, head, 1), keeping = of_value_head(layer_.keeping, head, 1);
    for (int64_t token = begin; token < end; ++token) {
      const float *from = row(span, token), *rate = rates(span, token);
      const float *k = from + key, *q = from + query;
      const Floats keep = all(rate[keeping]);
      Floats change[WIDTH], sums[2][WIDTH];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * WIDTH; ++i) sums[i / WIDTH][i % WIDTH] = all(0.0f);
      for (int64_t i = 0; i < depth; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * WIDTH; ++j) {
          const int64_t line = i + j / WIDTH;
          sums[j / WIDTH][j % WIDTH] = fma(all(k[line]), load(matrix + line * width + j % WIDTH * LANES), sums[j / WIDTH][j % WIDTH]);
        }
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) {
        const Floats known = keep * (sums[0][j] + sums[1][j]);
        change[j] = (load(from + value + j * LANES) - known) * all(rate[learning]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * WIDTH; ++i) sums[i / WIDTH][i % WIDTH] = all(0.0f);
      for (int64_t i = 0; i < depth; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * WIDTH; ++j) {
          const int64_t line = i + j / WIDTH;
          float* place = matrix + line * width + j % WIDTH * LANES;
          const Floats now = fma(all(k[line]), change[j % WIDTH], keep * load(place));
          store(place, now);
          sums[j / WIDTH][j % WIDTH] = fma(all(q[line]), now, sums[j / WIDTH][j % WIDTH]);
        }
      float* to = out(span, token, head) + first;
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) store(to + j * LANES, sums[0][j] + sums[1][j]);
    }
  }

  // Norms a head's outputs, and multiplies by silu(gate).
  void finish(const Span& span, int64_t head) const {
    const int64_t width = layer_.value_dim, place = of_value_head(layer_.gate, head, width);
    for (int64_t token = 0; token < span.count; ++token) {
      float* values = out(span, token, head);
      normalize(layer_.norm, values, width, values);
      gate_by_silu(row(span, token) + place, width, values);
    }
  }
};

}  // namespace furrow
