// Weights with fewer bits: code * scale + min, rounded to bf16 and then multiplied like any other.
//
// Codes are in panels like bf16 weights: for each pair of inputs there are 64 codes of 32 outputs.
// INT8 and FP8 (e4m3fn) take a byte each. INT4 takes 32 bytes, whose low nibbles are the first
// half. For a few rows, codes are converted to bf16 in registers, so that only codes are read. For
// many rows, a part of the panel is converted in the cache. Both give the same bits.

#pragma once

#include "linear.h"

namespace quantized {

// Codes 16 q … 16 q + 15 of a pair.
template <int KIND>
inline __attribute__((always_inline)) f32x16 values(const uint8_t* codes, int q) {
  if (KIND == INT8) return __builtin_convertvector(wide(load<i8x16>(codes + 16 * q)), f32x16);
  if (KIND == INT4) {
    const u32x16 both = wide(load<u8x16>(codes + 16 * (q % 2)));
    return __builtin_convertvector((i32x16)(q < 2 ? both & 15 : both >> 4), f32x16);
  }
  const u32x16 bits = wide(load<u8x16>(codes + 16 * q));
  return (f32x16)((bits & 0x7f) << 20 | (bits & 0x80) << 24) * 0x1p120f;
}

inline u32x16 halves(f32x16 low, f32x16 high) {
#ifdef __AVX512BF16__
  return (u32x16)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  const u16x16 parts[2] = {half_of(low), half_of(high)};
  return load<u32x16>(parts);
#endif
}

// Like ::multiply_panel. Instances: quantized.cpp.
template <int KIND, bool MINS>
void multiply_panel(const Matrix& w, long panel, const bf16* x, long stride, long rows,
                    const TileTaker& take);

}  // namespace quantized
