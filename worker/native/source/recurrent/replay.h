// States behind guesses that were right.
//
// A step leaves a sequence's states as they are before its guesses, and keeps what its recurrent layers get of them: for each layer
// the outputs of its projections, (guesses, projections.outputs), and behind them its rates, (guesses, rate_count). When it is known how many
// were right, the states advance over those: no other product is computed again, and no copy of a state is made.
#pragma once

#include "convolution.h"
#include "delta.h"
#include "mamba.h"

namespace furrow {

inline int64_t guess_floats(const RecurrentLayer& layer) { return layer.projections.outputs + rate_count(layer); }

inline int64_t guessed_floats(const Model& model, int64_t guesses) {
  int64_t floats = 0;
  for (int64_t i = 0; i < model.recurrent_count; ++i) floats += guesses * guess_floats(model.recurrent[i]);
  return floats;
}

// What a layer gets of the guesses.
inline Guesses guesses_of(const Model& model, const Batch& batch, int64_t layer) {
  if (!batch.guess_count) return {};
  float* rows = batch.guessed;
  for (int64_t i = 0; i < layer; ++i) rows += batch.guess_count * guess_floats(model.recurrent[i]);
  return {rows, rows + batch.guess_count * model.recurrent[layer].projections.outputs};
}

// Calls `work` with the pass of the layer's kind.
template <typename Work>
void with_pass(const RecurrentLayer& layer, const std::vector<Span>& spans, float* projected, float* rates, float* out, Guesses guesses, Held held,
               const Work& work) {
  if (layer.kind == SHORT_CONVOLUTION) return work(ConvolutionPass(layer, spans, projected, rates, out, guesses, held));
  if (layer.kind == MAMBA) return work(MambaPass(layer, spans, projected, rates, out, guesses, held));
  work(DeltaPass(layer, spans, projected, rates, out, guesses, held));
}

class Replay {
 public:
  // `batch` has spans, the tokens of each among the guesses, and `guessed`. Without memory it only counts.
  Replay(const Model& model, const Batch& batch, char* memory, int threads)
      : recurrent_(model.recurrent, model.recurrent + model.recurrent_count), spans_(batch.spans, batch.spans + batch.span_count) {
    int64_t width = 0, held = 0;
    for (int64_t i = 0; i < model.recurrent_count; ++i) {
      guesses_.push_back(guesses_of(model, batch, i));
      width = std::max(width, recurrent_[i].value_heads * recurrent_[i].value_dim), held = std::max(held, held_floats(recurrent_[i]));
    }
    out_ = reinterpret_cast<float*>(memory);
    held_ = {out_ + batch.guess_count * width, held};
    bytes_ = (batch.guess_count * width + held * threads) * static_cast<int64_t>(sizeof(float));
  }

  int64_t bytes() const { return bytes_; }

  void run(Hand& hand) const {
    for (size_t i = 0; i < recurrent_.size(); ++i) {
      const auto advance = [&](const auto& pass) { pass.advance_all(hand); };
      with_pass(recurrent_[i], spans_, guesses_[i].rows, guesses_[i].rates, out_, {}, held_, advance);
    }
  }

 private:
  const std::vector<RecurrentLayer> recurrent_;
  const std::vector<Span> spans_;
  std::vector<Guesses> guesses_;
  float* out_;
  Held held_;
  int64_t bytes_;
};

}  // namespace furrow
