// A row's token, drawn from its logits after penalties, masks and filters, and the log probabilities of the raw logits.
//
// The order, the formulas and the types of the numbers are those of worker/sampling/torch/sampler.py, and so are the
// tokens: a row's depends on its own numbers alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "best.h"

namespace furrow {

constexpr int64_t NO_TOKEN_LEFT = -2;  // in place of a token: every one is impossible

// As in worker/native/library.py. Ids outside the vocabulary are passed over.
struct Sampled {
  const float* logits;
  int64_t vocabulary;
  const int64_t *context, *output, *biased, *forbidden;  // tokens of prompt and output; of the output; ids of `biases`
  int64_t context_count, output_count, bias_count, forbidden_count;
  const int64_t* reduced;  // ids of `reductions`
  int64_t reduced_count;
  const float* reductions;  // taken from their logits
  const float* biases;
  const uint8_t* allowed;  // a bit for each token, the lowest of a byte first; null: all
  int64_t allowed_bytes;
  uint64_t key;       // of the noise
  float temperature;  // 0: the best token
  float repetition, presence, frequency;
  double top_p, min_p, typical_p;
  double top_n_sigma;        // 0: all
  double xtc_threshold;      // 0: none is left out
  double coldest, hottest;   // of a dynamic temperature
  double exponent;
  int64_t dynamic;  // whether it is used in place of `temperature`, after the filters
  int64_t top_k;    // 0: all
  int64_t forced;   // the token, whatever the logits are; below 0: none
  int64_t ranked;   // how many of the best log probabilities are wanted; below 0: none, nor that of the token
  int64_t* ranks;   // `ranked` tokens, the best first, and
  float* rankings;  // their log probabilities
  // Results.
  int64_t token;
  float logprob;
};

constexpr float REMOVED = -std::numeric_limits<float>::infinity();
constexpr double FARTHEST = 46;  // what is so far below the best adds nothing to a sum in float64: e^-46 is 1e-20
constexpr double GREEDY_BELOW = 1e-5;  // a lower temperature draws nothing
constexpr double LN2 = 0.69314718055994530942;

// Not to be joined with a sum into one operation that rounds once.
inline float unfused(float value) {
#if defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+x"(value));
#endif
  return value;
}

// Random bits for a token: splitmix64, a counter with an odd constant, and a finaliser.
inline uint64_t noise_bits(uint64_t key, int64_t token) {
  uint64_t value = key + static_cast<uint64_t>(token + 1) * 0x9E3779B97F4A7C15u;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return (value ^ value >> 31) >> 12;
}

struct Candidate {
  double value;
  int64_t token;
};

inline bool better(const Candidate& one, const Candidate& other) {
  return one.value > other.value || (one.value == other.value && one.token < other.token);
}

// The token with the largest value plus Gumbel noise.
class Draw {
 public:
  explicit Draw(uint64_t key) : key_(key) {}

  void offer(double value, int64_t token) {
    const uint64_t doubled = 2 * noise_bits(key_, token) + 1;  // the uniform number is this by 2^-53
    // The noise of a number of at least 2^-n is at most n · ln 2: most tokens can't win, and cost no logarithm.
    const double most = (__builtin_clzll(doubled) - 10) * LN2;
    if (value + most < score_) return;
    const double score = value - std::log(-std::log1p(-static_cast<double>(doubled) * 0x1p-53));
    if (score > score_) {
      score_ = score;
      token_ = token;
    }
  }

  int64_t token() const { return token_; }

 private:
  const uint64_t key_;
  double score_ = -std::numeric_limits<double>::infinity();
  int64_t token_ = NO_TOKEN_LEFT;
};

// Samples one row after the other. It keeps its memory.
class Sampler {
 public:
  void sample(Sampled& row) {
    row.token = row.forced >= 0 ? row.forced : choose(row);
    if (row.ranked >= 0 && row.token >= 0 && row.token < row.vocabulary) rank(row);
  }

 private:
  int64_t choose(const Sampled& row) {
    count_ = row.vocabulary;
    logits_.resize(count_);
    std::memcpy(logits_.data(), row.logits, count_ * sizeof(float));
    adjust(row);
    const int64_t best = best_of(logits_.data(), count_).token;
    if (logits_[best] == REMOVED) return row.forbidden_count ? NO_TOKEN_LEFT : best;
    if (row.temperature == 0) return best;
    if (row.top_n_sigma > 0) keep_near(row.top_n_sigma, logits_[best]);
    if (!row.dynamic)
      for (float& value : logits_) value /= row.temperature;
    if (!std::isfinite(logits_[best])) return best;  // beyond float32: nothing else has a chance
    return draw(row, logits_[best]);
  }

  // --- greedy and drawn rows alike ---------------------------------------------------------------------------------

  void adjust(const Sampled& row) {
    for (int64_t i = 0; i < row.bias_count; ++i)
      if (known(row.biased[i])) logits_[row.biased[i]] += row.biases[i];
    if (row.repetition != 1) {
      count(row.context, row.context_count, [&](float& logit, float) {
        logit = logit < 0 ? logit * row.repetition : logit / row.repetition;
      });
    }
    if (row.presence != 0 || row.frequency != 0) {
      count(row.output, row.output_count, [&](float& logit, float times) {
        logit = unfused(logit - unfused(times * row.frequency)) - row.presence;
      });
    }
    for (int64_t i = 0; i < row.reduced_count; ++i)
      if (known(row.reduced[i])) logits_[row.reduced[i]] -= row.reductions[i];
    for (int64_t i = 0; i < row.forbidden_count; ++i)
      if (known(row.forbidden[i])) logits_[row.forbidden[i]] = REMOVED;
    if (row.allowed) allow(row);
  }

  bool known(int64_t token) const { return token >= 0 && token < count_; }

  // `change(logit, how often)` for each token that is among `tokens`.
  template <typename Change>
  void count(const int64_t* tokens, int64_t number, const Change& change) {
    if (static_cast<int64_t>(counts_.size()) < count_) counts_.resize(count_, 0);
    for (int64_t i = 0; i < number; ++i)
      if (known(tokens[i])) ++counts_[tokens[i]];
    for (int64_t i = 0; i < number; ++i) {
      if (!known(tokens[i]) || !counts_[tokens[i]]) continue;
      change(logits_[tokens[i]], static_cast<float>(counts_[tokens[i]]));
      counts_[tokens[i]] = 0;
    }
  }

  void allow(const Sampled& row) {
    for (int64_t first = 0, byte = 0; first < count_; first += 8, ++byte) {
      const int bits = byte < row.allowed_bytes ? row.allowed[byte] : 0;
      if (bits == 255) continue;
      for (int64_t token = first; token < std::min(first + 8, count_); ++token)
        if (!(bits >> (token - first) & 1)) logits_[token] = REMOVED;
    }
  }

  // --- drawn rows --------------------------------------------------------------------------------------------------

  // Remove what is farther below the best than so many standard deviations of all that is possible.
  void keep_near(double deviations, float best) {
    double sum = 0, squares = 0;
    int64_t possible = 0;
    for (const float value : logits_)
      if (value > REMOVED) sum += value, ++possible;
    const double mean = sum / possible;
    for (const float value : logits_)
      if (value > REMOVED) squares += (value - mean) * (value - mean);
    const double least = best - deviations * std::sqrt(squares / possible);
    for (float& value : logits_)
      if (value < least) value = REMOVED;
  }

  int64_t draw(const Sampled& row, float best) {
    Draw draw(row.key);
    const bool filtered = row.top_k > 0 || row.top_p < 1;
    if (!filtered && row.min_p <= 0 && row.typical_p >= 1 && row.xtc_threshold <= 0 && !row.dynamic) {
      for (int64_t token = 0; token < count_; ++token)
        if (logits_[token] > REMOVED) draw.offer(logits_[token], token);
      return draw.token();
    }
    kept_.clear();
    if (row.top_k > 0)
      keep_top_k(row);
    else if (row.top_p < 1)
      keep_nucleus(row.top_p, best);
    else if (row.min_p > 0)  // and a little more
      collect([least = best + std::log(row.min_p) - 0.01](float value) { return value >= least; });
    else
      collect([](float value) { return value > REMOVED; });
    if (row.min_p > 0) keep([&](const Candidate& one) { return std::exp(one.value - best) >= row.min_p || one.value == best; });
    if (row.typical_p < 1) keep_typical(row.typical_p);
    if (row.xtc_threshold > 0) exclude_top(row.xtc_threshold);
    if (row.dynamic) {
      const double temperature = dynamic_temperature(row);
      if (temperature < GREEDY_BELOW) return std::min_element(kept_.begin(), kept_.end(), better)->token;
      for (Candidate& one : kept_) one.value /= temperature;
    }
    for (const Candidate& one : kept_) draw.offer(one.value, one.token);
    return draw.token();
  }

  template <typename Fits>
  void collect(const Fits& fits) {
    for (int64_t token = 0; token < count_; ++token)
      if (fits(logits_[token])) kept_.push_back({logits_[token], token});
  }

  template <typename Fits>
  void keep(const Fits& fits) {
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [&](const Candidate& one) { return !fits(one); }), kept_.end());
  }

  // The `top_k` best, and the equals of the last of them; of those the fewest that hold `top_p`.
  void keep_top_k(const Sampled& row) {
    const size_t most = std::min(row.top_k, count_);
    heap_.clear();
    const auto larger = [](float one, float other) { return one > other; };
    for (const float value : logits_) {
      if (heap_.size() < most) {
        heap_.push_back(value);
        std::push_heap(heap_.begin(), heap_.end(), larger);
      } else if (value > heap_.front()) {
        std::pop_heap(heap_.begin(), heap_.end(), larger);
        heap_.back() = value;
        std::push_heap(heap_.begin(), heap_.end(), larger);
      }
    }
    const float least = heap_.front();
    collect([&](float value) { return value >= least && value > REMOVED; });
    std::sort(kept_.begin(), kept_.end(), better);
    if (row.top_p < 1) cut(row.top_p, total());
  }

  // The fewest best tokens that hold `mass` of the probability.
  void keep_nucleus(double mass, float best) {
    constexpr int BY_ONE = 16, BUCKETS = static_cast<int>(FARTHEST) * BY_ONE;
    double masses[BUCKETS] = {};  // of the tokens by their distance from the best
    const auto bucket = [&](float value) { return (static_cast<double>(best) - value) * BY_ONE; };
    for (const float value : logits_)
      if (const double place = bucket(value); place < BUCKETS)
        masses[static_cast<int>(place)] += std::exp(static_cast<double>(value) - best);
    double whole = 0, held = 0;
    for (const double one : masses) whole += one;
    int last = 0;
    for (; last < BUCKETS && (held += masses[last]) < mass * whole * (1 + 1e-9); ++last) {
    }
    if (last < BUCKETS)
      collect([&](float value) { return bucket(value) < last + 1; });
    else  // it holds all but a trifle
      collect([](float value) { return value > REMOVED; });
    std::sort(kept_.begin(), kept_.end(), better);
    cut(mass, best + std::log(whole));
  }

  // Drop what follows the first of `kept_` that hold `mass`; `total` is the logarithm of what all hold.
  void cut(double mass, double total) {
    double held = 0;
    size_t count = 0;
    for (; count < kept_.size(); ++count) {
      const double probability = std::exp(kept_[count].value - total);
      held += probability;
      if (count && held - probability >= mass) break;
    }
    kept_.resize(count);
  }

  // The logarithm of the sum of the exponentials of `kept_`.
  double total() const {
    double most = kept_.front().value, sum = 0;
    for (const Candidate& one : kept_) most = std::max(most, one.value);
    for (const Candidate& one : kept_) sum += std::exp(one.value - most);
    return most + std::log(sum);
  }

  // Those whose information is nearest to the entropy, until they hold `mass`; the equals of the last of them stay.
  void keep_typical(double mass) {
    const double whole = total();
    double entropy = 0;
    for (const Candidate& one : kept_) entropy -= std::exp(one.value - whole) * (one.value - whole);
    near_.clear();
    for (const Candidate& one : kept_) near_.push_back({std::abs(whole - one.value - entropy), std::exp(one.value - whole)});
    std::sort(near_.begin(), near_.end(), [](const Near& one, const Near& other) { return one.distance < other.distance; });
    double held = 0, farthest = 0;
    for (const Near& one : near_) {
      farthest = one.distance;
      if ((held += one.probability) >= mass) break;
    }
    keep([&](const Candidate& one) { return std::abs(whole - one.value - entropy) <= farthest; });
  }

  // Of the tokens that have the threshold's probability, only the least probable ones stay.
  void exclude_top(double threshold) {
    const double whole = total();
    const auto above = [&](const Candidate& one) { return std::exp(one.value - whole) >= threshold; };
    double least = std::numeric_limits<double>::infinity();
    for (const Candidate& one : kept_)
      if (above(one)) least = std::min(least, one.value);
    keep([&](const Candidate& one) { return one.value <= least; });
  }

  // Between the coldest and the hottest, by the part that the entropy has of the most that it can be.
  double dynamic_temperature(const Sampled& row) const {
    if (kept_.size() < 2) return row.temperature;
    const double whole = total();
    double entropy = 0;
    for (const Candidate& one : kept_)
      if (const double logprob = one.value - whole; std::exp(logprob) > 0) entropy -= std::exp(logprob) * logprob;
    const double part = std::min(1.0, std::max(0.0, entropy / std::log(static_cast<double>(kept_.size()))));
    return row.coldest + (row.hottest - row.coldest) * std::pow(part, row.exponent);
  }

  // --- log probabilities -------------------------------------------------------------------------------------------

  // Of the raw logits: that of the token, and the best.
  void rank(Sampled& row) {
    const float* logits = row.logits;
    const size_t most = std::min(row.ranked, row.vocabulary);
    kept_.clear();
    for (int64_t token = 0; token < row.vocabulary && most; ++token) {
      const Candidate one{logits[token], token};
      if (kept_.size() < most) {
        kept_.push_back(one);
        std::push_heap(kept_.begin(), kept_.end(), better);
      } else if (logits[token] > kept_.front().value) {
        std::pop_heap(kept_.begin(), kept_.end(), better);
        kept_.back() = one;
        std::push_heap(kept_.begin(), kept_.end(), better);
      }
    }
    std::sort(kept_.begin(), kept_.end(), better);
    const double whole = log_of_sum(logits, row.vocabulary);
    row.logprob = static_cast<float>(logits[row.token] - whole);
    for (size_t i = 0; i < most; ++i) {
      row.ranks[i] = kept_[i].token;
      row.rankings[i] = static_cast<float>(kept_[i].value - whole);
    }
  }

  // The logarithm of the sum of the exponentials, to 1e-6.
  static double log_of_sum(const float* logits, int64_t count) {
    constexpr int64_t STRIP = 64 * LANES;  // a float is exact enough for the sum of so many
    const float best = logits[best_of(logits, count).token];
    double total = 0;
    for (int64_t from = 0; from < count; from += STRIP) {
      const int64_t to = std::min(from + STRIP, count);
      Floats sums = all(0.0f);
      int64_t at = from;
      for (; at + LANES <= to; at += LANES) sums = sums + exponential(load(logits + at) - all(best));
      total += sum(sums);
      for (; at < to; ++at) total += std::exp(logits[at] - best);
    }
    return best + std::log(total);
  }

  struct Near {
    double distance, probability;
  };

  int64_t count_ = 0;
  std::vector<float> logits_, heap_;
  std::vector<int32_t> counts_;  // by token; all 0 between two rows
  std::vector<Candidate> kept_;
  std::vector<Near> near_;
};

}  // namespace furrow
