// Short convolutions between two gates (lfm2) over a step's tokens: by channel, C · (convolution(B · x) + bias).
//
// A layer's part of a sequence's state is the window of the convolution alone (taps - 1, channels), the oldest input first. Channels are
// taken by themselves and tokens one by one, so a token's bits are the same in a chunk of a prompt as alone.
#pragma once

#include "delta.h"

namespace furrow {

// True if a recurrent layer is a short convolution: it has no heads of keys, and its channels are one value head.
inline bool is_convolution(const Delta& delta) { return !delta.key_heads; }

class ConvolutionPass {
 public:
  // `projected` (tokens, 3 · channels): B, C and x; `out` is (tokens, channels). See DeltaPass.
  ConvolutionPass(const Delta& delta, const std::vector<Span>& spans, const float* projected, float* out, Guesses guesses, Held held)
      : delta_(delta), spans_(spans), projected_(projected), out_(out), guesses_(guesses), held_(held) {}

  void run(Hand& hand) const {
    const int64_t parts = delta_.value_dim / LANES, count = static_cast<int64_t>(spans_.size()) * parts;
    if (guesses_.rows) hand.each(spans_.size(), 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) keep_guesses(spans_[i]);
      });
    hand.each(count, std::max<int64_t>(1, count / (8 * hand.threads())), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) filter(spans_[i / parts], i % parts * LANES, held_.of(hand.thread));
    });
  }

 private:
  const float* row(const Span& span, int64_t token) const { return projected_ + (span.first + token) * delta_.projections.outputs; }

  void keep_guesses(const Span& span) const {
    const int64_t outputs = delta_.projections.outputs;
    if (!span.guesses) return;
    std::memcpy(guesses_.rows + span.first_guess * outputs, row(span, span.count - span.guesses), span.guesses * outputs * sizeof(float));
  }

  // LANES channels. A copy of the window goes on over guesses.
  void filter(const Span& span, int64_t channel, float* held) const {
    const int64_t past = delta_.taps - 1, sure = span.count - span.guesses, channels = delta_.value_dim;
    int64_t step = channels;
    float* window = span.state + delta_.state + channel;
    const float* taps = delta_.filter + channel;
    const Floats bias = delta_.filter_bias ? load(delta_.filter_bias + channel) : all(0.0f);
    for (int64_t token = 0; token < span.count; ++token) {
      if (span.guesses && token == sure) {
        for (int64_t tap = 0; tap < past; ++tap) store(held + tap * LANES, load(window + tap * step));
        window = held, step = LANES;
      }
      const float* at = row(span, token) + channel;
      const Floats input = load(at) * load(at + 2 * channels);
      Floats sum = bias;
      for (int64_t tap = 0; tap < past; ++tap) {
        const Floats old = load(window + tap * step);
        sum = fma(old, load(taps + tap * channels), sum);
        if (tap) store(window + (tap - 1) * step, old);
      }
      store(window + (past - 1) * step, input);
      sum = fma(input, load(taps + past * channels), sum);
      store(out_ + (span.first + token) * channels + channel, load(at + channels) * sum);
    }
  }

  const Delta& delta_;
  const std::vector<Span>& spans_;
  const float* projected_;
  float* out_;
  const Guesses guesses_;
  const Held held_;
};

}  // namespace furrow
