// A forward of one layer beside plain loops in double: a chunk, then one token, within a window.
#pragma once

#include "../step.h"
#include "linear.h"

namespace furrow::check {

using Doubles = std::vector<double>;

class Forward {
 public:
  Forward(Pool& pool, Kind cached, int64_t heads, int64_t shared, int64_t dim)
      : pool_(pool),
        cached_(cached),
        heads_(heads),
        shared_(shared),
        dim_(dim),
        width_((heads + 2 * shared) * dim),
        scale_(1 / std::sqrt(static_cast<float>(dim))),
        query_key_value_(pool, FLOAT32, HIDDEN, width_, 1),
        attention_out_(pool, FLOAT32, heads * dim, HIDDEN, 2),
        gate_up_(pool, FLOAT32, HIDDEN, 2 * INNER, 3),
        down_(pool, FLOAT32, INNER, HIDDEN, 4),
        head_(pool, FLOAT32, HIDDEN, VOCABULARY, 5) {
    for (int64_t i = 0; i < dim_ / 2; ++i) frequencies_.push_back(std::pow(100.0f, -2.0f * i / dim_));
  }

  std::string run() {
    const Values embedded = random_values(TOKENS_IN_ALL * HIDDEN, 6);
    const Doubles expected = plain(embedded);
    for (int64_t offset = 0, count = TOKENS_IN_ALL - 1; offset < TOKENS_IN_ALL; offset += count, count = 1) {
      const Values logits = stepped(embedded, offset, count);
      const double* there = expected.data() + offset * VOCABULARY;
      const double apart = cached_ == FLOAT32 ? 2e-3 : 2e-2;
      const auto why = difference("a forward", logits, {there, there + count * VOCABULARY}, apart);
      if (!why.empty()) return why;
    }
    return "";
  }

 private:
  static constexpr int64_t HIDDEN = 40, INNER = 50, VOCABULARY = 37, WINDOW = 9;
  static constexpr int64_t TOKENS_IN_ALL = TOKENS + 4, CAPACITY = 32;
  static constexpr float EPSILON = 1e-5f;

  Values stepped(const Values& embedded, int64_t offset, int64_t count) {
    Values hidden(embedded.begin() + offset * HIDDEN, embedded.begin() + (offset + count) * HIDDEN);
    Values logits(count * VOCABULARY);
    std::vector<int64_t> positions(count), sampled(count);
    std::iota(positions.begin(), positions.end(), offset), std::iota(sampled.begin(), sampled.end(), 0);
    const Rotary rotary{frequencies_.data(), 1.0f, dim_};
    Layer layer{};
    layer.before_attention = layer.before_feed_forward = {ones_.data(), EPSILON};
    layer.query = layer.key = {ones_.data(), EPSILON};
    layer.query_key_value = query_key_value_.linear, layer.attention_out = attention_out_.linear;
    layer.gate_up = gate_up_.linear, layer.down = down_.linear, layer.window = WINDOW;
    layer.mixture = layer.recurrent = -1, layer.shared_heads = shared_, layer.head_dim = layer.value_dim = dim_;
    layer.scale = layer.attended_scale = layer.fed_scale = layer.gate.scale = 1.0f;
    Model model{};
    model.layers = &layer, model.depth = 1, model.hidden = HIDDEN, model.heads = heads_;
    model.rotaries = &rotary, model.rotary_count = 1;
    model.cached = cached_, model.attention_scale = scale_, model.logit_scale = 1.0f, model.last = {ones_.data(), EPSILON}, model.head = head_.linear;
    const int64_t head_bytes = CAPACITY * cached_bytes(cached_, dim_);
    const Slab slab{memory_.data(), shared_ * head_bytes, 0, head_bytes};
    const Span span{0, 0, count, offset, nullptr};
    Batch batch{};
    batch.spans = &span, batch.span_count = 1, batch.slabs = &slab, batch.slab_count = 1, batch.positions = positions.data(), batch.hidden = hidden.data();
    batch.tokens = batch.sampled_count = count, batch.sampled = sampled.data(), batch.logits = logits.data();
    std::vector<char> room(Scratch(nullptr, model, batch, pool_.threads()).bytes());
    const auto step = std::make_shared<Step>(model, batch, room.data(), pool_.threads());
    pool_.run([step](Hand& hand) { step->forward(hand); });
    return logits;
  }

  static Doubles normed(const Doubles& x, int64_t width) {
    Doubles out(x);
    for (size_t row = 0; row < x.size(); row += width) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += x[row + i] * x[row + i];
      for (int64_t i = 0; i < width; ++i) out[row + i] /= std::sqrt(squares / width + EPSILON);
    }
    return out;
  }

  // Queries and keys of each token are normed by head, then turned by its position's angles.
  Doubles projected(const Doubles& hidden) const {
    Doubles all = query_key_value_.expected(normed(hidden, HIDDEN), TOKENS_IN_ALL);
    for (int64_t token = 0; token < TOKENS_IN_ALL; ++token)
      for (int64_t head = 0; head < heads_ + shared_; ++head) {
        double* at = all.data() + token * width_ + head * dim_;
        const Doubles row = normed({at, at + dim_}, dim_);
        for (int64_t i = 0; i < dim_ / 2; ++i) {
          const double angle = token * static_cast<double>(frequencies_[i]), c = std::cos(angle), s = std::sin(angle);
          at[i] = row[i] * c - row[dim_ / 2 + i] * s, at[dim_ / 2 + i] = row[dim_ / 2 + i] * c + row[i] * s;
        }
      }
    return all;
  }

  Doubles attended(const Doubles& all) const {
    Doubles out(TOKENS_IN_ALL * heads_ * dim_);
    for (int64_t token = 0; token < TOKENS_IN_ALL; ++token)
      for (int64_t head = 0; head < heads_; ++head) {
        const double* query = all.data() + token * width_ + head * dim_;
        double total = 0;
        Doubles sums(dim_);
        for (int64_t seen = std::max<int64_t>(0, token - WINDOW + 1); seen <= token; ++seen) {
          const double* key = all.data() + seen * width_ + (heads_ + head / (heads_ / shared_)) * dim_;
          const double weight = std::exp(scale_ * std::inner_product(query, query + dim_, key, 0.0));
          for (int64_t i = 0; i < dim_; ++i) sums[i] += weight * key[shared_ * dim_ + i];
          total += weight;
        }
        for (int64_t i = 0; i < dim_; ++i) out[(token * heads_ + head) * dim_ + i] = sums[i] / total;
      }
    return out;
  }

  // The logits of all tokens at once.
  Doubles plain(const Values& embedded) const {
    Doubles hidden(embedded.begin(), embedded.end());
    const auto add = [&](const Doubles& more) {
      for (size_t i = 0; i < hidden.size(); ++i) hidden[i] += more[i];
    };
    add(attention_out_.expected(attended(projected(hidden)), TOKENS_IN_ALL));
    const Doubles both = gate_up_.expected(normed(hidden, HIDDEN), TOKENS_IN_ALL);
    Doubles gated(TOKENS_IN_ALL * INNER);
    for (int64_t token = 0; token < TOKENS_IN_ALL; ++token)
      for (int64_t i = 0; i < INNER; ++i) {
        const double x = both[token * 2 * INNER + i];
        gated[token * INNER + i] = x / (1 + std::exp(-x)) * both[token * 2 * INNER + INNER + i];
      }
    add(down_.expected(gated, TOKENS_IN_ALL));
    return head_.expected(normed(hidden, HIDDEN), TOKENS_IN_ALL);
  }

  Pool& pool_;
  const Kind cached_;
  const int64_t heads_, shared_, dim_, width_;
  const float scale_;
  Layered query_key_value_, attention_out_, gate_up_, down_, head_;
  Values frequencies_, ones_ = Values(std::max(HIDDEN, dim_), 1.0f);
  std::vector<char> memory_ = std::vector<char>(2 * shared_ * CAPACITY * cached_bytes(cached_, dim_));
};

}  // namespace furrow::check
