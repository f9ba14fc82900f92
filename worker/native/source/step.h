// One forward of a whole batch: every thread runs all of it, and in each phase takes a part.
#pragma once

#include "recurrent/replay.h"
#include "scratch.h"

namespace furrow {

// A chunk's tokens, a few at a time, so that threads find enough to share.
struct Piece {
  Span span;
  int64_t first, count;  // tokens within the span
};

// Copies of what says where things are: a thread that comes late still reads it when the step is over, and its caller's
// structs may be gone.
class Step {
 public:
  Step(const Model& model, const Batch& batch, char* memory, int threads)
      : layers_(model.layers, model.layers + model.depth),
        mixtures_(model.mixtures, model.mixtures + model.mixture_count),
        recurrent_(model.recurrent, model.recurrent + model.recurrent_count),
        rotaries_(model.rotaries, model.rotaries + model.rotary_count),
        spans_(batch.spans, batch.spans + batch.span_count),
        slabs_(batch.slabs, batch.slabs + batch.slab_count),
        model_(model),
        batch_(batch),
        scratch_(memory, model, batch, threads) {
    for (int64_t i = 0; i < model.recurrent_count; ++i) guesses_.push_back(guesses_of(model, batch, i));
    for (int64_t i = 0; i < batch.span_count; ++i)
      for (int64_t first = 0; first < batch.spans[i].count; first += TOKENS)
        pieces_.push_back({batch.spans[i], first, std::min(TOKENS, batch.spans[i].count - first)});
  }

  // 0, or what `reduce` ended with.
  int failure() const { return failure_.load(); }

  void forward(Hand& hand) {
    each_token(hand, [&](int64_t token) {
      const auto position = [&](int64_t i) {
        return batch_.axes ? batch_.axes[batch_.axis_of[i] * batch_.tokens + token] : batch_.positions[token];
      };
      for (size_t i = 0; i < rotaries_.size(); ++i) angles(rotaries_[i], position, turns(token, i));
    });
    if (batch_.layer_inputs) prepare_inputs(hand);
    const bool several = model_.streams && !layers_.empty();
    if (several) part_streams(hand);
    for (const Layer& layer : layers_) {
      if (layer.alternation) predict(hand, *layer.alternation);
      if (layer.recurrent >= 0 || layer.shared_heads) mix_tokens(hand, layer);
      if (failure_.load(std::memory_order_relaxed)) return;
      if (layer.alternation) add_low_rank(hand);
      if (!layer.parallel && (layer.mixture >= 0 || layer.down.outputs)) {
        normalize_all(hand, layer.before_feed_forward);
        feed_forward(hand, layer);
      }
      if (failure_.load(std::memory_order_relaxed)) return;
      if (layer.alternation) correct(hand, *layer.alternation);
      const int64_t depth = &layer - layers_.data();
      if (batch_.layer_inputs) add_input(hand, layer, depth);
      if (depth < batch_.added_layers) add_marked(hand, depth);
    }
    if (several) join_streams(hand);
    hand.each(batch_.sampled_count, 1, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        normalize(model_.last, hidden(batch_.sampled[row]), model_.hidden, scratch_.normed + row * model_.hidden);
    });
    product(hand, model_.head, scratch_.normed, batch_.sampled_count, batch_.logits, false, scratch_.quantized);
    if (model_.logit_cap)
      hand.each(batch_.sampled_count, 1, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row)
          cap_all(batch_.logits + row * model_.head.outputs, model_.head.outputs, model_.logit_cap);
      });
    if (model_.logit_scale != 1.0f)
      hand.each(batch_.sampled_count, 1, [&](int64_t from, int64_t to) {
        multiply_all(batch_.logits + from * model_.head.outputs, (to - from) * model_.head.outputs, model_.logit_scale);
      });
  }

 private:
  float* hidden(int64_t token) const { return batch_.hidden + token * model_.hidden; }
  float* turns(int64_t token, int64_t rotary) const {
    return scratch_.turns + (token * model_.rotary_count + rotary) * scratch_.turn_stride;
  }
  int64_t query_stride(const Layer& layer) const { return layer.head_dim * (model_.output_gate ? 2 : 1); }
  // A token's queries, and what lies behind them.
  float* projected(const Layer& layer, int64_t token) const { return scratch_.projected + token * layer.query_key_value.outputs; }

  template <typename Work>
  void each_token(Hand& hand, const Work& work) {
    hand.each(batch_.tokens, 1, [&](int64_t from, int64_t to) {
      for (int64_t token = from; token < to; ++token) work(token);
    });
  }

  template <typename Work>
  void each_span_token(Hand& hand, const Work& work) {
    hand.each(pieces_.size(), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        for (int64_t token = 0; token < pieces_[i].count; ++token)
          work(pieces_[i].span, pieces_[i].first + token);
    });
  }

  // The rows as they are where the norm is absent.
  void normalize_all(Hand& hand, const Norm& norm) {
    each_token(hand, [&](int64_t token) {
      float* out = scratch_.normed + token * model_.hidden;
      if (norm.weight) return normalize(norm, hidden(token), model_.hidden, out);
      std::memcpy(out, hidden(token), model_.hidden * sizeof(float));
    });
  }

  void multiply(Hand& hand, const Linear& linear, const float* x, float* out) {
    product(hand, linear, x, batch_.tokens, out, false, scratch_.quantized);
  }

  // Adds what a layer makes of several tokens: by attention, a recurrent layer or both.
  void mix_tokens(Hand& hand, const Layer& layer) {
    const bool both = layer.recurrent >= 0 && layer.shared_heads;
    normalize_all(hand, layer.before_attention);
    if (layer.alternation) prepare_low_rank(hand, *layer.alternation);
    if (layer.recurrent >= 0) recur(hand, layer.recurrent);
    if (both) multiply(hand, recurrent_[layer.recurrent].out, scratch_.attended, scratch_.sums);
    if (layer.shared_heads) attend_all(hand, layer);
    if (failure_.load(std::memory_order_relaxed)) return;
    if (layer.parallel) return add_both(hand, layer);
    if (!both) return add(hand, layer.attention_out, scratch_.attended, layer.after_attention, layer.attended_scale);
    multiply(hand, layer.attention_out, scratch_.attended, scratch_.normed);
    each_token(hand, [&](int64_t token) {
      float *sum = scratch_.sums + token * model_.hidden, *other = scratch_.normed + token * model_.hidden;
      multiply_all(sum, model_.hidden, recurrent_[layer.recurrent].out_scale);
      multiply_all(other, model_.hidden, layer.attended_scale);
      for (int64_t i = 0; i < model_.hidden; ++i) sum[i] += other[i];
    });
    add_sums(hand, layer.after_attention, scratch_.sums, 1.0f);
  }

  void feed_forward(Hand& hand, const Layer& layer) {
    if (layer.beside) return add_beside(hand, layer);
    if (layer.mixture >= 0) {
      mix(hand, layer, scratch_.normed, scratch_.normed);
      return add_sums(hand, layer.after_feed_forward, scratch_.normed, layer.fed_scale, behind(layer));
    }
    multiply_gated(hand, layer);
    add(hand, layer.down, scratch_.gated, layer.after_feed_forward, layer.fed_scale, behind(layer));
  }

  // The output of a layer's mixture in place of `x`.
  void mix(Hand& hand, const Layer& layer, const float* routed, float* x) {
    MixturePass(mixtures_[layer.mixture], layer.gate, scratch_.mixture, batch_.tokens, model_.hidden).run(hand, routed, x, x);
  }

  // What the hidden rows are multiplied by behind the feed-forward network.
  float behind(const Layer& layer) const { return batch_.layer_inputs ? 1.0f : layer.scale; }

  // Adds a network, whose input is `normed`, and a mixture beside it, which reads the hidden rows.
  void add_beside(Hand& hand, const Layer& layer) {
    const Mixture& mixture = mixtures_[layer.mixture];
    const int64_t hidden_size = model_.hidden;
    float *network = scratch_.sums, *experts = network + batch_.tokens * hidden_size;
    multiply_gated(hand, layer);
    multiply(hand, layer.down, scratch_.gated, network);
    each_token(hand, [&](int64_t token) {
      normalize(mixture.before_router, hidden(token), hidden_size, scratch_.normed + token * hidden_size);
      normalize(mixture.before, hidden(token), hidden_size, experts + token * hidden_size);
    });
    mix(hand, layer, scratch_.normed, experts);
    reduce(hand, network, 2 * batch_.tokens * hidden_size);
    each_token(hand, [&](int64_t token) {
      float *sum = network + token * hidden_size, *other = experts + token * hidden_size;
      normalize(layer.after_network, sum, hidden_size, sum);
      normalize(mixture.after, other, hidden_size, other);
      for (int64_t i = 0; i < hidden_size; ++i) sum[i] += other[i];
      add_row(token, layer.after_feed_forward, sum, layer.fed_scale, behind(layer));
    });
  }

  // The layers' own inputs, from the embedded tokens and what their ids give.
  void prepare_inputs(Hand& hand) {
    const LayerInputs& inputs = model_.inputs;
    const int64_t all = inputs.projection.outputs, width = inputs.width;
    multiply(hand, inputs.projection, batch_.hidden, scratch_.layer_inputs);
    each_token(hand, [&](int64_t token) {
      float* to = scratch_.layer_inputs + token * all;
      const float* more = batch_.layer_inputs + token * all;
      multiply_all(to, all, inputs.projected_scale);
      for (int64_t at = 0; at < all; at += width) normalize(inputs.norm, to + at, width, to + at);
      for (int64_t i = 0; i < all; ++i) to[i] = (to[i] + more[i]) * inputs.scale;
    });
  }

  // Adds what the layer makes of its own input.
  void add_input(Hand& hand, const Layer& layer, int64_t depth) {
    const LayerInputs& inputs = model_.inputs;
    const int64_t width = inputs.width;
    Gate alone = layer.gate;
    alone.alone = 1;
    multiply(hand, layer.input_gate, layer.alternation ? scratch_.normed : batch_.hidden, scratch_.both);
    each_token(hand, [&](int64_t token) {
      float* gated = scratch_.gated + token * width;
      const float* own = scratch_.layer_inputs + token * inputs.projection.outputs + depth * width;
      gate(alone, scratch_.both + token * width, width, gated);
      for (int64_t i = 0; i < width; ++i) gated[i] *= own[i];
    });
    multiply(hand, layer.input_projection, scratch_.gated, scratch_.normed);
    each_token(hand, [&](int64_t token) {
      float* row = scratch_.normed + token * model_.hidden;
      if (!layer.alternation) return add_row(token, layer.after_input, row, 1.0f, layer.scale);
      normalize(layer.after_input, row, model_.hidden, row);
      for (int64_t i = 1; i < model_.streams; ++i) add_scaled(stream(i, token), row, model_.hidden, 1.0f);
    });
  }

  float* stream(int64_t number, int64_t token) const {
    return scratch_.streams + (number * batch_.tokens + token) * model_.hidden;
  }

  // The streams before the first layer, of the embedded tokens: each has the size of these.
  void part_streams(Hand& hand) {
    each_token(hand, [&](int64_t token) { std::memcpy(stream(0, token), hidden(token), model_.hidden * sizeof(float)); });
    for (int64_t i = 1; i < model_.streams; ++i) {
      multiply(hand, model_.into_streams[i - 1], batch_.hidden, stream(i, 0));
      each_token(hand, [&](int64_t token) { multiply_all(stream(i, token), model_.hidden, size_beside(token, stream(i, token))); });
    }
  }

  // The hidden rows behind the last layer: the mean of the streams, each with the size of the first.
  void join_streams(Hand& hand) {
    each_token(hand, [&](int64_t token) { std::memcpy(hidden(token), stream(0, token), model_.hidden * sizeof(float)); });
    for (int64_t i = 1; i < model_.streams; ++i) {
      multiply(hand, model_.out_of_streams[i - 1], stream(i, 0), scratch_.normed);
      each_token(hand, [&](int64_t token) {
        const float* row = scratch_.normed + token * model_.hidden;
        add_scaled(hidden(token), row, model_.hidden, size_beside(token, row));
      });
    }
    each_token(hand, [&](int64_t token) { multiply_all(hidden(token), model_.hidden, 1.0f / static_cast<float>(model_.streams)); });
  }

  // What gives `row` the size of the token's first stream.
  float size_beside(int64_t token, const float* row) const {
    const float count = static_cast<float>(model_.hidden), square = sum_of_squares(row, model_.hidden) / count;
    return std::sqrt(sum_of_squares(stream(0, token), model_.hidden) / count) / std::sqrt(std::max(square, LEAST_SQUARE));
  }

  // The router's outputs for a row, whose normed numbers are left in `normed`.
  void route(const Alternation& by, int64_t token, const float* row, float* out) const {
    float* normed = scratch_.normed + token * model_.hidden;
    normalize(by.routed, row, model_.hidden, normed);
    for (int64_t i = 0; i < model_.streams; ++i) out[i] = std::tanh(dot(by.router + i * model_.hidden, normed, model_.hidden));
  }

  // Predicts the streams, and makes the active one the hidden rows.
  void predict(Hand& hand, const Alternation& by) {
    const int64_t count = model_.streams;
    each_token(hand, [&](int64_t token) {
      float routed[MOST_STREAMS], factors[MOST_STREAMS * MOST_STREAMS], before[MOST_STREAMS];
      route(by, token, stream(model_.active, token), routed);
      for (int64_t i = 0; i < count * count; ++i) {
        factors[i] = 0.0f;
        for (int64_t j = 0; j < count; ++j) factors[i] += by.prediction[i * count + j] * routed[j];
      }
      int64_t at = 0;
      for (; at + LANES <= model_.hidden; at += LANES) {
        Floats rows[MOST_STREAMS];
        for (int64_t i = 0; i < count; ++i) rows[i] = load(stream(i, token) + at);
        for (int64_t to = 0; to < count; ++to) {
          Floats sum = rows[to];
          for (int64_t i = 0; i < count; ++i) sum = fma(rows[i], all(factors[to * count + i]), sum);
          store(stream(to, token) + at, sum);
        }
      }
      for (; at < model_.hidden; ++at) {
        for (int64_t i = 0; i < count; ++i) before[i] = stream(i, token)[at];
        for (int64_t to = 0; to < count; ++to)
          for (int64_t i = 0; i < count; ++i) stream(to, token)[at] += before[i] * factors[to * count + i];
      }
      std::memcpy(hidden(token), stream(model_.active, token), model_.hidden * sizeof(float));
    });
  }

  // Corrects the predicted streams by what the layer made of the active one, the hidden rows; leaves what its own input meets in
  // `normed`.
  void correct(Hand& hand, const Alternation& by) {
    const int64_t count = model_.streams, active = model_.active;
    each_token(hand, [&](int64_t token) {
      float routed[MOST_STREAMS], *made = hidden(token), *normed = scratch_.normed + token * model_.hidden;
      route(by, token, made, routed);
      add_scaled(made, stream(active, token), model_.hidden, -1.0f);
      for (int64_t i = 0; i < count; ++i) {
        float factor = 1.0f;
        for (int64_t j = 0; j < count; ++j) factor += by.correction[i * count + j] * routed[j];
        add_scaled(stream(i, token), made, model_.hidden, factor);
      }
      for (int64_t i = 0; i < model_.hidden; ++i) normed[i] = stream(active, token)[i] * (by.output_scale ? by.output_scale[i] : 1.0f);
    });
  }

  // Makes the residual of low rank of attention's input, which is in `normed`.
  void prepare_low_rank(Hand& hand, const Alternation& by) {
    multiply(hand, by.narrow, scratch_.normed, scratch_.both);
    multiply(hand, by.widen, scratch_.both, scratch_.sums);
    each_token(hand, [&](int64_t token) {
      float* row = scratch_.sums + token * model_.hidden;
      normalize(by.widened, row, model_.hidden, row);
      add_scaled(row, scratch_.normed + token * model_.hidden, model_.hidden, 1.0f);
    });
  }

  // The hidden rows and that residual, as one of the size of either.
  void add_low_rank(Hand& hand) {
    each_token(hand, [&](int64_t token) {
      add_scaled(hidden(token), scratch_.sums + token * model_.hidden, model_.hidden, 1.0f);
      multiply_all(hidden(token), model_.hidden, std::sqrt(0.5f));
    });
  }

  // Keeps of each row of the gate what lies above its border, which all ranks find together.
  void keep_largest(Hand& hand, const Layer& layer) {
    const int64_t inner = layer.down.inputs, width = layer.gate_up.outputs;
    const float count = static_cast<float>(layer.whole_inner);
    float *sums = scratch_.squares, *squares = sums + batch_.tokens;
    each_token(hand, [&](int64_t token) { sums[token] = sum_of(scratch_.both + token * width, inner); });
    reduce(hand, sums, batch_.tokens);
    each_token(hand, [&](int64_t token) {
      squares[token] = sum_of_deviations(scratch_.both + token * width, sums[token] / count, inner);
    });
    reduce(hand, squares, batch_.tokens);
    each_token(hand, [&](int64_t token) {
      keep_above(scratch_.both + token * width, inner, sums[token] / count + std::sqrt(squares[token] / count) * layer.cutoff);
    });
  }

  // The inner values of a feed-forward network without experts.
  void multiply_gated(Hand& hand, const Layer& layer) {
    const int64_t inner = layer.down.inputs;
    multiply(hand, layer.gate_up, scratch_.normed, scratch_.both);
    if (layer.sparse) keep_largest(hand, layer);
    each_token(hand, [&](int64_t token) {
      float* both = scratch_.both + token * layer.gate_up.outputs;
      if (layer.gate.scale != 1.0f) multiply_all(both, inner, layer.gate.scale);
      gate(layer.gate, both, inner, scratch_.gated + token * inner);
    });
  }

  // Adds attention and feed-forward network, which both read `normed` and have one scale, to the hidden rows.
  void add_both(Hand& hand, const Layer& layer) {
    const bool direct = !batch_.reduce && layer.fed_scale == 1.0f && behind(layer) == 1.0f;
    float* sums = direct ? batch_.hidden : scratch_.sums;
    product(hand, layer.attention_out, scratch_.attended, batch_.tokens, sums, direct, scratch_.quantized);
    multiply_gated(hand, layer);
    product(hand, layer.down, scratch_.gated, batch_.tokens, sums, true, scratch_.quantized);
    if (!direct) add_sums(hand, {}, sums, layer.fed_scale, behind(layer));
  }

  // Adds a product, as `add_sums` does, to the hidden rows.
  void add(Hand& hand, const Linear& linear, const float* x, const Norm& norm, float share, float scale = 1.0f) {
    if (!batch_.reduce && !norm.weight && share == 1.0f && scale == 1.0f)
      return product(hand, linear, x, batch_.tokens, batch_.hidden, true, scratch_.quantized);
    multiply(hand, linear, x, scratch_.normed);
    add_sums(hand, norm, scratch_.normed, share, scale);
  }

  // Adds `sums`, which are the sum of the ranks' parts, normed where `norm` is present and multiplied by `share`, to the hidden rows.
  // `scale`: of these afterwards.
  void add_sums(Hand& hand, const Norm& norm, float* sums, float share, float scale = 1.0f) {
    reduce(hand, sums, batch_.tokens * model_.hidden);
    each_token(hand, [&](int64_t token) { add_row(token, norm, sums + token * model_.hidden, share, scale); });
  }

  void add_row(int64_t token, const Norm& norm, float* sum, float share, float scale) {
    if (norm.weight) normalize(norm, sum, model_.hidden, sum);
    if (share != 1.0f) multiply_all(sum, model_.hidden, share);
    for (int64_t i = 0; i < model_.hidden; ++i) hidden(token)[i] += sum[i];
    if (scale != 1.0f) multiply_all(hidden(token), model_.hidden, scale);
  }

  // Sums `values` over the ranks.
  void reduce(Hand& hand, float* values, int64_t count) {
    if (!batch_.reduce) return;
    hand.each(1, 1, [&](int64_t, int64_t) {  // after a failure the ranks are in different places
      if (!failure_) failure_ = batch_.reduce(batch_.group, values, count);
    });
  }

  // Adds what the layer has for the marked tokens to their hidden rows.
  void add_marked(Hand& hand, int64_t depth) {
    hand.each(batch_.marked_count, 1, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const float* more = batch_.added + (depth * batch_.marked_count + row) * model_.hidden;
        for (int64_t i = 0; i < model_.hidden; ++i) hidden(batch_.marked[row])[i] += more[i];
      }
    });
  }

  // Norms and turns a token's queries and keys, and puts keys and values where they stay.
  void store_token(const Layer& layer, const Span& span, int64_t number) {
    const int64_t token = span.first + number, dim = layer.head_dim;
    float* row = projected(layer, token);
    float* key = row + model_.heads * query_stride(layer);
    if (layer.query.weight && layer.head_norms == ALL_HEADS && !batch_.reduce) {
      normalize(layer.query, row, model_.heads * dim, row);
      normalize(layer.key, key, layer.shared_heads * dim, key);
    }
    const float growth = layer.rotary >= 0 ? grown(rotaries_[layer.rotary], batch_.positions[token]) : 1.0f;
    for (int64_t head = 0; head < model_.heads; ++head, row += query_stride(layer)) {
      turn_head(layer, layer.query, head, token, row);
      if (growth != 1.0f) multiply_all(row, dim, growth);
    }
    if (layer.stored == NEITHER) return;
    const Slab& slab = slabs_[span.slabs + layer.slab];
    char* place = slab.keys + layer.cache * slab.layer_stride + (span.offset + number) * cached_bytes(model_.cached, dim);
    const int64_t value_dim = layer.value_dim;
    const float* value = layer.stored == KEYS_ALONE ? key : key + layer.shared_heads * dim;
    for (int64_t head = 0; head < layer.shared_heads; ++head, key += dim, value += value_dim, place += slab.head_stride) {
      float* changed = scratch_.attended + token * model_.heads * dim;
      if (layer.value.weight) {
        normalize(layer.value, value, value_dim, changed);
      } else if (value_dim < dim) {
        std::memcpy(changed, value, value_dim * sizeof(float));
        std::fill(changed + value_dim, changed + dim, 0.0f);
      }
      const bool as_projected = !layer.value.weight && value_dim == dim;
      write_row(model_.cached, as_projected ? value : changed, dim, place + slab.values);
      turn_head(layer, layer.key, head, token, key);
      write_row(model_.cached, key, dim, place);
    }
  }

  // Norms queries and keys over the heads of all ranks. Heads that several ranks have count several times, as do their widths.
  void normalize_over_ranks(Hand& hand, const Layer& layer) {
    const int64_t queries = model_.heads * layer.head_dim, keys = layer.shared_heads * layer.head_dim;
    each_token(hand, [&](int64_t token) {
      const float* row = projected(layer, token);
      scratch_.squares[2 * token] = sum_of_squares(row, queries);
      scratch_.squares[2 * token + 1] = sum_of_squares(row + queries, keys);
    });
    sum_squares(hand, 2);
    each_token(hand, [&](int64_t token) {
      const float* squares = scratch_.squares + 2 * token;
      const float ranks = static_cast<float>(batch_.ranks);
      float* row = projected(layer, token);
      normalize_by(layer.query, squares[0] / (static_cast<float>(queries) * ranks), row, queries, row);
      normalize_by(layer.key, squares[1] / (static_cast<float>(keys) * ranks), row + queries, keys, row + queries);
    });
  }

  // Norms a head of a query or key, and turns it. `number`: of the head.
  void turn_head(const Layer& layer, Norm norm, int64_t number, int64_t token, float* head) const {
    const int64_t dim = layer.head_dim;
    norm.weight += number * layer.head_norm_step;
    if (norm.weight && layer.head_norms == EACH_HEAD) normalize(norm, head, dim, head);
    if (layer.rotary >= 0) {
      const Rotary& rotary = rotaries_[layer.rotary];
      (rotary.neighbours ? rotate_neighbours : rotate)(head, turns(token, layer.rotary), rotary.dim);
    }
    if (norm.weight && layer.head_norms == EACH_TURNED_HEAD) normalize(norm, head, dim, head);
  }

  void attend_all(Hand& hand, const Layer& layer) {
    if (layer.latent)
      latent(layer).project(hand, scratch_.normed, scratch_.projected, scratch_.quantized);
    else
      multiply(hand, layer.query_key_value, scratch_.normed, scratch_.projected);
    if (layer.query.weight && layer.head_norms == ALL_HEADS && batch_.reduce) normalize_over_ranks(hand, layer);
    each_span_token(hand, [&](const Span& span, int64_t token) { store_token(layer, span, token); });
    const int64_t shared = layer.shared_heads, tasks = static_cast<int64_t>(pieces_.size()) * shared;
    hand.each(tasks, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        Task one = task(layer, pieces_[i / shared], i % shared);
        const int64_t next = i + hand.threads();  // each thread takes about every n-th
        if (next < tasks) {
          const Task following = task(layer, pieces_[next / shared], next % shared);
          one.following = following.keys + first_read(following) * cached_bytes(following.kind, following.dim);
        }
        attend(one, scratch_.attention(hand.thread));
        if (model_.output_gate) gate_heads(one);
        if (layer.head_gates) weigh_heads(layer, pieces_[i / shared], i % shared, one);
      }
    });
    if (layer.latent) latent(layer).expand(hand, scratch_.attended);
  }

  LatentPass latent(const Layer& layer) const {
    return {*layer.latent, scratch_.latent, batch_.tokens, model_.heads, layer.head_dim};
  }

  static void gate_heads(const Task& task) {
    for (int64_t token = 0; token < task.tokens; ++token)
      for (int64_t head = 0; head < task.heads; ++head)
        gate_output(task.queries + token * task.stride + head * task.head_stride + task.dim, task.dim,
                    task.out + token * task.out_stride + head * task.dim);
  }

  // Multiplies what a task made by its heads' gates.
  void weigh_heads(const Layer& layer, const Piece& piece, int64_t shared, const Task& task) const {
    const int64_t behind = model_.heads * layer.head_dim + layer.shared_heads * (layer.head_dim + layer.value_dim);
    for (int64_t token = 0; token < task.tokens; ++token) {
      const float* gates = projected(layer, piece.span.first + piece.first + token) + behind + shared * task.heads;
      for (int64_t head = 0; head < task.heads; ++head)
        multiply_all(task.out + token * task.out_stride + head * task.value_dim, task.value_dim, 1.0f / (1.0f + std::exp(-gates[head])));
    }
  }

  void recur(Hand& hand, int64_t number) {
    const RecurrentLayer& recurrent = recurrent_[number];
    multiply(hand, recurrent.projections, scratch_.normed, scratch_.projected);
    if (recurrent.output_scales)
      each_token(hand, [&](int64_t token) {
        float* row = scratch_.projected + token * recurrent.projections.outputs;
        for (int64_t i = 0; i < recurrent.projections.outputs; ++i) row[i] *= recurrent.output_scales[i];
      });
    if (recurrent.kind == DELTA_RULE) multiply(hand, recurrent.rates, scratch_.normed, scratch_.rates);
    with_pass(recurrent, spans_, scratch_.projected, scratch_.rates, scratch_.attended, guesses_[number], scratch_.held, [&](const auto& pass) {
      pass.run(hand);
      if constexpr (std::is_same_v<decltype(pass), const MambaPass&>) normalize_groups(hand, recurrent, pass);
    });
  }

  // Norms the outputs of a Mamba layer over groups of heads, which ranks may share.
  void normalize_groups(Hand& hand, const RecurrentLayer& recurrent, const MambaPass& pass) {
    each_token(hand, [&](int64_t token) { pass.gate(token, scratch_.squares); });
    if (!recurrent.norm.weight) return;
    if (pass.shares_group()) sum_squares(hand, recurrent.norm_groups);
    each_token(hand, [&](int64_t token) { pass.normalize(token, scratch_.squares); });
  }

  // Sums `count` numbers of each token over the ranks.
  void sum_squares(Hand& hand, int64_t count) {
    reduce(hand, scratch_.squares, count * batch_.tokens);
  }

  Task task(const Layer& layer, const Piece& piece, int64_t shared) const {
    const Span& span = piece.span;
    const Slab& slab = slabs_[span.slabs + layer.slab];
    const int64_t heads = model_.heads / layer.shared_heads, dim = layer.head_dim, token = span.first + piece.first;
    const char* keys = slab.keys + layer.cache * slab.layer_stride + shared * slab.head_stride;
    Task task{};
    task.keys = keys, task.values = keys + slab.values, task.kind = model_.cached;
    task.queries = projected(layer, token) + shared * heads * query_stride(layer);
    task.out = scratch_.attended + (token * model_.heads + shared * heads) * layer.value_dim;
    task.head_stride = query_stride(layer), task.stride = layer.query_key_value.outputs, task.out_stride = model_.heads * layer.value_dim;
    task.dim = dim, task.value_dim = layer.value_dim, task.heads = heads, task.tokens = piece.count;
    task.position = span.offset + piece.first, task.window = layer.window, task.chunk = layer.chunk;
    task.ends = batch_.ends ? batch_.ends + token : nullptr;
    task.sinks = layer.sinks ? layer.sinks + shared * heads : nullptr;
    task.scale = model_.attention_scale, task.cap = model_.attention_cap;
    return task;
  }

  const std::vector<Layer> layers_;
  const std::vector<Mixture> mixtures_;
  const std::vector<RecurrentLayer> recurrent_;
  std::vector<Guesses> guesses_;  // by recurrent layer
  const std::vector<Rotary> rotaries_;
  const std::vector<Span> spans_;
  const std::vector<Slab> slabs_;
  const Model model_;
  const Batch batch_;
  const Scratch scratch_;
  std::vector<Piece> pieces_;
  std::atomic<int> failure_{0};
};

}  // namespace furrow
