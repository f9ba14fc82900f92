// Vectors of bytes: shifts, tables, and products of unsigned weights by signed activations.
#pragma once

#include "../simd.h"

namespace furrow {

constexpr int VECTOR = 4 * LANES;  // bytes: four for each lane

using Words = uint16_t __attribute__((vector_size(VECTOR)));  // shifts move bits between neighbouring bytes: mask them

inline Ints shifted_right(Ints a, int bits) { return reinterpret_cast<Ints>(reinterpret_cast<Words>(a) >> bits); }
inline Ints shifted_left(Ints a, int bits) { return reinterpret_cast<Ints>(reinterpret_cast<Words>(a) << bits); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline Ints load(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void store(uint8_t* to, Ints a) { _mm512_storeu_si512(to, a); }
inline Ints all_bytes(int8_t value) { return _mm512_set1_epi8(value); }
inline Ints times_power_of_two(Ints a, int exponent) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(exponent)); }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a); }

// LANES bytes, widened.
inline Ints widened(const int8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints widened(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// table[index] by byte; indices lie below 16.
inline Ints from_table(const uint8_t (&table)[16], Ints indices) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), indices);
}

// 2^(e - 128) of LANES bytes e, as E8M0 halves are defined: subnormal for 0 and 1, and never infinite.
inline Floats halved_powers(const uint8_t* from) {
  const Ints exponents = widened(from), small = _mm512_sllv_epi32(all(0x200000), exponents);
  const Ints normal = _mm512_slli_epi32(minus(exponents, all(1)), 23);
  return _mm512_castsi512_ps(_mm512_max_epi32(normal, _mm512_min_epi32(small, all(0x400000))));
}

inline Ints widened_pairs(Ints pairs, Ints sum) {
  return in_register(_mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
}
inline Ints multiplied_pairs(Ints weights, Ints activations) { return _mm512_maddubs_epi16(weights, activations); }
inline Ints plus_pairs(Ints a, Ints b) { return in_register(_mm512_add_epi16(a, b)); }
inline Ints byte_magnitudes(Ints a) { return _mm512_abs_epi8(a); }
inline Ints signed_by(Ints a, Ints sign) {
  return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(sign), _mm512_setzero_si512(), a);
}

#elif defined(__AVX2__)

inline Ints load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Ints*>(from)); }
inline void store(uint8_t* to, Ints a) { _mm256_storeu_si256(reinterpret_cast<Ints*>(to), a); }
inline Ints all_bytes(int8_t value) { return _mm256_set1_epi8(value); }
inline Ints times_power_of_two(Ints a, int exponent) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(exponent)); }
inline int32_t sum(Ints a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_srli_epi64(two, 32)));
}

// LANES bytes, widened.
inline Ints widened(const int8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Ints widened(const uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// table[index] by byte; indices lie below 16.
inline Ints from_table(const uint8_t (&table)[16], Ints indices) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), indices);
}

// 2^(e - 128) of LANES bytes e, as E8M0 halves are defined: subnormal for 0 and 1, and never infinite.
inline Floats halved_powers(const uint8_t* from) {
  const Ints exponents = widened(from), small = _mm256_sllv_epi32(all(0x200000), exponents);
  const Ints normal = _mm256_slli_epi32(minus(exponents, all(1)), 23);
  return _mm256_castsi256_ps(_mm256_max_epi32(normal, _mm256_min_epi32(small, all(0x400000))));
}

inline Ints widened_pairs(Ints pairs, Ints sum) {
  return in_register(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
inline Ints multiplied_pairs(Ints weights, Ints activations) { return _mm256_maddubs_epi16(weights, activations); }
inline Ints plus_pairs(Ints a, Ints b) { return in_register(_mm256_add_epi16(a, b)); }
inline Ints byte_magnitudes(Ints a) { return _mm256_abs_epi8(a); }
inline Ints signed_by(Ints a, Ints sign) { return _mm256_sign_epi8(a, sign); }

#else

inline Ints load(const uint8_t* from) { return load(reinterpret_cast<const int8_t*>(from)); }
inline void store(uint8_t* to, Ints a) {
  vst1q_u8(to, vreinterpretq_u8_s32(low(a)));
  vst1q_u8(to + 16, vreinterpretq_u8_s32(high(a)));
}
inline Ints all_bytes(int8_t value) { return joined(vdupq_n_s8(value), vdupq_n_s8(value)); }
inline Ints times_power_of_two(Ints a, int exponent) { return a << exponent; }
inline int32_t sum(Ints a) { return vaddvq_s32(vaddq_s32(low(a), high(a))); }

// LANES bytes, widened.
inline Ints widened(const int8_t* from) {
  const int16x8_t wide = vmovl_s8(vld1_s8(from));
  return joined(vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide)));
}
inline Ints widened(const uint8_t* from) {
  const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(from)));
  return joined(vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide)));
}

// table[index] by byte; indices lie below 16.
inline Ints from_table(const uint8_t (&table)[16], Ints indices) {
  const uint8x16_t values = vld1q_u8(table);
  return joined(vreinterpretq_s32_u8(vqtbl1q_u8(values, vreinterpretq_u8_s32(low(indices)))),
                vreinterpretq_s32_u8(vqtbl1q_u8(values, vreinterpretq_u8_s32(high(indices)))));
}

// 2^(e - 128) of LANES bytes e, as E8M0 halves are defined: subnormal for 0 and 1, and never infinite.
inline Floats halved_powers(const uint8_t* from) {
  const Ints exponents = widened(from), normal = (exponents - all(1)) << 23;
  const auto power = [](int32x4_t exponent, int32x4_t value) {
    return vmaxq_s32(value, vshlq_s32(vdupq_n_s32(0x200000), vminq_s32(exponent, vdupq_n_s32(1))));
  };
  return bits<Floats>(joined(power(low(exponents), low(normal)), power(high(exponents), high(normal))));
}

inline Ints widened_pairs(Ints pairs, Ints sum) {
  return joined(vpadalq_s16(low(sum), vreinterpretq_s16_s32(low(pairs))), vpadalq_s16(high(sum), vreinterpretq_s16_s32(high(pairs))));
}
inline int32x4_t multiplied_pairs(int8x16_t weights, int8x16_t activations) {
  const int16x8_t front = vmull_s8(vget_low_s8(weights), vget_low_s8(activations)), back = vmull_high_s8(weights, activations);
  return vreinterpretq_s32_s16(vpaddq_s16(front, back));
}
inline Ints multiplied_pairs(Ints weights, Ints activations) {
  return joined(multiplied_pairs(low_bytes(weights), low_bytes(activations)), multiplied_pairs(high_bytes(weights), high_bytes(activations)));
}
inline Ints plus_pairs(Ints a, Ints b) {
  const auto sum = [](int32x4_t one, int32x4_t other) {
    return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(one), vreinterpretq_s16_s32(other)));
  };
  return joined(sum(low(a), low(b)), sum(high(a), high(b)));
}

#endif

// sum + Σ over four neighbouring bytes of weights · activations, in each lane; activations lie within ± 127. Weights are
// unsigned: any byte where the processor has VNNI or i8mm (BYTE_WEIGHTS), else below 64, so that a pair of products fits into 16 bits.
// IN_PAIRS: it is `multiplied_pairs`, then `widened_pairs`.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr bool BYTE_WEIGHTS = true, IN_PAIRS = false;
inline Ints dot4_unsigned(Ints weights, Ints activations, Ints sum) { return _mm512_dpbusd_epi32(sum, weights, activations); }
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool BYTE_WEIGHTS = true, IN_PAIRS = false;
inline Ints dot4_unsigned(Ints weights, Ints activations, Ints sum) {
  return _mm256_dpbusd_avx_epi32(sum, weights, activations);
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool BYTE_WEIGHTS = true, IN_PAIRS = false;
inline Ints dot4_unsigned(Ints weights, Ints activations, Ints sum) {
  return joined(vusdotq_s32(low(sum), vreinterpretq_u8_s32(low(weights)), low_bytes(activations)),
                vusdotq_s32(high(sum), vreinterpretq_u8_s32(high(weights)), high_bytes(activations)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool BYTE_WEIGHTS = false, IN_PAIRS = false;  // bytes below 64 are the same with a sign
inline Ints dot4_unsigned(Ints weights, Ints activations, Ints sum) { return dot4_signed(weights, activations, sum); }
#else
constexpr bool BYTE_WEIGHTS = false, IN_PAIRS = true;
inline Ints dot4_unsigned(Ints weights, Ints activations, Ints sum) {
  return widened_pairs(multiplied_pairs(weights, activations), sum);
}
#endif

#if !defined(__aarch64__)
// The same for signed weights, -128 included. A pair of products of 128 · 127 fits into 16 bits.
inline Ints dot4_signed(Ints weights, Ints activations, Ints sum) {
  return widened_pairs(multiplied_pairs(byte_magnitudes(weights), signed_by(activations, weights)), sum);
}
#endif

}  // namespace furrow
