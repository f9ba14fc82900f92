// The processor's vectors: 16 floats with AVX-512, 8 with AVX2 and NEON. All that the products and the attention need of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__aarch64__)
#include "neon.h"
#else
#include <immintrin.h>

namespace furrow {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int LANES = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Ints all(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints load(const int8_t* from) { return _mm512_loadu_si512(from); }
inline Ints load(const int32_t* from) { return _mm512_loadu_si512(from); }
inline Floats fma(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a); }
inline Ints rounded(Floats a) { return _mm512_cvtps_epi32(a); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Floats to_power_of_two(Ints exponents) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponents, _mm512_set1_epi32(127)), 23));
}
inline Floats zero_where_below(Floats limit, Floats x, Floats values) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), values);
}
inline Floats load_half(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats load_bfloat(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Floats load_codes(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void store_half(uint16_t* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bytes(uint8_t* to, Ints values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(values));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int LANES = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Ints all(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints load(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Ints*>(from)); }
inline Ints load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Ints*>(from)); }
inline Floats fma(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float sum(Floats a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(Floats a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline Ints rounded(Floats a) { return _mm256_cvtps_epi32(a); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Floats to_power_of_two(Ints exponents) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponents, _mm256_set1_epi32(127)), 23));
}
inline Floats zero_where_below(Floats limit, Floats x, Floats values) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), values);
}
inline Floats load_half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats load_bfloat(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Floats load_codes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline void store_half(uint16_t* to, Floats values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bytes(uint8_t* to, Ints values) {
  int32_t wide[LANES];
  _mm256_storeu_si256(reinterpret_cast<Ints*>(wide), values);
  for (int lane = 0; lane < LANES; ++lane) to[lane] = static_cast<uint8_t>(wide[lane]);
}

#else
#error "AVX2 with FMA and F16C, or NEON on aarch64, is the least that these products are written for"
#endif

// sum + Σ over four neighbouring bytes of activations · weights, in each lane; activations lie within ± 127. They are
// kept as unsigned bytes, OFFSET above their value, where the processor multiplies unsigned by signed bytes at once.
// Otherwise the weight's sign goes to the activation: two products of 128 · 127 fit into 16 bits, two of 255 · 128 don't.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr int OFFSET = 128;
inline Ints dot4(Ints activations, Ints weights, Ints sum) { return _mm512_dpbusd_epi32(sum, activations, weights); }
#elif defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int OFFSET = 0;
inline Ints dot4(Ints activations, Ints weights, Ints sum) {
  const __mmask64 negative = _mm512_movepi8_mask(weights);
  const Ints turned = _mm512_mask_sub_epi8(activations, negative, _mm512_setzero_si512(), activations);
  const Ints pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), turned);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#elif defined(__AVXVNNI__)
constexpr int OFFSET = 128;
inline Ints dot4(Ints activations, Ints weights, Ints sum) { return _mm256_dpbusd_avx_epi32(sum, activations, weights); }
#else
constexpr int OFFSET = 0;
inline Ints dot4(Ints activations, Ints weights, Ints sum) {
  const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// The same value, which the compiler neither reads or computes anew where it is used nor takes apart: left to itself, it reads a vector
// again for each product, and adds up products in an order that needs more registers than there are.
template <typename Vector>
inline Vector in_register(Vector value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#else
  asm("" : "+x"(value));
#endif
  return value;
}

}  // namespace furrow
#endif

namespace furrow {

// e^x to about one part in 10^7; 0 below -87, near where float32 ends. The polynomial is that of the Cephes library.
inline Floats exponential(Floats x) {
  const Floats bounded = larger(all(-87.0f), smaller(all(88.0f), x));  // in this order NaN stays NaN
  const Ints exponent = rounded(bounded * all(1.44269504f));
  const Floats whole = to_floats(exponent);
  const Floats rest = fma(whole, all(2.12194440e-4f), fma(whole, all(-0.693359375f), bounded));
  Floats series = all(1.9875691500e-4f);
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    series = fma(series, rest, all(next));
  const Floats value = fma(series, rest * rest, rest + all(1.0f)) * to_power_of_two(exponent);
  return zero_where_below(all(-87.0f), x, value);
}

// cap · tanh(x / cap): as cap · (1 - 2 / (e^(2x / cap) + 1)), to about one part in 10^7 of the cap.
inline Floats capped(Floats x, float cap) {
  const Floats power = exponential(x * all(2.0f / cap));
  return all(cap) - all(2.0f * cap) / (power + all(1.0f));
}

// The same for `count` numbers in place.
inline void cap_all(float* values, int64_t count, float cap) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(values + at, capped(load(values + at), cap));
  for (; at < count; ++at) values[at] = cap * std::tanh(values[at] / cap);
}

// Sums of lanes that lie STRIDE apart: of a where the lane's bit STRIDE is clear, of b where it is set.
template <int STRIDE, int... LANE>
inline Floats paired(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
  const Floats own = __builtin_shufflevector(a, b, (LANE & STRIDE ? LANES + LANE : LANE)...);
  const Floats others = __builtin_shufflevector(a, b, (LANE & STRIDE ? LANE : LANES + LANE)...);
  return own + __builtin_shufflevector(others, others, (LANE ^ STRIDE)...);  // blends and one exchange: two shuffles take longer
}

// Sums across the lanes of COUNT vectors at once. Neighbouring lanes are added in pairs, then neighbouring sums, until
// one vector holds a lane, or STRIDE of them, for each input.
template <int STRIDE, size_t COUNT>
inline Floats across(const Floats (&rows)[COUNT]) {
  if constexpr (COUNT == 1) {
    return rows[0];
  } else {
    Floats half[COUNT / 2];
#pragma GCC unroll 8
    for (size_t i = 0; i < COUNT / 2; ++i)
      half[i] = paired<STRIDE>(rows[2 * i], rows[2 * i + 1], std::make_integer_sequence<int, LANES>{});
    return across<2 * STRIDE>(half);
  }
}

}  // namespace furrow
