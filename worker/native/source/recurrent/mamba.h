// Mamba-2 (https://arxiv.org/abs/2405.21060) over a step's tokens.
//
// The first product gives z, x, B, C and a rate of each head; x, B and C pass the convolution. The matrix S of a head (key_dim, value_dim)
// becomes e^(-a·δ)·S + B·(δ·x)ᵀ, where δ = softplus(rate + bias), and gives Sᵀ·C + d·x, which is multiplied by silu(z) and, where there is
// a norm, normed over the heads of its group after that or before. In `RecurrentLayer` x is `value`, B `key`, C `query`, z `gate` and the rate `learning`; B and C of a group are a key head.
//
// A column's sums are over its rows in order, whatever columns and tokens are taken together: see pass.h.
#pragma once

#include "pass.h"

namespace furrow {

class MambaPass : public RecurrentPass {
 public:
  using RecurrentPass::RecurrentPass;

  void run(Hand& hand) const {
    keep_all_guesses(hand);
    advance_all(hand);
  }

  // The states, and `out` without its gate and norm.
  void advance_all(Hand& hand) const {
    const int64_t vectors = channels(layer_) / LANES;
    each(hand, vectors + RATE_PARTS, [&](const Span& span, int64_t part, float* held) {
      part < vectors ? filter_by_silu(span, layer_.value.first + part * LANES, part * LANES, held) : turn_rates(span, part - vectors);
    });
    const int64_t blocks = (layer_.value_dim + WIDE * LANES - 1) / (WIDE * LANES);
    each(hand, layer_.value_heads * blocks,
         [&](const Span& span, int64_t part, float* held) { advance(span, part / blocks, part % blocks * WIDE * LANES, held); });
  }

  // Multiplies a token's outputs by silu(z), unless that is done last, and puts the sum of the squares of each group among those of `norm_groups`.
  void gate(int64_t token, float* squares) const {
    float *values = out_ + token * inner(), *sums = squares + token * layer_.norm_groups;
    if (!layer_.gate_last) gate_by_silu(gates(token), inner(), values);
    if (!layer_.norm.weight) return;
    std::fill(sums, sums + layer_.norm_groups, 0.0f);
    for (int64_t group = 0; group < layer_.key_heads; ++group)
      sums[layer_.first_group + group] = sum_of_squares(values + group * width(), width());
  }

  void normalize(int64_t token, const float* squares) const {
    float* values = out_ + token * inner();
    const float* sums = squares + token * layer_.norm_groups + layer_.first_group;
    for (int64_t group = 0; group < layer_.key_heads; ++group) {
      const Norm norm{layer_.norm.weight + group * width(), layer_.norm.epsilon};
      normalize_by(norm, sums[group] / static_cast<float>(layer_.norm_width), values + group * width(), width(), values + group * width());
    }
    if (layer_.gate_last) gate_by_silu(gates(token), inner(), values);
  }

  // True if ranks share a group, and must sum its squares.
  bool shares_group() const { return layer_.norm_width != width(); }

 private:
  static constexpr int RATE_PARTS = 8;  // of a sequence's tokens, whose rates a thread takes
  static constexpr int WIDE = 2;        // vectors of columns: a part of a head's matrix that fits half of a first-level cache

  int64_t inner() const { return layer_.value_heads * layer_.value_dim; }
  const float* gates(int64_t token) const { return projected_ + token * layer_.projections.outputs + layer_.gate.first; }
  int64_t width() const { return inner() / layer_.key_heads; }

  // δ of each head in place, and in `rates` the factor by which its matrix shrinks.
  void turn_rates(const Span& span, int64_t part) const {
    for (int64_t token = span.count * part / RATE_PARTS; token < span.count * (part + 1) / RATE_PARTS; ++token) {
      float *steps = row(span, token) + layer_.learning.first, *keeping = rates(span, token);
      for (int64_t head = 0; head < layer_.value_heads; ++head) {
        const float x = steps[head] + layer_.decay_bias[head];
        steps[head] = x > 20.0f ? x : std::log1p(std::exp(x));
        keeping[head] = std::exp(layer_.decay[head] * steps[head]);
      }
    }
  }

  // All tokens of a sequence through the columns of a head's matrix from `first` on. A copy of them goes on over guesses.
  void advance(const Span& span, int64_t head, int64_t first, float* held) const {
    if (layer_.value_dim - first >= WIDE * LANES) return columns<WIDE>(span, head, first, held);
    columns<1>(span, head, first, held);
  }

  template <int WIDTH>
  void columns(const Span& span, int64_t head, int64_t first, float* held) const {
    const int64_t sure = span.count - span.guesses;
    float* matrix = matrix_of(span, head) + first;
    tokens<WIDTH>(span, head, first, matrix, layer_.value_dim, 0, sure);
    if (!span.guesses) return;
    for (int64_t line = 0; line < layer_.key_dim; ++line)
      for (int j = 0; j < WIDTH; ++j)
        store(held + (line * WIDTH + j) * LANES, load(matrix + line * layer_.value_dim + j * LANES));
    tokens<WIDTH>(span, head, first, held, WIDTH * LANES, sure, span.count);
  }

  // Tokens [begin, end) through the columns from `first` on, whose lines lie `step` apart in `matrix`.
  template <int WIDTH>
  __attribute__((noinline)) void tokens(const Span& span, int64_t head, int64_t first, float* const matrix, const int64_t step,
                                        int64_t begin, int64_t end) const {
    const int64_t depth = layer_.key_dim, group = head / (layer_.value_heads / layer_.key_heads);
    const int64_t into = layer_.key.of(group), out_of = layer_.query.of(group);
    const int64_t value = layer_.value.first + head * layer_.value_dim + first;
    for (int64_t token = begin; token < end; ++token) {
      const float* from = row(span, token);
      const Floats keep = all(rates(span, token)[head]), delta = all(from[layer_.learning.first + head]);
      Floats added[WIDTH], sums[WIDTH];
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) {
        const Floats x = load(from + value + j * LANES);
        added[j] = x * delta, sums[j] = x * all(layer_.skip[head]);
      }
      for (int64_t line = 0; line < depth; ++line)
#pragma GCC unroll 4
        for (int j = 0; j < WIDTH; ++j) {
          float* place = matrix + line * step + j * LANES;
          const Floats now = fma(all(from[into + line]), added[j], keep * load(place));
          store(place, now);
          sums[j] = fma(all(from[out_of + line]), now, sums[j]);
        }
      float* to = out(span, token, head) + first;
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) store(to + j * LANES, sums[j]);
    }
  }
};

}  // namespace furrow
