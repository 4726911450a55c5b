// What the CPU kernels share: bf16 loads, and sums over the lanes of sixteen vectors at once.

#pragma once

#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

static inline __m512bh load_bf16(const bf16* from, __mmask32 mask = 0xffffffffu) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

// Lane i of the result is the sum of the lanes of a[i], made in the same order for each.
static inline __m512 add_lanes(const __m512* a) {
  __m512 b[8], c[4], d[2];
  for (int i = 0; i < 8; i++)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                         _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; i++)
    d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88),
                       _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}
