// Weights as codes with a scale for each group of inputs, multiplied by floats: w = scale · (code - zero). Sums of a group are
// floats and are scaled once.
//
// A panel holds, for one input after the other, the codes of its outputs: E4M3 a byte for each, INT4 and E2M1 half a byte, the first
// LANES outputs in the low halves. Scales and zeros lie apart, PANEL of them for each group of a panel.
#pragma once

#include <array>

#include "bytes.h"
#include "../inputs.h"
#include "../pool.h"

namespace furrow {

inline bool in_groups(Kind kind) { return kind >= E4M3_GROUPS; }

// PANEL numbers of 8 bits, each 2^-8 of its value: as halves their bits lie in the same order, with another bias. The sign
// is extended to the two highest bits, of which the lower one is of the exponent and always 0.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline void load_e4m3(const uint8_t* from, Floats& low, Floats& high) {
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}
#elif defined(__AVX2__)
inline void load_e4m3(const uint8_t* from, Floats& low, Floats& high) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
#else
inline void load_e4m3(const uint8_t* from, Floats& low, Floats& high) {
  const auto halves = [](int16x8_t wide) {
    return vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(wide, 7)), vdupq_n_u16(0xbf80));
  };
  const int8x16_t codes = vld1q_s8(reinterpret_cast<const int8_t*>(from));
  low = halves_to_floats(halves(vmovl_s8(vget_low_s8(codes)))), high = halves_to_floats(halves(vmovl_high_s8(codes)));
}
#endif

// Twice the value of numbers of 4 bits (sign, two bits of exponent, one of mantissa), whose bits are the lowest of LANES integers.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline Floats doubled_e2m1(Ints codes) {
  return _mm512_permutexvar_ps(codes, _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12));
}
#elif defined(__AVX2__)
inline Floats doubled_e2m1(Ints codes) {
  const Floats magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12), codes);
  const Ints sign = _mm256_slli_epi32(_mm256_and_si256(codes, all(8)), 28);
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}
#else
inline Floats doubled_e2m1(Ints codes) {
  // The upper two bytes of the floats 0, 1, 2, 3, 4, 6, 8, 12 and of the same negated. Code 0 gives zero to the other bytes.
  constexpr uint8_t first[16] = {0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x80, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0, 0xc1, 0xc1};
  constexpr uint8_t second[16] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x40, 0x00, 0x80, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x40};
  const Ints sought = codes & all(15);
  return bits<Floats>(from_table(first, sought) << 24 | from_table(second, sought) << 16);
}
#endif

// Reads the codes of one input: `BYTES` of them for a panel. `at`: the place of a group's scales.
struct E4M3Codes {
  static constexpr int64_t BYTES = PANEL;
  E4M3Codes(const Matrix&, int64_t) {}
  static Floats scales(const Matrix& matrix, int64_t at) { return load(matrix.scales + at); }
  void read(const uint8_t* from, Floats& low, Floats& high) const { load_e4m3(from, low, high); }
};

struct Int4Codes {
  static constexpr int64_t BYTES = PANEL / 2;
  Floats low_zeros, high_zeros;
  Int4Codes(const Matrix& matrix, int64_t at)
      : low_zeros(to_floats(widened(matrix.zeros + at))), high_zeros(to_floats(widened(matrix.zeros + at + LANES))) {}
  static Floats scales(const Matrix& matrix, int64_t at) { return load(matrix.scales + at); }
  void read(const uint8_t* from, Floats& low, Floats& high) const {
    const Ints both = widened(from);
    low = to_floats(both & all(15)) - low_zeros, high = to_floats(shifted_right(both, 4)) - high_zeros;
  }
};

struct E2M1Codes {
  static constexpr int64_t BYTES = PANEL / 2;
  E2M1Codes(const Matrix&, int64_t) {}
  static Floats scales(const Matrix& matrix, int64_t at) { return halved_powers(matrix.zeros + at); }
  void read(const uint8_t* from, Floats& low, Floats& high) const {
    const Ints both = widened(from);
    low = doubled_e2m1(both), high = doubled_e2m1(shifted_right(both, 4));
  }
};

inline int64_t group_panel_bytes(Kind kind, int64_t inputs) {
  return inputs * (kind == E4M3_GROUPS ? E4M3Codes::BYTES : Int4Codes::BYTES);
}

// One panel for ROWS rows from `x` on; `totals` is (ROWS, PANEL).
template <typename Codes, int ROWS>
void group_tile(const Matrix& matrix, int64_t inputs, const float* x, int64_t stride, int64_t panel, float* totals) {
  const int64_t groups = (inputs + matrix.group - 1) / matrix.group;
  const uint8_t* codes = static_cast<const uint8_t*>(matrix.weights) + panel * inputs * Codes::BYTES;
  Floats scaled[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) scaled[i][0] = scaled[i][1] = all(0.0f);
  for (int64_t input = 0, at = panel * groups * PANEL; input < inputs; at += PANEL) {
    const Codes format(matrix, at);
    const Floats low_scales = Codes::scales(matrix, at), high_scales = Codes::scales(matrix, at + LANES);
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) sums[i][0] = sums[i][1] = all(0.0f);
    for (const int64_t end = std::min(inputs, input + matrix.group); input < end; ++input, codes += Codes::BYTES) {
      Floats low, high;
      format.read(codes, low, high);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Floats value = all(x[i * stride + input]);
        sums[i][0] = fma(value, low, sums[i][0]), sums[i][1] = fma(value, high, sums[i][1]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      scaled[i][0] = fma(sums[i][0], low_scales, scaled[i][0]);
      scaled[i][1] = fma(sums[i][1], high_scales, scaled[i][1]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) store(totals + i * PANEL, scaled[i][0]), store(totals + i * PANEL + LANES, scaled[i][1]);
}

using GroupTile = void (*)(const Matrix&, int64_t, const float*, int64_t, int64_t, float*);

template <typename Codes, Kind KIND, int... ROWS>
constexpr std::array<GroupTile, sizeof...(ROWS)> group_tiles(std::integer_sequence<int, ROWS...>) {
  if constexpr (included(KIND))
    return {group_tile<Codes, ROWS + 1>...};
  else
    return {};
}

template <int MOST>
GroupTile group_tile_for(Kind kind, int64_t rows) {
  using Counts = std::make_integer_sequence<int, MOST>;
  static constexpr std::array<std::array<GroupTile, MOST>, 3> known = {
      group_tiles<E4M3Codes, E4M3_GROUPS>(Counts{}), group_tiles<Int4Codes, INT4_GROUPS>(Counts{}),
      group_tiles<E2M1Codes, E2M1_GROUPS>(Counts{})};
  return known[kind - E4M3_GROUPS][rows - 1];
}

// Rows of bytes with two inputs each become the matrix's outputs from `first` on; its memory holds zeros there.
inline void place_nibbles(Hand& hand, const Matrix& matrix, int64_t inputs, const uint8_t* rows, int64_t count, int64_t first) {
  uint8_t* packed = static_cast<uint8_t*>(const_cast<void*>(matrix.weights));
  const int64_t front = first / PANEL, back = (first + count - 1) / PANEL;
  hand.each(back - front + 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = front + begin; panel < front + end; ++panel)
      for (int64_t output = std::max(first, panel * PANEL); output < std::min(first + count, (panel + 1) * PANEL); ++output) {
        const uint8_t* row = rows + (output - first) * (inputs / 2);
        const int64_t lane = output % PANEL, shift = lane / LANES * 4;
        uint8_t* to = packed + panel * inputs * Int4Codes::BYTES + lane % LANES;
        for (int64_t input = 0; input < inputs; ++input, to += Int4Codes::BYTES)
          *to |= static_cast<uint8_t>((row[input / 2] >> (input % 2 * 4) & 15) << shift);
      }
  });
}

}  // namespace furrow
