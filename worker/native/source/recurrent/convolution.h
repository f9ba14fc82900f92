// Short convolutions between two gates (lfm2) over a step's tokens: by channel, C · (convolution(B · x) + bias).
//
// A layer's part of a sequence's state is the window of the convolution alone: see pass.h.
#pragma once

#include "pass.h"

namespace furrow {

// `projected` (tokens, 3 · channels): B, C and x; the channels are one value head.
class ConvolutionPass : public RecurrentPass {
 public:
  using RecurrentPass::RecurrentPass;

  void run(Hand& hand) const {
    keep_all_guesses(hand);
    advance_all(hand);
  }

  void advance_all(Hand& hand) const {
    const int64_t width = layer_.value_dim;
    each(hand, width / LANES, [&](const Span& span, int64_t part, float* held) {
      const int64_t channel = part * LANES;
      const auto at = [&](int64_t token, int64_t region) { return load(row(span, token) + region * width + channel); };
      const auto take = [&](int64_t token) { return at(token, 0) * at(token, 2); };
      filter(span, channel, held, take, [&](int64_t token, Floats sum) { store(out(span, token, 0) + channel, at(token, 1) * sum); });
    });
  }
};

}  // namespace furrow
