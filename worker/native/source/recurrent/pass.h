// What the passes of all kinds of layer layers share.
//
// A layer's part of a sequence's state is the window of a convolution (taps - 1, channels), the oldest input first, and behind it the
// matrices of its heads (key_dim, value_dim), where it has some. Tokens are taken one by one, and a thread takes channels and columns by
// themselves: a token's bits depend on its sequence only, and are the same in a chunk of a prompt as alone.
#pragma once

#include <vector>

#include "../pool.h"
#include "../rows.h"

namespace furrow {

constexpr int COLUMNS = 4;  // vectors of columns that a thread takes at once: half of the matrix's part of a first-level cache

// What a layer gets of a step's guesses, for a later replay: the outputs of its projections, and its rates. Null: there are none.
struct Guesses {
  float *rows, *rates;
};

// Temporary memory of each thread, in which a state goes on over guesses.
struct Held {
  float* memory;
  int64_t floats;

  float* of(int thread) const { return memory + thread * floats; }
};

inline int64_t held_floats(const RecurrentLayer& layer) { return LANES * std::max(layer.taps - 1, COLUMNS * layer.key_dim); }

// Of each token: the outputs of the layer's second product, or for MAMBA a factor of each head, which follows from the first.
inline int64_t rate_count(const RecurrentLayer& layer) { return layer.kind == MAMBA ? layer.value_heads : layer.rates.outputs; }

// The channels of the convolution.
inline int64_t channels(const RecurrentLayer& layer) { return 2 * layer.key_heads * layer.key_dim + layer.value_heads * layer.value_dim; }

class RecurrentPass {
 public:
  // `projected` (tokens, outputs) and `rates` (tokens, rate_count) are overwritten; `out` is (tokens, value heads · value_dim).
  RecurrentPass(const RecurrentLayer& layer, const std::vector<Span>& spans, float* projected, float* rates, float* out, Guesses guesses,
                Held held)
      : layer_(layer), spans_(spans), projected_(projected), rates_(rates), out_(out), guesses_(guesses), held_(held) {}

 protected:
  template <typename Work>
  void each(Hand& hand, int64_t parts, const Work& work) const {
    const int64_t count = static_cast<int64_t>(spans_.size()) * parts;
    hand.each(count, std::max<int64_t>(1, count / (8 * hand.threads())), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) work(spans_[i / parts], i % parts, held_.of(hand.thread));
    });
  }

  void keep_all_guesses(Hand& hand) const {
    if (guesses_.rows) each(hand, 1, [&](const Span& span, int64_t, float*) { keep_guesses(span); });
  }

  float* row(const Span& span, int64_t token) const { return projected_ + (span.first + token) * layer_.projections.outputs; }
  float* rates(const Span& span, int64_t token) const { return rates_ + (span.first + token) * rate_count(layer_); }
  float* out(const Span& span, int64_t token, int64_t head) const {
    return out_ + ((span.first + token) * layer_.value_heads + head) * layer_.value_dim;
  }

  // A head's matrix of a sequence.
  float* matrix_of(const Span& span, int64_t head) const {
    return span.state + layer_.state + (layer_.taps - 1) * channels(layer_) + head * layer_.key_dim * layer_.value_dim;
  }

  // LANES channels: of each token give(token, bias + Σ filter · take(token)), the oldest input first. The last inputs stay in the window; a
  // copy of it goes on over guesses.
  template <typename Take, typename Give>
  void filter(const Span& span, int64_t channel, float* held, const Take& take, const Give& give) const {
    const int64_t past = layer_.taps - 1, sure = span.count - span.guesses, width = channels(layer_);
    int64_t step = width;
    float* window = span.state + layer_.state + channel;
    const float* taps = layer_.filter + channel;
    const Floats bias = layer_.filter_bias ? load(layer_.filter_bias + channel) : all(0.0f);
    for (int64_t token = 0; token < span.count; ++token) {
      if (span.guesses && token == sure) {
        for (int64_t tap = 0; tap < past; ++tap) store(held + tap * LANES, load(window + tap * step));
        window = held, step = LANES;
      }
      const Floats input = take(token);
      Floats sum = bias;
      for (int64_t tap = 0; tap < past; ++tap) {
        const Floats old = load(window + tap * step);
        sum = fma(old, load(taps + tap * width), sum);
        if (tap) store(window + (tap - 1) * step, old);
      }
      store(window + (past - 1) * step, input);
      give(token, fma(input, load(taps + past * width), sum));
    }
  }

  // LANES channels in place, `place` numbers into the rows: silu of the convolution.
  void filter_by_silu(const Span& span, int64_t place, int64_t channel, float* held) const {
    const auto take = [&](int64_t token) { return load(row(span, token) + place); };
    filter(span, channel, held, take, [&](int64_t token, Floats sum) {
      store(row(span, token) + place, sum / (all(1.0f) + exponential(all(0.0f) - sum)));
    });
  }

  const RecurrentLayer& layer_;
  const std::vector<Span>& spans_;
  float *projected_, *rates_, *out_;
  const Guesses guesses_;
  const Held held_;

 private:
  void keep_guesses(const Span& span) const {
    const int64_t outputs = layer_.projections.outputs, both = layer_.rates.outputs, first = span.count - span.guesses;
    if (!span.guesses) return;
    std::memcpy(guesses_.rows + span.first_guess * outputs, row(span, first), span.guesses * outputs * sizeof(float));
    if (both) std::memcpy(guesses_.rates + span.first_guess * both, rates(span, first), span.guesses * both * sizeof(float));
  }
};

}  // namespace furrow
