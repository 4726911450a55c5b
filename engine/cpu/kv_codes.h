// Contents of the KV cache: bf16, or codes of 8 bits (int8, or fp8 as e4m3fn) with an fp32 scale
// for each token and KV head of keys and of values. Codes are exact in bf16. So attention
// multiplies them like other keys and values, and then multiplies the scores and weights by the
// scales. engine/kv/kv_quantization.py is the reference.

#pragma once

#include "quantized.h"

// The blocks: codes [layer, K/V, head, slot, dim] and scales [layer, K/V, head, slot] each; strides
// count elements.
struct Cache {
  int64_t kind;  // BF16, INT8 or FP8
  void* data;
  float* scales;  // null for BF16
  int64_t block_stride, layer_stride, scale_block_stride, scale_layer_stride, block_size;
};

namespace kv {

template <int KIND>
struct CodeOf {
  typedef uint8_t type;
};

template <>
struct CodeOf<BF16> {
  typedef bf16 type;
};

template <int KIND>
using Code = typename CodeOf<KIND>::type;

// 16 codes as bf16, in place or in `room`.
template <int KIND>
inline const bf16* halves(const Code<KIND>* codes, bf16* room) {
  if constexpr (KIND == BF16) return codes;
  else return store(room, half_of(quantized::values<KIND>(codes, 0))), room;
}

#ifdef __AVX512F__
// Converts 32 codes of e4m3fn: the exponent's bias changes from 7 to 127. Codes below 2^-6,
// multiples of 2^-9, are looked up.
inline __attribute__((always_inline)) __m512i fp8_halves(const uint8_t* codes) {
  typedef uint16_t u16x32 __attribute__((vector_size(64)));
  const u16x32 small = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
  const __m512i size = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x7f0));
  const __mmask32 few = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  const __m512i value = _mm512_mask_permutexvar_epi16(
      _mm512_add_epi16(size, _mm512_set1_epi16(0x3c00)), few, wide, (__m512i)small);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16((short)0x8000));
  return _mm512_or_si512(value, sign);
}

// 32 codes as bf16.
template <int KIND>
inline __attribute__((always_inline)) __m512i halves(const Code<KIND>* codes) {
  if constexpr (KIND == BF16) return _mm512_loadu_si512(codes);
  else if constexpr (KIND == FP8) return fp8_halves(codes);
  else
    return (__m512i)quantized::halves(quantized::values<KIND>(codes, 0),
                                      quantized::values<KIND>(codes, 1));
}
#endif

// Rounds to int8 within ±127, half to even.
inline u8x16 int8_of(f32x16 x) {
  const f32x16 shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  return narrow((u32x16)__builtin_convertvector((x + shift) - shift, i32x16));
}

// Rounds to e4m3fn bits within ±448, half to even (Open Compute Project, 8-bit Floating Point
// Specification 1.0).
inline u8x16 fp8_of(f32x16 x) {
  const u32x16 bits = (u32x16)x, size = bits & 0x7fffffff;
  // Below 2^-6 the steps are 2^-9, which is the step of fp32 from 2^14 on.
  const u32x16 small = (u32x16)((f32x16)size + 16384.0f) - 0x46800000;
  // Otherwise the exponent's bias changes from 127 to 7, and 20 bits are rounded away.
  const u32x16 large = (size - 0x3c000000 + 0x7ffff + ((size >> 20) & 1)) >> 20;
  return narrow((size < 0x3c800000 ? small : large) | ((bits >> 24) & 0x80));
}

// Converts a head's values [dim] to codes; returns their scale. It divides, like the reference.
template <int KIND>
inline float encode(const float* values, long dim, uint8_t* codes) {
  const float limit = KIND == INT8 ? 127.0f : 448.0f;
  f32x16 most = {};
  for (long i = 0; i < dim; i += 16) {
    const f32x16 x = load<f32x16>(values + i);
    most = larger(most, larger(x, -x));
  }
  const float found = largest_of(most) / limit, scale = found > 0 ? found : 1.0f;
  for (long i = 0; i < dim; i += 16) {
    const f32x16 x = load<f32x16>(values + i) / scale;
    const f32x16 bound = smaller(larger(x, all(-limit)), all(limit));
    if (KIND == INT8) store(codes + i, int8_of(bound));
    else store(codes + i, fp8_of(bound));
  }
  return scale;
}

}  // namespace kv
