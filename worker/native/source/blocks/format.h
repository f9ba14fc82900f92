// Weights in blocks, as ggml's files have them: their numbers, their order in a panel, and their way into registers.
//
// A unit is a block of 32 inputs, or a super-block of 256, of all outputs of a panel. It holds, by output side by side: the
// scales and minima as stored (fp16), a super-block's smaller scales (bytes), then the values of each 32 inputs in vectors of
// four inputs by output. Values are unsigned. Low bits of several vectors share one, and so do high bits, which lie between them.
//
// A product of few rows takes the values from a unit into registers; one of more rows unpacks the values of a run of a panel's inputs
// to bytes once for all of them. Scales are unpacked to floats.
#pragma once

#include "bytes.h"
#include "../layer.h"

namespace furrow {

constexpr int64_t PANEL = 2 * LANES;
constexpr int64_t BLOCK = 32, RUN = 256;  // inputs
constexpr int64_t STEPS = BLOCK / 4;      // vectors of a block's values, for each half of a panel

// `HALF`: one fp16 by block. `BYTES`: by SUB inputs a signed byte, times an fp16. `NIBBLES`: the same with 4 bits, beside 4 bits
// of a minimum. `EXPONENT`: a power of two by block.
enum class Scales { HALF, BYTES, NIBBLES, EXPONENT };

// What codes of four bits stand for: see `TABLES`.
enum class Codes { THEMSELVES, E2M1, CURVED, ODD };

// A weight is scale · (value - 2^SHIFT), or scale · value + minimum where MINIMA.
template <int UNIT_, int FILE_BYTES_, int LOW_, int HIGH_, int SUB_, Scales SCALES_, bool MINIMA_, int SHIFT_, Codes CODES_ = Codes::THEMSELVES>
struct Format {
  static constexpr int64_t UNIT = UNIT_, FILE_BYTES = FILE_BYTES_;  // weights and bytes of one block of a file
  static constexpr int LOW = LOW_, HIGH = HIGH_;                    // bits
  static constexpr int64_t SUB = SUB_;                              // inputs that share a scale
  static constexpr Scales SCALES = SCALES_;
  static constexpr bool MINIMA = MINIMA_;
  static constexpr int SHIFT = SHIFT_;
  static constexpr Codes CODES = CODES_;
  static constexpr int MOST = CODES == Codes::E2M1 ? 28 : CODES == Codes::ODD ? 31 : (1 << (LOW + HIGH)) - 1;  // the largest value
  static constexpr bool WIDE = LOW == 8 || CODES == Codes::CURVED;  // values take eight bits

  static constexpr int64_t SUBS = UNIT / SUB;
  // Bytes of a unit for each output, and where its parts begin.
  static constexpr int64_t MINIMUM = SCALES == Scales::EXPONENT ? 1 : 2;
  static constexpr int64_t SMALL_SCALES = MINIMUM + (MINIMA ? 2 : 0);
  static constexpr int64_t SMALL_MINIMA = SMALL_SCALES + (SCALES == Scales::BYTES || SCALES == Scales::NIBBLES ? SUBS : 0);
  static constexpr int64_t VALUES = SMALL_MINIMA + (SCALES == Scales::BYTES && MINIMA ? SUBS : 0);
  static constexpr int64_t BLOCK_BYTES = BLOCK * (LOW + HIGH) / 8;
  static constexpr int64_t BYTES = VALUES + UNIT / BLOCK * BLOCK_BYTES;

  // Vectors of a block's low and high bits. Vector v holds the bits of the steps v, v + COUNT, v + 2 COUNT, …
  static constexpr int LOW_COUNT = STEPS * LOW / 8, HIGH_COUNT = STEPS * HIGH / 8;
  // Their places: the order in which the steps need them, so that memory is read from front to back.
  static constexpr int low_place(int vector) { return vector + (vector < HIGH_COUNT ? vector : HIGH_COUNT); }
  static constexpr int high_place(int vector) { return 2 * vector + 1; }
};

struct Q4_0 : Format<32, 18, 4, 0, 32, Scales::HALF, false, 3> {};
struct Q4_1 : Format<32, 20, 4, 0, 32, Scales::HALF, true, 0> {};
struct Q5_0 : Format<32, 22, 4, 1, 32, Scales::HALF, false, 4> {};
struct Q5_1 : Format<32, 24, 4, 1, 32, Scales::HALF, true, 0> {};
struct Q8_0 : Format<32, 34, 8, 0, 32, Scales::HALF, false, 7> {};
struct Q2_K : Format<256, 84, 2, 0, 16, Scales::NIBBLES, true, 0> {};
struct Q3_K : Format<256, 110, 2, 1, 16, Scales::BYTES, false, 2> {};
struct Q4_K : Format<256, 144, 4, 0, 32, Scales::BYTES, true, 0> {};
struct Q5_K : Format<256, 176, 4, 1, 32, Scales::BYTES, true, 0> {};
struct Q6_K : Format<256, 210, 4, 2, 16, Scales::BYTES, false, 5> {};
struct MXFP4 : Format<32, 17, 4, 0, 32, Scales::EXPONENT, false, 4, Codes::E2M1> {};
struct IQ4_NL : Format<32, 18, 4, 0, 32, Scales::HALF, false, 7, Codes::CURVED> {};
struct IQ4_XS : Format<256, 136, 4, 0, 32, Scales::BYTES, false, 7, Codes::CURVED> {};
struct IQ3_S : Format<256, 110, 4, 0, 32, Scales::BYTES, false, 4, Codes::ODD> {};  // in files three bits by the place in a grid: see packing.h
struct TQ2_0 : Format<256, 66, 2, 0, 32, Scales::HALF, false, 0> {};

template <Kind KIND, typename F, typename Work, typename Result>
Result work_if_included(const Work& work, Result otherwise) {
  if constexpr (included(KIND))
    return work(F{});
  else
    return otherwise;
}

// `work(format)` for the format of a kind; `otherwise` for a kind without blocks, or that is not included.
template <typename Work, typename Result>
Result of_format(Kind kind, const Work& work, Result otherwise) {
  switch (kind) {
    case Q4_0_BLOCKS: return work_if_included<Q4_0_BLOCKS, Q4_0>(work, otherwise);
    case Q4_1_BLOCKS: return work_if_included<Q4_1_BLOCKS, Q4_1>(work, otherwise);
    case Q5_0_BLOCKS: return work_if_included<Q5_0_BLOCKS, Q5_0>(work, otherwise);
    case Q5_1_BLOCKS: return work_if_included<Q5_1_BLOCKS, Q5_1>(work, otherwise);
    case Q8_0_BLOCKS: return work_if_included<Q8_0_BLOCKS, Q8_0>(work, otherwise);
    case Q2_K_BLOCKS: return work_if_included<Q2_K_BLOCKS, Q2_K>(work, otherwise);
    case Q3_K_BLOCKS: return work_if_included<Q3_K_BLOCKS, Q3_K>(work, otherwise);
    case Q4_K_BLOCKS: return work_if_included<Q4_K_BLOCKS, Q4_K>(work, otherwise);
    case Q5_K_BLOCKS: return work_if_included<Q5_K_BLOCKS, Q5_K>(work, otherwise);
    case Q6_K_BLOCKS: return work_if_included<Q6_K_BLOCKS, Q6_K>(work, otherwise);
    case MXFP4_BLOCKS: return work_if_included<MXFP4_BLOCKS, MXFP4>(work, otherwise);
    case IQ4_NL_BLOCKS: return work_if_included<IQ4_NL_BLOCKS, IQ4_NL>(work, otherwise);
    case IQ4_XS_BLOCKS: return work_if_included<IQ4_XS_BLOCKS, IQ4_XS>(work, otherwise);
    case IQ3_S_BLOCKS: return work_if_included<IQ3_S_BLOCKS, IQ3_S>(work, otherwise);
    case TQ2_0_BLOCKS: return work_if_included<TQ2_0_BLOCKS, TQ2_0>(work, otherwise);
    default: return otherwise;
  }
}

inline bool in_blocks(Kind kind) { return kind > INT8 && kind < E4M3_GROUPS; }

// Bytes of a panel for all of its inputs.
inline int64_t block_panel_bytes(Kind kind, int64_t inputs) {
  return of_format(kind, [=](auto format) { return inputs / format.UNIT * format.BYTES * PANEL; }, int64_t{0});
}

// The scales and minima of a run of a panel's inputs as floats, by SUB inputs: (PANEL).
struct UnpackedScales {
  alignas(64) float scales[RUN / 16 * PANEL];
  alignas(64) float minima[RUN / 16 * PANEL];
};

// A run of a panel's inputs, ready to multiply.
struct Unpacked : UnpackedScales {
  alignas(64) uint8_t values[RUN * PANEL];  // by four inputs: (PANEL, 4)
};

// Values by `Codes`: those of E2M1 (MXFP4), doubled so that all are whole, and 16 more; those of ggml's IQ4_NL and 128 more; odd
// numbers from -15 to 15 and 16 more.
constexpr uint8_t TABLES[4][16] = {
    {},
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31},
};

// The values of a block as a unit of the format F has them. `read`: four inputs of half a panel, as bytes.
template <typename F>
struct Packed {
  static constexpr int64_t BYTES = (F::UNIT == BLOCK ? F::BYTES : F::BLOCK_BYTES) * PANEL;  // from a block to the next

  static Ints read(const uint8_t* block, int half, int step) {
    const auto vector = [=](int place) { return load(block + (place * 2 + half) * VECTOR); };
    Ints values = vector(F::low_place(step % F::LOW_COUNT));
    if constexpr (F::LOW < 8)
      values = shifted_right(values, step / F::LOW_COUNT * F::LOW) & all_bytes((1 << F::LOW) - 1);
    if constexpr (F::HIGH > 0) {
      const int up = F::LOW - step / F::HIGH_COUNT * F::HIGH;
      const Ints bits = vector(F::high_place(step % F::HIGH_COUNT));
      values = values | ((up > 0 ? shifted_left(bits, up) : shifted_right(bits, -up)) &
                         all_bytes(((1 << F::HIGH) - 1) << F::LOW));
    }
    if constexpr (F::CODES != Codes::THEMSELVES) values = from_table(TABLES[static_cast<int>(F::CODES)], values);
    if constexpr (F::WIDE && !BYTE_WEIGHTS) values = values ^ all_bytes(-128);
    return values;
  }
};

// The values of a block of `Unpacked`.
struct Ready {
  static constexpr int64_t BYTES = BLOCK * PANEL;

  static Ints read(const uint8_t* block, int half, int step) { return load(block + (step * 2 + half) * VECTOR); }
};

template <typename F>
void unpack_scales(const uint8_t* unit, float* scales, float* minima) {
  const Floats zero = all(0.0f);
  for (int64_t at = 0; at < PANEL; at += LANES) {
    if constexpr (F::SCALES == Scales::EXPONENT) {
      store(scales + at, halved_powers(unit + at));
      continue;
    }
    const Floats scale = load_half(reinterpret_cast<const uint16_t*>(unit) + at);
    Floats minimum = zero;
    if constexpr (F::MINIMA) minimum = load_half(reinterpret_cast<const uint16_t*>(unit + F::MINIMUM * PANEL) + at);
    if constexpr (F::UNIT == RUN) minimum = zero - minimum;  // subtracted in super-blocks, else added
    for (int64_t sub = 0; sub < F::SUBS; ++sub) {
      const uint8_t* small = unit + (F::SMALL_SCALES + sub) * PANEL + at;
      float *to = scales + sub * PANEL + at, *least = minima + sub * PANEL + at;
      if constexpr (F::SCALES == Scales::HALF) {
        store(to, scale);
        if constexpr (F::MINIMA) store(least, minimum);
      } else if constexpr (F::SCALES == Scales::NIBBLES) {
        const Ints both = widened(small);
        store(to, scale * to_floats(both & all(15)));
        store(least, minimum * to_floats(shifted_right(both, 4)));
      } else {
        store(to, scale * to_floats(widened(reinterpret_cast<const int8_t*>(small))));
        if constexpr (F::MINIMA) store(least, minimum * to_floats(widened(small + F::SUBS * PANEL)));
      }
    }
  }
}

// The scales and minima of `units` units.
template <typename F>
void unpack_scales(const uint8_t* unit, int64_t units, UnpackedScales& to) {
  for (int64_t at = 0; at < units * F::SUBS * PANEL; at += F::SUBS * PANEL, unit += F::BYTES * PANEL)
    unpack_scales<F>(unit, to.scales + at, to.minima + at);
}

// The values of `blocks` blocks, as bytes: by four inputs (PANEL, 4).
template <typename F>
void unpack_values(const uint8_t* block, int64_t blocks, uint8_t* to) {
  for (int64_t number = 0; number < blocks; ++number, block += Packed<F>::BYTES, to += Ready::BYTES)
    for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; ++step) store(to + (step * 2 + half) * VECTOR, Packed<F>::read(block, half, step));
}

// A run of `blocks` blocks: whole units.
template <typename F>
void unpack(const uint8_t* unit, int64_t blocks, Unpacked& run) {
  unpack_scales<F>(unit, blocks * BLOCK / F::UNIT, run);
  unpack_values<F>(unit + F::VALUES * PANEL, blocks, run.values);
}

}  // namespace furrow
