// Vectors of 8 floats on aarch64, each in two registers: as wide as those of AVX2, so that weights lie alike and sums are taken in
// one order on both. Included by simd.h.
#pragma once

#include <arm_neon.h>

namespace furrow {

constexpr int LANES = 8;
using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

inline float32x4_t low(Floats a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3); }
inline float32x4_t high(Floats a) { return __builtin_shufflevector(a, a, 4, 5, 6, 7); }
inline int32x4_t low(Ints a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3); }
inline int32x4_t high(Ints a) { return __builtin_shufflevector(a, a, 4, 5, 6, 7); }
inline Floats joined(float32x4_t a, float32x4_t b) { return bits<Floats>(float32x4x2_t{{a, b}}); }
inline Ints joined(int32x4_t a, int32x4_t b) { return bits<Ints>(int32x4x2_t{{a, b}}); }
inline Ints joined(int8x16_t a, int8x16_t b) { return bits<Ints>(int8x16x2_t{{a, b}}); }

inline Floats load(const float* from) { return joined(vld1q_f32(from), vld1q_f32(from + 4)); }
inline void store(float* to, Floats values) {
  vst1q_f32(to, low(values));
  vst1q_f32(to + 4, high(values));
}
inline Floats all(float value) { return joined(vdupq_n_f32(value), vdupq_n_f32(value)); }
inline Ints all(int32_t value) { return joined(vdupq_n_s32(value), vdupq_n_s32(value)); }
inline Ints load(const int8_t* from) { return joined(vld1q_s8(from), vld1q_s8(from + 16)); }
inline Ints load(const int32_t* from) { return joined(vld1q_s32(from), vld1q_s32(from + 4)); }
inline Floats fma(Floats a, Floats b, Floats sum) {
  return joined(vfmaq_f32(low(sum), low(a), low(b)), vfmaq_f32(high(sum), high(a), high(b)));
}
// The second where one is NaN, as on x86.
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Floats larger(Floats a, Floats b) { return joined(larger(low(a), low(b)), larger(high(a), high(b))); }
inline Floats smaller(Floats a, Floats b) { return joined(smaller(low(a), low(b)), smaller(high(a), high(b))); }
inline Floats magnitude(Floats a) { return joined(vabsq_f32(low(a)), vabsq_f32(high(a))); }
inline float sum(Floats a) {
  const float32x4_t four = vaddq_f32(low(a), high(a));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(Floats a) {
  const float32x4_t four = larger(low(a), high(a)), two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}
inline Ints rounded(Floats a) { return joined(vcvtnq_s32_f32(low(a)), vcvtnq_s32_f32(high(a))); }
inline Floats to_floats(Ints a) { return joined(vcvtq_f32_s32(low(a)), vcvtq_f32_s32(high(a))); }
inline Ints minus(Ints a, Ints b) { return a - b; }
inline Ints plus(Ints a, Ints b) { return a + b; }
inline Floats to_power_of_two(Ints exponents) { return bits<Floats>((exponents + all(127)) << 23); }
inline Floats zero_where_below(Floats limit, Floats x, Floats values) {
  const auto kept = [](float32x4_t bound, float32x4_t at, float32x4_t value) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(at, bound)));
  };
  return joined(kept(low(limit), low(x), low(values)), kept(high(limit), high(x), high(values)));
}
inline Floats halves_to_floats(uint16x8_t halves) {
  const float16x8_t values = vreinterpretq_f16_u16(halves);
  return joined(vcvt_f32_f16(vget_low_f16(values)), vcvt_f32_f16(vget_high_f16(values)));
}
inline Floats load_half(const uint16_t* from) { return halves_to_floats(vld1q_u16(from)); }
inline Floats load_bfloat(const uint16_t* from) {
  const uint16x8_t halves = vld1q_u16(from);
  return joined(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
                vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16)));
}
inline Floats load_codes(const int8_t* from) {
  const int16x8_t codes = vmovl_s8(vld1_s8(from));
  return joined(vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(codes))));
}
inline void store_half(uint16_t* to, Floats values) {
  vst1q_u16(to, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(low(values)), vcvt_f16_f32(high(values)))));
}
inline float half_to_float(uint16_t half) { return static_cast<float>(bits<__fp16>(half)); }
inline uint16_t float_to_half(float value) { return bits<uint16_t>(static_cast<__fp16>(value)); }
inline void store_bytes(uint8_t* to, Ints values) {
  vst1_s8(reinterpret_cast<int8_t*>(to), vmovn_s16(vcombine_s16(vmovn_s32(low(values)), vmovn_s32(high(values)))));
}

// sum + Σ over four neighbouring bytes of a · b in each lane, both signed. The sums are exact with any of these instructions.
inline int32x4_t dot4_half(int8x16_t a, int8x16_t b, int32x4_t sum) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, a, b);
#else
  const int16x8_t front = vmull_s8(vget_low_s8(a), vget_low_s8(b)), back = vmull_high_s8(a, b);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(front), vpaddlq_s16(back)));
#endif
}
inline int8x16_t low_bytes(Ints a) { return vreinterpretq_s8_s32(low(a)); }
inline int8x16_t high_bytes(Ints a) { return vreinterpretq_s8_s32(high(a)); }
inline Ints dot4_signed(Ints weights, Ints activations, Ints sum) {
  return joined(dot4_half(low_bytes(weights), low_bytes(activations), low(sum)),
                dot4_half(high_bytes(weights), high_bytes(activations), high(sum)));
}

constexpr int OFFSET = 0;
inline Ints dot4(Ints activations, Ints weights, Ints sum) { return dot4_signed(weights, activations, sum); }

template <typename Vector>
inline Vector in_register(Vector value) {  // instructions take no factor from memory here
  return value;
}

}  // namespace furrow
