// What the KV cache holds: bf16, or codes of 8 bits (int8, or fp8 as e4m3fn), whose scale is one fp32
// for each token and KV head of keys and of values. Codes are exact in bf16, so that attention
// multiplies them like any other keys and values, and then the scores and weights by the scales.
// engine/kv_quantization.py is the definition.

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

// 16 codes as bf16: where they lie, or in `room`.
template <int KIND>
inline const bf16* halves(const Code<KIND>* codes, bf16* room) {
  if constexpr (KIND == BF16) return codes;
  else return store(room, half_of(quantized::values<KIND>(codes, 0))), room;
}

#ifdef __AVX512F__
// 32 codes as bf16.
template <int KIND>
inline __attribute__((always_inline)) __m512i halves(const Code<KIND>* codes) {
  if constexpr (KIND == BF16) return _mm512_loadu_si512(codes);
  else
    return (__m512i)quantized::halves(quantized::values<KIND>(codes, 0),
                                      quantized::values<KIND>(codes, 1));
}
#endif

// Within ±127, rounded half to even.
inline u8x16 int8_of(f32x16 x) {
  const f32x16 shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  return narrow((u32x16)__builtin_convertvector((x + shift) - shift, i32x16));
}

// Within ±448, as the bits of e4m3fn (Open Compute Project, 8-bit Floating Point Specification 1.0),
// rounded half to even.
inline u8x16 fp8_of(f32x16 x) {
  const u32x16 bits = (u32x16)x, size = bits & 0x7fffffff;
  // Below 2^-6 the steps are 2^-9, as they are of fp32 from 2^14 on.
  const u32x16 small = (u32x16)((f32x16)size + 16384.0f) - 0x46800000;
  // Else the exponent's bias goes from 127 to 7, and 20 bits are rounded away.
  const u32x16 large = (size - 0x3c000000 + 0x7ffff + ((size >> 20) & 1)) >> 20;
  return narrow((size < 0x3c800000 ? small : large) | ((bits >> 24) & 0x80));
}

// A head's values [dim] → codes; returns their scale. It divides, as the definition does.
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
