// The most probable token of each row of logits, in one read of the row.
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

namespace furrow {

constexpr int64_t NOT_FINITE = -1;  // in place of a token

struct Best {
  int64_t token;  // the lowest of equals
  bool finite;    // none of the row is NaN or infinity
};

// The largest of `count` logits.
inline Best best_of(const float* logits, int64_t count) {
  constexpr int64_t STRIP = 64 * LANES;  // in the first cache
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  float best = NONE, rest = 0;
  int64_t strip = 0;
  Floats zeros = all(0.0f);  // a number times zero is zero, which NaN and infinity are not
  for (int64_t from = 0; from < count; from += STRIP) {
    const int64_t to = from + STRIP < count ? from + STRIP : count;
    Floats most = all(NONE);
    int64_t at = from;
    for (; at + LANES <= to; at += LANES) {
      const Floats values = load(logits + at);
      most = larger(most, values);
      zeros = fma(values, all(0.0f), zeros);
    }
    float highest = largest(most);
    for (; at < to; ++at) {
      if (logits[at] > highest) highest = logits[at];
      rest += logits[at] * 0.0f;
    }
    if (highest > best) {
      best = highest;
      strip = from;
    }
  }
  const bool finite = sum(zeros) + rest == 0;
  while (strip + 1 < count && logits[strip] != best) ++strip;
  return {strip, finite};
}

}  // namespace furrow
