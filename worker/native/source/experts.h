// A mixture of experts over the rows of a step.
//
// Rows are grouped by expert, and an expert multiplies all of its rows at once: its weights are read once a step. A shared expert
// is one more expert that every row goes to. The outputs of a row's experts are summed in the order of their choice, so its bits
// don't depend on other rows.
#pragma once

#include "product.h"
#include "rows.h"

namespace furrow {

constexpr int64_t SHARES = 32;  // for each thread at most, of slots or of a product's cost: small enough to even out
constexpr int64_t LEAST_SHARES = 8;  // for each thread, of a product's cost, unless a share would be more than MOST_BYTES

// The temporary memory of a mixture. A slot is a row's place at one of its experts; slots of one expert are neighbours.
struct MixtureRoom {
  float* scores;             // (tokens, outputs of the router)
  float* weights;            // (tokens, choices): of each expert's output in the sum
  int32_t *chosen, *slots;   // (tokens, choices): experts, and the row's slots there
  int32_t *tokens, *owners;  // by slot: its row and its expert
  int64_t* starts;           // by expert: its first slot
  int64_t *gate_up_costs, *down_costs;  // by expert: the cost of all experts before it
  float *rows, *both, *gated;           // by slot: inputs and then outputs, gate and up, their product
  Quantized quantized;
  int64_t width;  // of the widest expert
};

inline int64_t all_experts(const Mixture& mixture) { return mixture.count + mixture.shared; }
inline int64_t choices(const Mixture& mixture) { return mixture.chosen + mixture.shared; }

constexpr float TAKEN = -1.0f;         // the score of an expert that can't be chosen any more

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The outputs of the router become scores.
inline void score_experts(const Mixture& mixture, float* scores) {
  if (mixture.sigmoid) {
    for (int64_t i = 0; i < mixture.count; ++i) scores[i] = sigmoid(scores[i]);
    return;
  }
  const float most = *std::max_element(scores, scores + mixture.count);
  float total = 0.0f;
  for (int64_t i = 0; i < mixture.count; ++i) total += scores[i] = std::exp(scores[i] - most);
  for (int64_t i = 0; i < mixture.count; ++i) scores[i] /= total;
}

// What an expert is chosen by.
inline float merit(const Mixture& mixture, const float* scores, int64_t expert) {
  return mixture.correction ? scores[expert] + mixture.correction[expert] : scores[expert];
}

// The sum of the merits of a group's two best experts.
inline float group_merit(const Mixture& mixture, const float* scores, int64_t first, int64_t count) {
  float best = -INFINITY, second = -INFINITY;
  for (int64_t i = first; i < first + count; ++i) {
    const float one = merit(mixture, scores, i);
    second = std::max(second, std::min(best, one)), best = std::max(best, one);
  }
  return best + second;
}

// Takes the experts of all groups but the chosen ones; of equal groups those with the lower numbers stay.
inline void take_groups(const Mixture& mixture, float* scores) {
  const int64_t size = mixture.count / mixture.groups;
  for (int64_t left = mixture.groups; left > mixture.chosen_groups; --left) {
    int64_t worst = -1;
    float least = 0.0f;
    for (int64_t group = 0; group < mixture.groups; ++group) {
      if (scores[group * size] == TAKEN) continue;
      const float one = group_merit(mixture, scores, group * size, size);
      if (worst < 0 || !(one > least)) worst = group, least = one;
    }
    std::fill(scores + worst * size, scores + (worst + 1) * size, TAKEN);
  }
}

// The experts that a row goes to, the best first and of equal ones the lower number, and their weights. Overwrites the
// scores. A row with NaN goes anywhere, with NaN as weight.
inline void choose_scored(const Mixture& mixture, float* scores, int32_t* chosen, float* weights) {
  float kept = 0.0f;
  score_experts(mixture, scores);
  if (mixture.groups > mixture.chosen_groups) take_groups(mixture, scores);
  for (int64_t choice = 0; choice < mixture.chosen; ++choice) {
    int64_t best = -1;
    float highest = 0.0f;
    for (int64_t i = 0; i < mixture.count; ++i) {
      if (scores[i] < 0.0f) continue;
      const float one = merit(mixture, scores, i);
      if (best < 0 || one > highest) best = i, highest = one;
    }
    chosen[choice] = static_cast<int32_t>(best), weights[choice] = scores[best];
    kept += scores[best];
    scores[best] = TAKEN;
  }
  // Sigmoids may all be 0.
  const float divisor = mixture.normalized ? kept + mixture.least_sum : 1.0f;
  for (int64_t choice = 0; choice < mixture.chosen; ++choice) weights[choice] = weights[choice] / divisor * mixture.scale;
  if (mixture.expert_scales)
    for (int64_t choice = 0; choice < mixture.chosen; ++choice) weights[choice] *= mixture.expert_scales[chosen[choice]];
}

// The same by the outputs of the router themselves: an expert's weight is its share among those that are left and near it.
inline void choose_sparsely(const Mixture& mixture, const float* outputs, int32_t* chosen, float* weights) {
  for (int64_t choice = 0; choice < mixture.chosen; ++choice) {
    const auto left = [&](int64_t i) { return std::find(chosen, chosen + choice, i) == chosen + choice; };
    int64_t best = -1;
    for (int64_t i = 0; i < mixture.count; ++i)
      if (left(i) && (best < 0 || outputs[i] > outputs[best])) best = i;
    const float most = outputs[best];
    float total = 0.0f;
    for (int64_t i = 0; i < mixture.count; ++i)
      if (left(i) && !((most - outputs[i]) / std::max(std::abs(outputs[i]), most) > 2 * mixture.jitter))
        total += std::exp(outputs[i] - most);
    chosen[choice] = static_cast<int32_t>(best), weights[choice] = 1.0f / total;
  }
}

inline void choose(const Mixture& mixture, float* scores, int32_t* chosen, float* weights) {
  if (mixture.sparse_mixer)
    choose_sparsely(mixture, scores, chosen, weights);
  else
    choose_scored(mixture, scores, chosen, weights);
  if (mixture.shared) {
    chosen[mixture.chosen] = static_cast<int32_t>(mixture.count);
    weights[mixture.chosen] = mixture.shared_gate ? sigmoid(scores[mixture.count]) : 1.0f;
  }
}

// One mixture of one step, as a thread sees it.
class MixturePass {
 public:
  MixturePass(const Mixture& mixture, const Gate& gate, const MixtureRoom& room, int64_t tokens, int64_t hidden)
      : mixture_(mixture), gate_(gate), room_(room), tokens_(tokens), hidden_(hidden) {}

  // out (tokens, hidden) from x (tokens, hidden), and the router's scores from `routed`; all three may be the same.
  void run(Hand& hand, const float* routed, const float* x, float* out) {
    product(hand, mixture_.router, routed, tokens_, room_.scores, false, room_.quantized);
    hand.each(tokens_, 1, [&](int64_t from, int64_t to) {
      for (int64_t token = from; token < to; ++token)
        choose(mixture_, room_.scores + token * mixture_.router.outputs, room_.chosen + token * choices(mixture_),
               room_.weights + token * choices(mixture_));
    });
    hand.each(1, 1, [&](int64_t, int64_t) { group(); });
    const Inputs inputs = inputs_of(room_.rows, hidden_, slot_count(), room_.quantized);
    each_slot(hand, [&](int64_t slot) {
      std::memcpy(room_.rows + slot * hidden_, x + room_.tokens[slot] * hidden_, hidden_ * sizeof(float));
      if (mixture_.weighted_inputs) multiply_all(room_.rows + slot * hidden_, hidden_, weight_of(slot));
      prepare(owner(slot).gate_up, inputs, slot);
    });
    multiply(hand, &Expert::gate_up, room_.gate_up_costs, inputs, room_.both, 2 * room_.width);
    const Inputs gated = inputs_of(room_.gated, room_.width, slot_count(), room_.quantized);
    each_slot(hand, [&](int64_t slot) {
      const Expert& expert = owner(slot);
      const int64_t first = room_.starts[room_.owners[slot]], width = expert.down.inputs;
      gate(gate_, room_.both + first * 2 * room_.width + (slot - first) * expert.gate_up.outputs, width, room_.gated + slot * room_.width);
      prepare(expert.down, gated, slot);
    });
    multiply(hand, &Expert::down, room_.down_costs, gated, room_.rows, hidden_);
    hand.each(tokens_, 1, [&](int64_t from, int64_t to) {
      for (int64_t token = from; token < to; ++token) sum_up(token, out + token * hidden_);
    });
  }

 private:
  int64_t slot_count() const { return tokens_ * choices(mixture_); }
  const Expert& owner(int64_t slot) const { return mixture_.experts[room_.owners[slot]]; }

  // Of the slot's expert for its row.
  float weight_of(int64_t slot) const {
    int64_t place = room_.tokens[slot] * choices(mixture_);
    while (room_.slots[place] != slot) ++place;
    return room_.weights[place];
  }

  template <typename Work>
  void each_slot(Hand& hand, const Work& work) {
    hand.each(slot_count(), std::max<int64_t>(1, slot_count() / (SHARES * hand.threads())), [&](int64_t from, int64_t to) {
      for (int64_t slot = from; slot < to; ++slot) work(slot);
    });
  }

  // Slots by expert, rows in order within one.
  void group() const {
    const int64_t experts = all_experts(mixture_), per_token = choices(mixture_);
    std::fill(room_.starts, room_.starts + experts + 2, 0);
    for (int64_t i = 0; i < slot_count(); ++i) ++room_.starts[room_.chosen[i] + 2];
    for (int64_t i = 2; i < experts + 2; ++i) room_.starts[i] += room_.starts[i - 1];
    for (int64_t i = 0; i < slot_count(); ++i) {
      const int64_t slot = room_.starts[room_.chosen[i] + 1]++;  // in the end that of the next expert's first
      room_.slots[i] = static_cast<int32_t>(slot);
      room_.tokens[slot] = static_cast<int32_t>(i / per_token), room_.owners[slot] = room_.chosen[i];
    }
    room_.gate_up_costs[0] = room_.down_costs[0] = 0;
    for (int64_t i = 0; i < experts; ++i) {
      const int64_t rows = room_.starts[i + 1] - room_.starts[i];
      const auto cost = [&](const Linear& linear) { return (rows + TILE - 1) / TILE * average_panel_bytes(linear) * panels(linear); };
      room_.gate_up_costs[i + 1] = room_.gate_up_costs[i] + (rows ? cost(mixture_.experts[i].gate_up) : 0);
      room_.down_costs[i + 1] = room_.down_costs[i] + (rows ? cost(mixture_.experts[i].down) : 0);
    }
  }

  // A layer of every expert for its slots. The panels of all experts, one after the other, are cut into pieces of equal cost: threads
  // have equal work where one expert has all rows, and where each has one.
  void multiply(Hand& hand, Linear Expert::*layer, const int64_t* costs, const Inputs& inputs, float* out, int64_t stride) {
    const int64_t whole = costs[all_experts(mixture_)], threads = hand.threads();
    const int64_t pieces = std::clamp(whole / MOST_BYTES, LEAST_SHARES * threads, SHARES * threads);
    hand.each(pieces, 1, [&](int64_t from, int64_t to) {
      const int64_t experts = all_experts(mixture_), low = costs[experts] * from / pieces, high = costs[experts] * to / pieces;
      int64_t i = std::upper_bound(costs, costs + experts + 1, low) - costs - 1;
      for (; i < experts && costs[i] < high; ++i) {
        if (costs[i] == costs[i + 1]) continue;
        const Linear& linear = mixture_.experts[i].*layer;
        const int64_t cost = (costs[i + 1] - costs[i]) / panels(linear), first = room_.starts[i];
        const auto panels_below = [&](int64_t place) { return (std::max<int64_t>(0, place - costs[i]) + cost - 1) / cost; };
        panels_product(linear, inputs.part(first, room_.starts[i + 1] - first), panels_below(low),
                       std::min(panels(linear), panels_below(high)), out + first * stride, false);
      }
    });
  }

  void sum_up(int64_t token, float* out) const {
    const int64_t per_token = choices(mixture_);
    const int32_t* slots = room_.slots + token * per_token;
    const float* weights = room_.weights + token * per_token;
    const auto weight = [&](int64_t i) { return mixture_.weighted_inputs ? 1.0f : weights[i]; };
    int64_t at = 0;
    for (; at + LANES <= hidden_; at += LANES) {
      Floats sum = all(0.0f);
      for (int64_t i = 0; i < per_token; ++i) sum = fma(all(weight(i)), load(room_.rows + slots[i] * hidden_ + at), sum);
      store(out + at, sum);
    }
    for (; at < hidden_; ++at) {
      float sum = 0.0f;
      for (int64_t i = 0; i < per_token; ++i) sum += weight(i) * room_.rows[slots[i] * hidden_ + at];
      out[at] = sum;
    }
  }

  const Mixture& mixture_;
  const Gate gate_;
  const MixtureRoom& room_;
  const int64_t tokens_, hidden_;
};

}  // namespace furrow
