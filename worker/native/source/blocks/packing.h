// From the blocks of a file (ggml's `block_q…` structs) to the panels of format.h, and back to floats for a table of embeddings.
#pragma once

#include <array>

#include "format.h"
#include "grid.h"
#include "../pool.h"

namespace furrow {

// One block of a file, its bits taken apart.
struct Decoded {
  alignas(64) uint8_t values[RUN];
  uint16_t scale, minimum;  // fp16; EXPONENT: a byte
  uint8_t scales[16], minima[8];
};

inline uint16_t half_at(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

// 32 values of four bits: low nibbles first, then high ones.
inline void decode_nibbles(const uint8_t* from, uint8_t* values) {
  for (int i = 0; i < 16; ++i) values[i] = from[i] & 15, values[16 + i] = from[i] >> 4;
}

inline void decode_fifth_bits(const uint8_t* from, uint8_t* values) {
  for (int i = 0; i < 32; ++i) values[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

inline void decode(Q4_0, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block);
  decode_nibbles(block + 2, to.values);
}

inline void decode(Q4_1, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block), to.minimum = half_at(block + 2);
  decode_nibbles(block + 4, to.values);
}

inline void decode(Q5_0, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block);
  decode_nibbles(block + 6, to.values);
  decode_fifth_bits(block + 2, to.values);
}

inline void decode(Q5_1, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block), to.minimum = half_at(block + 2);
  decode_nibbles(block + 8, to.values);
  decode_fifth_bits(block + 4, to.values);
}

inline void decode(Q8_0, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block);
  for (int i = 0; i < 32; ++i) to.values[i] = block[2 + i] ^ 0x80;
}

inline void decode(MXFP4, const uint8_t* block, Decoded& to) {
  to.scale = block[0];
  decode_nibbles(block + 1, to.values);
}

// 128 values of two bits: 32 bytes hold the first bits of 32 values, then those of the next 32.
inline void decode_pairs(const uint8_t* from, uint8_t* values) {
  for (int i = 0; i < 128; ++i) values[i] = from[i % 32] >> i / 32 * 2 & 3;
}

inline void decode(Q2_K, const uint8_t* block, Decoded& to) {
  std::memcpy(to.scales, block, 16);
  decode_pairs(block + 16, to.values);
  decode_pairs(block + 48, to.values + 128);
  to.scale = half_at(block + 80), to.minimum = half_at(block + 82);
}

inline void decode(Q3_K, const uint8_t* block, Decoded& to) {
  decode_pairs(block + 32, to.values);
  decode_pairs(block + 64, to.values + 128);
  for (int i = 0; i < 256; ++i) to.values[i] |= (block[i % 32] >> i / 32 & 1) << 2;
  const uint8_t* packed = block + 96;  // 16 scales of six bits: 16 nibbles, then four times 16 bits
  for (int i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> i / 8 * 4 & 15, high = packed[8 + i % 4] >> i / 4 * 2 & 3;
    to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  to.scale = half_at(block + 108);
}

// Eight scales and eight minima of six bits in twelve bytes: of the last four of each, the two highest bits lie above the
// first four.
inline void decode_scales(const uint8_t* from, Decoded& to) {
  for (int i = 0; i < 4; ++i) {
    to.scales[i] = from[i] & 63, to.minima[i] = from[4 + i] & 63;
    to.scales[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | from[i] >> 6 << 4);
    to.minima[4 + i] = static_cast<uint8_t>(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
  }
}

// 64 values of four bits: low nibbles first, then high ones.
inline void decode_long_nibbles(const uint8_t* from, uint8_t* values) {
  for (int i = 0; i < 32; ++i) values[i] = from[i] & 15, values[32 + i] = from[i] >> 4;
}

inline void decode(Q4_K, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block), to.minimum = half_at(block + 2);
  decode_scales(block + 4, to);
  for (int i = 0; i < 4; ++i) decode_long_nibbles(block + 16 + 32 * i, to.values + 64 * i);
}

inline void decode(Q5_K, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block), to.minimum = half_at(block + 2);
  decode_scales(block + 4, to);
  for (int i = 0; i < 4; ++i) decode_long_nibbles(block + 48 + 32 * i, to.values + 64 * i);
  for (int i = 0; i < 256; ++i) to.values[i] |= (block[16 + i % 32] >> i / 32 & 1) << 4;
}

inline void decode(Q6_K, const uint8_t* block, Decoded& to) {
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, place = i % 128;
    const int low = block[half * 64 + place % 64] >> place / 64 * 4 & 15;
    to.values[i] = static_cast<uint8_t>(low | (block[128 + half * 32 + place % 32] >> place / 32 * 2 & 3) << 4);
  }
  std::memcpy(to.scales, block + 192, 16);
  to.scale = half_at(block + 208);
}

inline void decode(IQ4_NL, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block);
  decode_nibbles(block + 2, to.values);
}

// Eight scales of six bits: nibbles, and two bits of each before them.
inline void decode(IQ4_XS, const uint8_t* block, Decoded& to) {
  to.scale = half_at(block);
  for (int i = 0; i < 8; ++i) {
    const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(block + 2) >> i * 2 & 3;
    to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    decode_nibbles(block + 8 + 16 * i, to.values + 32 * i);
  }
}

// Four magnitudes by an index of nine bits, and a sign for each: 64 low bytes, 8 of highest bits, 32 of signs, and 8 scales of four bits.
inline void decode(IQ3_S, const uint8_t* block, Decoded& to) {
  const uint8_t *low = block + 2, *high = block + 66, *signs = block + 74, *scales = block + 106;
  to.scale = half_at(block);
  for (int i = 0; i < 8; ++i) to.scales[i] = static_cast<uint8_t>(1 + 2 * (scales[i / 2] >> i % 2 * 4 & 15));
  for (int i = 0; i < 256; ++i) {
    const int four = i / 4, index = low[four] | (high[four / 8] >> four % 8 & 1) << 8;
    const int magnitude = IQ3_S_GRID[index] >> i % 4 * 3 & 7;  // of 2 · magnitude + 1
    to.values[i] = static_cast<uint8_t>(signs[i / 8] >> i % 8 & 1 ? 7 - magnitude : 8 + magnitude);
  }
}

inline void decode(TQ2_0, const uint8_t* block, Decoded& to) {
  decode_pairs(block, to.values);
  decode_pairs(block + 32, to.values + 128);
  to.scale = half_at(block + 64);
}

// Four values of an output; `to` is where the output's bytes of the first vector lie. See `unpack_values`.
template <typename F>
void place_values(const uint8_t* values, uint8_t* to) {
  constexpr int HALVES = 2 * VECTOR;
  constexpr uint32_t LOW_MASK = 0x01010101u * ((1 << F::LOW) - 1);
  uint32_t low[STEPS] = {}, high[STEPS] = {};
  for (int step = 0; step < STEPS; ++step) {
    uint32_t four;
    std::memcpy(&four, values + 4 * step, 4);
    low[step % F::LOW_COUNT] |= (four & LOW_MASK) << step / F::LOW_COUNT * F::LOW;
    if constexpr (F::HIGH > 0) high[step % F::HIGH_COUNT] |= (four & ~LOW_MASK) >> F::LOW << step / F::HIGH_COUNT * F::HIGH;
  }
  for (int i = 0; i < F::LOW_COUNT; ++i) std::memcpy(to + F::low_place(i) * HALVES, low + i, 4);
  for (int i = 0; i < F::HIGH_COUNT; ++i) std::memcpy(to + F::high_place(i) * HALVES, high + i, 4);
}

// A block becomes the part of one output (`lane` of its panel) in a unit.
template <typename F>
void place_block(const uint8_t* block, int64_t lane, uint8_t* unit) {
  Decoded decoded;
  decode(F{}, block, decoded);
  if constexpr (F::SCALES == Scales::EXPONENT) {
    unit[lane] = static_cast<uint8_t>(decoded.scale);
  } else {
    std::memcpy(unit + 2 * lane, &decoded.scale, 2);
    if constexpr (F::MINIMA) std::memcpy(unit + F::MINIMUM * PANEL + 2 * lane, &decoded.minimum, 2);
  }
  for (int64_t sub = 0; sub < F::SMALL_MINIMA - F::SMALL_SCALES; ++sub)
    unit[(F::SMALL_SCALES + sub) * PANEL + lane] = decoded.scales[sub];
  for (int64_t sub = 0; sub < F::VALUES - F::SMALL_MINIMA; ++sub)
    unit[(F::SMALL_MINIMA + sub) * PANEL + lane] = decoded.minima[sub];
  for (int64_t i = 0; i < F::UNIT / BLOCK; ++i)
    place_values<F>(decoded.values + i * BLOCK, unit + (F::VALUES + i * F::BLOCK_BYTES) * PANEL + 4 * lane);
}

// Rows of a file's blocks become the outputs from `first` on of a matrix.
template <typename F>
void place_rows(Hand& hand, uint8_t* packed, int64_t inputs, const uint8_t* rows, int64_t count, int64_t first) {
  const int64_t units = inputs / F::UNIT, row_bytes = units * F::FILE_BYTES;
  const int64_t front = first / PANEL, back = (first + count - 1) / PANEL;
  hand.each(back - front + 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = front + begin; panel < front + end; ++panel)
      for (int64_t unit = 0; unit < units; ++unit)
        for (int64_t output = std::max(first, panel * PANEL); output < std::min(first + count, (panel + 1) * PANEL); ++output)
          place_block<F>(rows + (output - first) * row_bytes + unit * F::FILE_BYTES, output % PANEL,
                         packed + (panel * units + unit) * F::BYTES * PANEL);
  });
}

inline void pack_blocks(Hand& hand, const Matrix& matrix, int64_t inputs, const void* rows, int64_t count, int64_t first) {
  auto* packed = static_cast<uint8_t*>(const_cast<void*>(matrix.weights));
  of_format(matrix.kind, [&](auto format) {
    place_rows<decltype(format)>(hand, packed, inputs, static_cast<const uint8_t*>(rows), count, first);
    return true;
  }, false);
}

// The weights of one output, with the bits that ggml gives them.
template <typename F>
void look_up_blocks(const Matrix& matrix, int64_t inputs, int64_t output, float* out) {
  const auto* packed = static_cast<const uint8_t*>(matrix.weights) + output / PANEL * (inputs / F::UNIT * F::BYTES * PANEL);
  const int64_t lane = output % PANEL;
  Unpacked run;
  for (int64_t first = 0; first < inputs; first += RUN) {
    const int64_t count = std::min(RUN, inputs - first);
    unpack<F>(packed + first / F::UNIT * F::BYTES * PANEL, count / BLOCK, run);
    for (int64_t input = 0; input < count; ++input) {
      const int64_t at = input / F::SUB * PANEL + lane;
      const int stored = run.values[(input / 4 * PANEL + lane) * 4 + input % 4];
      const float scale = run.scales[at];
      if constexpr (F::MINIMA)
        out[first + input] = scale * static_cast<float>(stored) + run.minima[at];
      else if constexpr (F::WIDE && !BYTE_WEIGHTS)
        out[first + input] = scale * static_cast<float>(static_cast<int8_t>(stored));
      else
        out[first + input] = scale * static_cast<float>(stored - (1 << F::SHIFT));
    }
  }
}

}  // namespace furrow
