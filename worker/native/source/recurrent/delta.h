// Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464) over a step's tokens.
//
// A layer's part of a sequence's state is the window of the convolution (taps - 1, channels), the oldest input first, and behind it
// the matrices S of the value heads (key_dim, value_dim). A token changes S to γ·S + k·(β·(v - γ·Sᵀk))ᵀ and puts out Sᵀq.
//
// Tokens are taken one by one, and each column of S by itself, its sums over the rows in order: a token's bits depend on its
// sequence only, and are the same in a chunk of a prompt as alone. Columns, heads and sequences are the work of the threads.
#pragma once

#include <vector>

#include "../pool.h"
#include "../rows.h"

namespace furrow {

constexpr float SHORTEST_SQUARE = 1e-6f;  // added to the squares of a query or key
constexpr int COLUMNS = 4;                // vectors of columns that a thread takes at once: half of the matrix's part of a first-level cache

// What a layer gets of a step's guesses, for a later replay: the outputs of its projections and of its rates. Null: there are none.
struct Guesses {
  float *rows, *rates;
};

// Temporary memory of each thread, in which a state goes on over guesses.
struct Held {
  float* memory;
  int64_t floats;

  float* of(int thread) const { return memory + thread * floats; }
};

inline int64_t held_floats(const Delta& delta) { return LANES * std::max(delta.taps - 1, COLUMNS * delta.key_dim); }

class DeltaPass {
 public:
  // `projected` (tokens, outputs) and `rates` (tokens, two for each value head) are overwritten; `out` is (tokens, value heads ·
  // value_dim).
  DeltaPass(const Delta& delta, const std::vector<Span>& spans, float* projected, float* rates, float* out, Guesses guesses, Held held)
      : delta_(delta), spans_(spans), projected_(projected), rates_(rates), out_(out), guesses_(guesses), held_(held) {}

  void run(Hand& hand) const {
    if (guesses_.rows) each(hand, 1, [&](const Span& span, int64_t, float*) { keep_guesses(span); });
    advance_all(hand);
    each(hand, delta_.value_heads, [&](const Span& span, int64_t head, float*) { finish(span, head); });
  }

  // The states, and `out` without its norm and gate.
  void advance_all(Hand& hand) const {
    const int64_t heads = 2 * delta_.key_heads + delta_.value_heads, parts = heads + 1;
    each(hand, parts, [&](const Span& span, int64_t part, float* held) { part < heads ? convolve(span, part, held) : turn_rates(span); });
    const int64_t blocks = (delta_.value_dim + COLUMNS * LANES - 1) / (COLUMNS * LANES);
    each(hand, delta_.value_heads * blocks,
         [&](const Span& span, int64_t part, float* held) { advance(span, part / blocks, part % blocks, held); });
  }

 private:
  template <typename Work>
  void each(Hand& hand, int64_t parts, const Work& work) const {
    const int64_t count = static_cast<int64_t>(spans_.size()) * parts;
    hand.each(count, std::max<int64_t>(1, count / (8 * hand.threads())), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) work(spans_[i / parts], i % parts, held_.of(hand.thread));
    });
  }

  void keep_guesses(const Span& span) const {
    const int64_t outputs = delta_.projections.outputs, both = delta_.rates.outputs, first = span.count - span.guesses;
    if (!span.guesses) return;
    std::memcpy(guesses_.rows + span.first_guess * outputs, row(span, first), span.guesses * outputs * sizeof(float));
    std::memcpy(guesses_.rates + span.first_guess * both, rates(span, first), span.guesses * both * sizeof(float));
  }

  int64_t key_head(int64_t head) const { return delta_.tiled ? head % delta_.key_heads : head / group(); }
  int64_t group() const { return delta_.value_heads / delta_.key_heads; }
  int64_t keys() const { return delta_.key_heads * delta_.key_dim; }
  int64_t channels() const { return 2 * keys() + delta_.value_heads * delta_.value_dim; }
  float* row(const Span& span, int64_t token) const { return projected_ + (span.first + token) * delta_.projections.outputs; }
  float* rates(const Span& span, int64_t token) const { return rates_ + (span.first + token) * delta_.rates.outputs; }
  float* out(const Span& span, int64_t token, int64_t head) const {
    return out_ + ((span.first + token) * delta_.value_heads + head) * delta_.value_dim;
  }
  int64_t of_value_head(const Place& place, int64_t head, int64_t width) const {
    return place.of(head / group()) + head % group() * width;
  }

  // The convolution of one head's queries, keys or values, in place, and their length.
  void convolve(const Span& span, int64_t part, float* held) const {
    const int64_t heads = delta_.key_heads;
    const bool query = part < heads, value = part >= 2 * heads;
    const int64_t head = value ? part - 2 * heads : query ? part : part - heads;
    const int64_t width = value ? delta_.value_dim : delta_.key_dim;
    const int64_t place = value ? of_value_head(delta_.value, head, width) : (query ? delta_.query : delta_.key).of(head);
    const int64_t channel = value ? 2 * keys() + head * width : (query ? 0 : keys()) + head * width;
    for (int64_t at = 0; at < width; at += LANES) filter(span, place + at, channel + at, held);
    if (value) return;
    const float scale = query ? 1.0f / std::sqrt(static_cast<float>(width)) : 1.0f;
    for (int64_t token = 0; token < span.count; ++token) shorten(row(span, token) + place, width, scale);
  }

  // LANES channels: silu(Σ filter · inputs), the oldest first; the last inputs stay in the window.
  void filter(const Span& span, int64_t place, int64_t channel, float* held) const {
    const int64_t past = delta_.taps - 1, sure = span.count - span.guesses;
    int64_t step = channels();
    float* window = span.state + delta_.state + channel;
    const float* taps = delta_.filter + channel;
    for (int64_t token = 0; token < span.count; ++token) {
      if (span.guesses && token == sure) {
        for (int64_t tap = 0; tap < past; ++tap) store(held + tap * LANES, load(window + tap * step));
        window = held, step = LANES;
      }
      float* at = row(span, token) + place;
      const Floats input = load(at);
      Floats sum = all(0.0f);
      for (int64_t tap = 0; tap < past; ++tap) {
        const Floats old = load(window + tap * step);
        sum = fma(old, load(taps + tap * channels()), sum);
        if (tap) store(window + (tap - 1) * step, old);
      }
      store(window + (past - 1) * step, input);
      sum = fma(input, load(taps + past * channels()), sum);
      store(at, sum / (all(1.0f) + exponential(all(0.0f) - sum)));
    }
  }

  // x / √(Σ x² + ε) · scale.
  static void shorten(float* x, int64_t count, float scale) {
    Floats squares = all(0.0f);
    for (int64_t at = 0; at < count; at += LANES) squares = fma(load(x + at), load(x + at), squares);
    const Floats factor = all(scale / std::sqrt(sum(squares) + SHORTEST_SQUARE));
    for (int64_t at = 0; at < count; at += LANES) store(x + at, load(x + at) * factor);
  }

  // In place: β of each value head, and γ, by which its matrix shrinks.
  void turn_rates(const Span& span) const {
    for (int64_t token = 0; token < span.count; ++token) {
      float* both = rates(span, token);
      for (int64_t head = 0; head < delta_.value_heads; ++head) {
        float& learning = both[of_value_head(delta_.learning, head, 1)];
        float& keeping = both[of_value_head(delta_.keeping, head, 1)];
        learning = 1.0f / (1.0f + std::exp(-learning));
        const float x = keeping + delta_.decay_bias[head];
        keeping = std::exp(delta_.decay[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
      }
    }
  }

  // All tokens of a sequence through some columns of one head's matrix.
  void advance(const Span& span, int64_t head, int64_t block, float* held) const {
    const int64_t first = block * COLUMNS * LANES, vectors = std::min<int64_t>(COLUMNS, (delta_.value_dim - first) / LANES);
    if (vectors == COLUMNS) return columns<COLUMNS>(span, head, first, held);
    for (int64_t vector = 0; vector < vectors; ++vector) columns<1>(span, head, first + vector * LANES, held);
  }

  // A copy of the columns goes on over guesses.
  template <int WIDTH>
  void columns(const Span& span, int64_t head, int64_t first, float* held) const {
    const int64_t width = delta_.value_dim, depth = delta_.key_dim, sure = span.count - span.guesses;
    const int64_t window = (delta_.taps - 1) * channels();
    float* matrix = span.state + delta_.state + window + head * depth * width + first;
    tokens<WIDTH>(span, head, first, matrix, width, 0, sure);
    if (!span.guesses) return;
    for (int64_t line = 0; line < depth; ++line)
      for (int j = 0; j < WIDTH; ++j) store(held + (line * WIDTH + j) * LANES, load(matrix + line * width + j * LANES));
    tokens<WIDTH>(span, head, first, held, WIDTH * LANES, sure, span.count);
  }

  // Tokens [begin, end) through the columns from `first` on, whose lines lie `width` apart in `matrix`.
  template <int WIDTH>
  __attribute__((noinline)) void tokens(const Span& span, int64_t head, int64_t first, float* const matrix, const int64_t width,
                                        int64_t begin, int64_t end) const {
    const int64_t depth = delta_.key_dim;
    const int64_t query = delta_.query.of(key_head(head)), key = delta_.key.of(key_head(head));
    const int64_t value = of_value_head(delta_.value, head, delta_.value_dim) + first;
    const int64_t learning = of_value_head(delta_.learning, head, 1), keeping = of_value_head(delta_.keeping, head, 1);
    for (int64_t token = begin; token < end; ++token) {
      const float *from = row(span, token), *rate = rates(span, token);
      const float *k = from + key, *q = from + query;
      const Floats keep = all(rate[keeping]);
      Floats change[WIDTH], sums[2][WIDTH];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * WIDTH; ++i) sums[i / WIDTH][i % WIDTH] = all(0.0f);
      for (int64_t i = 0; i < depth; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * WIDTH; ++j) {
          const int64_t line = i + j / WIDTH;
          sums[j / WIDTH][j % WIDTH] = fma(all(k[line]), load(matrix + line * width + j % WIDTH * LANES), sums[j / WIDTH][j % WIDTH]);
        }
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) {
        const Floats known = keep * (sums[0][j] + sums[1][j]);
        change[j] = (load(from + value + j * LANES) - known) * all(rate[learning]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * WIDTH; ++i) sums[i / WIDTH][i % WIDTH] = all(0.0f);
      for (int64_t i = 0; i < depth; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * WIDTH; ++j) {
          const int64_t line = i + j / WIDTH;
          float* place = matrix + line * width + j % WIDTH * LANES;
          const Floats now = fma(all(k[line]), change[j % WIDTH], keep * load(place));
          store(place, now);
          sums[j / WIDTH][j % WIDTH] = fma(all(q[line]), now, sums[j / WIDTH][j % WIDTH]);
        }
      float* to = out(span, token, head) + first;
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; ++j) store(to + j * LANES, sums[0][j] + sums[1][j]);
    }
  }

  // Norms a head's outputs, and multiplies by silu(gate).
  void finish(const Span& span, int64_t head) const {
    const int64_t width = delta_.value_dim, place = of_value_head(delta_.gate, head, width);
    for (int64_t token = 0; token < span.count; ++token) {
      float* values = out(span, token, head);
      normalize(delta_.norm, values, width, values);
      const float* gate = row(span, token) + place;
      for (int64_t at = 0; at < width; at += LANES) {
        const Floats x = load(gate + at);
        store(values + at, load(values + at) * (x / (all(1.0f) + exponential(all(0.0f) - x))));
      }
    }
  }

  const Delta& delta_;
  const std::vector<Span>& spans_;
  float *projected_, *rates_, *out_;
  const Guesses guesses_;
  const Held held_;
};

}  // namespace furrow
