// Attention over compressed keys and values (MLA, https://arxiv.org/abs/2405.04434), between its projections and the cache.
//
// A position keeps one row for all heads: a part that is turned by the position, and a latent one. A head's keys and values would
// be products of the latent part. Instead the head's query is multiplied by its matrix of keys, and what the head mixes of the
// latent parts by its matrix of values: attention then is that of queries which share one head of keys, which are the values too.
#pragma once

#include "product.h"
#include "rows.h"

namespace furrow {

// The temporary memory of one layer. A slot is a head's row of a token; those of one head are neighbours.
struct LatentRoom {
  float *low, *asked, *queries;  // by token: outputs of `down`, the normed part of queries, outputs of `queries`
  float *rows, *spread;          // by slot: inputs of a head's matrix, its outputs
  Quantized quantized;
};

// One layer of one step, as a thread sees it.
class LatentPass {
 public:
  LatentPass(const Latent& latent, const LatentRoom& room, int64_t tokens, int64_t heads, int64_t head_dim)
      : latent_(latent), room_(room), tokens_(tokens), heads_(heads), head_dim_(head_dim) {}

  // projected (tokens, heads + 1, head_dim): queries and the shared row, each with the part that is turned first, from the layer's
  // input x.
  void project(Hand& hand, const float* x, float* projected, Quantized quantized) const {
    const int64_t ranks = latent_.query_rank + latent_.rank, width = (heads_ + 1) * head_dim_;
    product(hand, latent_.down, x, tokens_, room_.low, false, quantized);
    each(hand, tokens_, [&](int64_t token) {
      const float* low = room_.low + token * latent_.down.outputs;
      float* shared = projected + token * width + heads_ * head_dim_;
      if (latent_.query_rank) normalize(latent_.query, low, latent_.query_rank, room_.asked + token * latent_.query_rank);
      std::memcpy(shared, low + ranks, latent_.turned * sizeof(float));
      normalize(latent_.shared, low + latent_.query_rank, latent_.rank, shared + latent_.turned);
    });
    product(hand, latent_.queries, latent_.query_rank ? room_.asked : x, tokens_, room_.queries, false, quantized);
    const int64_t plain = latent_.plain;
    multiply(hand, latent_.keys, plain, [&](int64_t head, int64_t token, float* row) {
      const float* query = room_.queries + token * latent_.queries.outputs + head * (plain + latent_.turned);
      std::memcpy(row, query, plain * sizeof(float));
      std::memcpy(projected + token * width + head * head_dim_, query + plain, latent_.turned * sizeof(float));
    });
    each_slot(hand, [&](int64_t head, int64_t token, int64_t slot) {
      std::memcpy(projected + token * width + head * head_dim_ + latent_.turned, room_.spread + slot * latent_.rank,
                  latent_.rank * sizeof(float));
    });
  }

  // Of what each head mixed, (tokens, heads, head_dim), its values, (tokens, heads, value_dim), in the same place.
  void expand(Hand& hand, float* attended) const {
    multiply(hand, latent_.values, latent_.rank, [&](int64_t head, int64_t token, float* row) {
      std::memcpy(row, attended + (token * heads_ + head) * head_dim_ + latent_.turned, latent_.rank * sizeof(float));
    });
    const int64_t dim = latent_.value_dim;
    each_slot(hand, [&](int64_t head, int64_t token, int64_t slot) {
      std::memcpy(attended + (token * heads_ + head) * dim, room_.spread + slot * dim, dim * sizeof(float));
    });
  }

 private:
  template <typename Work>
  static void each(Hand& hand, int64_t count, const Work& work) {
    hand.each(count, std::max<int64_t>(1, count / (32 * hand.threads())), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) work(i);
    });
  }

  template <typename Work>
  void each_slot(Hand& hand, const Work& work) const {
    each(hand, heads_ * tokens_, [&](int64_t slot) { work(slot / tokens_, slot % tokens_, slot); });
  }

  // Each head's matrix for the rows that `fill` writes.
  template <typename Fill>
  void multiply(Hand& hand, const Linear* matrices, int64_t width, const Fill& fill) const {
    const Inputs inputs = inputs_of(room_.rows, width, heads_ * tokens_, room_.quantized);
    each_slot(hand, [&](int64_t head, int64_t token, int64_t slot) {
      fill(head, token, room_.rows + slot * width);
      prepare(matrices[head], inputs, slot);
    });
    hand.each(heads_, 1, [&](int64_t from, int64_t to) {
      for (int64_t head = from; head < to; ++head) {
        const Linear& matrix = matrices[head];
        const int64_t first = head * tokens_;
        panels_product(matrix, inputs.part(first, tokens_), 0, panels(matrix), room_.spread + first * matrix.outputs, false);
      }
    });
  }

  const Latent& latent_;
  const LatentRoom& room_;
  const int64_t tokens_, heads_, head_dim_;
};

}  // namespace furrow
