// The temporary memory of a step.
#pragma once

#include "attention.h"
#include "recurrent/pass.h"
#include "experts.h"
#include "latent.h"

namespace furrow {

// Laid out in one piece. Without memory it only counts.
class Scratch {
 public:
  Scratch(char* memory, const Model& model, const Batch& batch, int threads) : memory_(memory) {
    const int64_t tokens = batch.tokens, most = std::max(tokens, batch.sampled_count);
    int64_t attended_width = 0, rates_width = 0, width = 0, inner = 0, attention_floats = 0, longest = 0, groups = 0;
    for (int64_t i = 0; i < batch.span_count; ++i)
      longest = std::max(longest, batch.spans[i].offset + batch.spans[i].count);
    for (int64_t i = 0; i < model.recurrent_count; ++i) {
      const RecurrentLayer& one = model.recurrent[i];
      width = std::max(width, one.projections.outputs), rates_width = std::max(rates_width, rate_count(one));
      attended_width = std::max(attended_width, one.value_heads * one.value_dim);
      groups = std::max(groups, one.norm_groups);
      held.floats = std::max(held.floats, held_floats(one));
    }
    int64_t sum_rows = 0, query_rank = 0;
    for (int64_t i = 0; i < model.depth; ++i) {
      const Layer& layer = model.layers[i];
      if (layer.mixture < 0 || layer.beside) inner = std::max(inner, layer.down.inputs);
      if (layer.alternation) inner = std::max(inner, layer.alternation->narrow.outputs);
      sum_rows = std::max<int64_t>(sum_rows, layer.beside ? 2 : layer.alternation || layer.parallel || (layer.recurrent >= 0 && layer.shared_heads));
      if (!layer.shared_heads) continue;
      const int64_t heads = model.heads / layer.shared_heads, together = std::min(tokens, TOKENS);
      width = std::max(width, layer.query_key_value.outputs);
      attended_width = std::max(attended_width, model.heads * layer.head_dim);
      if (layer.latent) query_rank = std::max(query_rank, layer.latent->query_rank);
      attention_floats = std::max(attention_floats, attention_scratch(model.cached, layer.head_dim, heads, together, longest));
    }
    inner = std::max(inner, model.inputs.width);
    for (int64_t i = 0; i < model.rotary_count; ++i) turn_stride = std::max(turn_stride, model.rotaries[i].dim);
    normed = take<float>(most * model.hidden);
    sums = take<float>(sum_rows * tokens * model.hidden);
    layer_inputs = take<float>(model.inputs.width ? tokens * model.inputs.projection.outputs : 0);
    streams = take<float>(model.streams * tokens * model.hidden);
    squares = take<float>(std::max<int64_t>(groups, batch.reduce || model.streams ? 2 : 0) * tokens);
    projected = take<float>(tokens * width);
    rates = take<float>(tokens * rates_width);
    attended = take<float>(tokens * attended_width);
    both = take<float>(tokens * 2 * inner);
    gated = take<float>(tokens * inner);
    turns = take<float>(tokens * model.rotary_count * turn_stride);
    quantized = take_quantized(most, std::max({model.hidden, attended_width, inner, query_rank}));
    take_latent(model, tokens);
    if (model.mixture_count) take_mixture(model, tokens);
    thread_floats_ = (attention_floats + 15) / 16 * 16;  // whole lines of the cache
    attention_ = take<float>(thread_floats_ * threads);
    held.memory = take<float>(held.floats * threads);
  }

  float* attention(int thread) const { return attention_ + thread * thread_floats_; }
  int64_t bytes() const { return used_; }

  float *normed, *sums, *layer_inputs, *streams, *squares, *projected, *rates, *attended, *both, *gated, *turns;
  int64_t turn_stride = 0;  // of a token's sines and cosines for one rotary embedding to those for the next
  Quantized quantized;
  MixtureRoom mixture{};
  LatentRoom latent{};
  Held held{};

 private:
  template <typename T>
  T* take(int64_t count) {
    T* place = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return place;
  }

  Quantized take_quantized(int64_t rows, int64_t width) { return {take<char>(quantized_room(rows, width))}; }

  // For the largest of the model's mixtures: they run one after the other.
  void take_mixture(const Model& model, int64_t tokens) {
    int64_t experts = 0, per_token = 0;
    for (int64_t i = 0; i < model.mixture_count; ++i) {
      const Mixture& one = model.mixtures[i];
      experts = std::max(experts, all_experts(one)), per_token = std::max(per_token, choices(one));
      for (int64_t expert = 0; expert < all_experts(one); ++expert)
        mixture.width = std::max(mixture.width, one.experts[expert].down.inputs);
    }
    const int64_t slots = tokens * per_token;
    mixture.scores = take<float>(tokens * experts);
    mixture.weights = take<float>(slots);
    mixture.chosen = take<int32_t>(slots), mixture.slots = take<int32_t>(slots);
    mixture.tokens = take<int32_t>(slots), mixture.owners = take<int32_t>(slots);
    mixture.starts = take<int64_t>(experts + 2);
    mixture.gate_up_costs = take<int64_t>(experts + 1), mixture.down_costs = take<int64_t>(experts + 1);
    mixture.rows = take<float>(slots * model.hidden);
    mixture.both = take<float>(slots * 2 * mixture.width);
    mixture.gated = take<float>(slots * mixture.width);
    mixture.quantized = take_quantized(slots, std::max(model.hidden, mixture.width));
  }

  // For the largest of the model's layers with compressed keys and values, which run one after the other.
  void take_latent(const Model& model, int64_t tokens) {
    int64_t low = 0, asked = 0, queries = 0, inputs = 0, outputs = 0;
    for (int64_t i = 0; i < model.depth; ++i) {
      if (!model.layers[i].latent) continue;
      const Latent& one = *model.layers[i].latent;
      low = std::max(low, one.down.outputs), asked = std::max(asked, one.query_rank), queries = std::max(queries, one.queries.outputs);
      inputs = std::max({inputs, one.plain, one.rank}), outputs = std::max({outputs, one.rank, one.value_dim});
    }
    if (!low) return;
    latent.low = take<float>(tokens * low), latent.asked = take<float>(tokens * asked), latent.queries = take<float>(tokens * queries);
    latent.rows = take<float>(tokens * model.heads * inputs), latent.spread = take<float>(tokens * model.heads * outputs);
    latent.quantized = take_quantized(tokens * model.heads, inputs);
  }

  char* memory_;
  int64_t used_ = 0, thread_floats_ = 0;
  float* attention_;
};

}  // namespace furrow
