// y = x * W^T + b for a few rows of x: what a decode step needs.
//
// The weights are read once, row by row, as they lie in the mapped file; the rows of x stay in the
// cache. A tile is 16 rows of W. Within it, one to four rows of x are multiplied at a time, with 16
// accumulators, which one tree of shuffles adds up. A row's sum is made in the same order whatever
// the other rows are.

#include <immintrin.h>
#include <stdint.h>

#include "cpu_lanes.h"

namespace {

// ROWS rows of W by COLUMNS rows of x: lane m * ROWS + r of the result is W[r] . x[m].
// `ahead` is how far off the next tile's rows are: they are fetched while these are computed.
template <int ROWS, int COLUMNS>
inline __m512 multiply(const bf16* const* w, const bf16* x, long k, long ahead) {
  static_assert(ROWS * COLUMNS == 16, "16 accumulators");
  __m512 sums[16];
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  for (long at = 0; at < k; at += 32) {
    const __mmask32 mask = k - at >= 32 ? 0xffffffffu : (1u << (k - at)) - 1;
    __m512bh rows[ROWS];
    for (int r = 0; r < ROWS; r++) {
      rows[r] = load_bf16(w[r] + at, mask);
      if (ahead) _mm_prefetch((const char*)(w[r] + at + ahead), _MM_HINT_T0);
    }
    for (int m = 0; m < COLUMNS; m++) {
      const __m512bh column = load_bf16(x + m * k + at, mask);
      for (int r = 0; r < ROWS; r++)
        sums[m * ROWS + r] = _mm512_dpbf16_ps(sums[m * ROWS + r], rows[r], column);
    }
  }
  return add_lanes(sums);
}

struct Problem {
  const bf16* x;
  const bf16* w;
  const bf16* bias;
  float* out_float;
  bf16* out_half;
  long m, n, k;
};

// Write `count` neighbouring outputs of row m, from column n on.
inline void store(const Problem& p, long m, long n, int count, const float* values) {
  for (int i = 0; i < count; i++) {
    float value = values[i];
    if (p.bias) {
      const uint32_t bits = (uint32_t)p.bias[n + i] << 16;
      float bias;
      __builtin_memcpy(&bias, &bits, 4);
      value += bias;
    }
    if (p.out_float) {
      p.out_float[m * p.n + n + i] = value;
    } else {
      const __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(value));
      p.out_half[m * p.n + n + i] = (bf16)_mm_extract_epi16((__m128i)rounded, 0);
    }
  }
}

template <int ROWS, int COLUMNS>
inline void block(const Problem& p, const bf16* const* w, long m, long n, int rows, long ahead) {
  alignas(64) float values[16];
  for (int r = 0; r < rows; r += ROWS) {
    _mm512_store_ps(values, multiply<ROWS, COLUMNS>(w + r, p.x + m * p.k, p.k, ahead));
    const int count = rows - r < ROWS ? rows - r : ROWS;
    for (int c = 0; c < COLUMNS; c++) store(p, m + c, n + r, count, values + c * ROWS);
  }
}

void tile(const Problem& p, long n) {
  const int rows = p.n - n < 16 ? (int)(p.n - n) : 16;
  const bf16* w[16];
  for (int r = 0; r < 16; r++) w[r] = p.w + (n + (r < rows ? r : rows - 1)) * p.k;
  long m = 0, ahead = 16 * p.k;
  for (; m + 4 <= p.m; m += 4, ahead = 0) block<4, 4>(p, w, m, n, rows, ahead);
  if (m + 2 <= p.m) {
    block<8, 2>(p, w, m, n, rows, ahead);
    m += 2, ahead = 0;
  }
  if (m < p.m) block<16, 1>(p, w, m, n, rows, ahead);
}

}  // namespace

// x [m, k], w [n, k], bias [n] or null; one of out_float and out_half [m, n]. All row-major.
extern "C" void baton_linear(const void* x, const void* w, const void* bias, void* out_float,
                             void* out_half, long m, long n, long k, int threads) {
  const Problem p = {(const bf16*)x,   (const bf16*)w, (const bf16*)bias, (float*)out_float,
                     (bf16*)out_half, m,              n,                 k};
  const long tiles = (n + 15) / 16;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long i = 0; i < tiles; i++) tile(p, i * 16);
}
