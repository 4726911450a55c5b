// Products of bf16 weights, and the choice among all kinds of weights.

#include "linear.h"

#include "quantized.h"
#include "sums.h"

namespace linear {
namespace {

#ifdef __AVX512F__

template <int ROWS>
void multiply(const bf16* x, long stride, const bf16* panel, long pairs, float* out, long out_stride,
              const char* next, int fetch, bool more) {
  Sums<ROWS> sums;
  if (more) sums.start(out, out_stride);
  for (long p = 0; p < pairs; p++) {
    const u32x16 left = load<u32x16>(panel + p * 64), right = load<u32x16>(panel + p * 64 + 32);
    if (fetch) __builtin_prefetch(next + p * fetch, 0, 3);
    if (fetch > 64) __builtin_prefetch(next + p * fetch + 64, 0, 3);
    sums.add(x + 2 * p, stride, left, right);
  }
  sums.finish(out, out_stride);
}

#else

// Such CPUs have 16 registers of up to 32 bytes: a piece of a tile is 4 rows by 2 registers. The
// panel is read again for each piece, from the cache.
const int PIECE_ROWS = 4, PIECE_PARTS = 2, PART_LANES = PART_BYTES / 4;
const int PIECE_WIDTH = PIECE_PARTS * PART_LANES;

template <int ROWS>
void multiply_piece(const bf16* x, long stride, const bf16* panel, long pairs, float* out,
                    long out_stride, const char* next, int fetch, bool more) {
  f32part sums[ROWS][PIECE_PARTS] = {};
  if (more)
    for (int m = 0; m < ROWS; m++)
      for (int i = 0; i < PIECE_PARTS; i++)
        sums[m][i] = load<f32part>(out + m * out_stride + i * PART_LANES);
  for (long p = 0; p < pairs; p++) {
    if (fetch) __builtin_prefetch(next + p * fetch, 0, 3);
    f32part even[PIECE_PARTS], odd[PIECE_PARTS];
    for (int i = 0; i < PIECE_PARTS; i++) {
      const u32part both = load<u32part>(panel + p * 64 + i * PART_LANES * 2);
      even[i] = (f32part)(both << 16);
      odd[i] = (f32part)(both & 0xffff0000u);
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) {
      uint32_t bits;
      memcpy(&bits, x + m * stride + 2 * p, 4);
      const u32part both = bits - (u32part){};
      for (int i = 0; i < PIECE_PARTS; i++) {
        sums[m][i] += even[i] * (f32part)(both << 16);
        sums[m][i] += odd[i] * (f32part)(both & 0xffff0000u);
      }
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int i = 0; i < PIECE_PARTS; i++) store(out + m * out_stride + i * PART_LANES, sums[m][i]);
}

template <int ROWS>
void multiply_pieces(const bf16* x, long stride, const bf16* panel, long pairs, float* out,
                     long out_stride, const char* next, int fetch, bool more) {
  constexpr int rows = ROWS < PIECE_ROWS ? ROWS : PIECE_ROWS;
  for (int from = 0; from < PANEL; from += PIECE_WIDTH, next += pairs * fetch)
    multiply_piece<rows>(x, stride, panel + 2 * from, pairs, out + from, out_stride, next, fetch,
                         more);
  if constexpr (ROWS > rows)
    multiply_pieces<ROWS - rows>(x + rows * stride, stride, panel, pairs, out + rows * out_stride,
                                 out_stride, next, fetch, more);
}

template <int ROWS>
void multiply(const bf16* x, long stride, const bf16* panel, long pairs, float* out, long out_stride,
              const char* next, int fetch, bool more) {
  // Each piece prefetches its share of the next panel.
  const int pieces = (ROWS + PIECE_ROWS - 1) / PIECE_ROWS * (PANEL / PIECE_WIDTH);
  multiply_pieces<ROWS>(x, stride, panel, pairs, out, out_stride, next, fetch / pieces, more);
}

#endif

void multiply_panel(const Matrix& w, long panel, const bf16* x, long stride, long rows,
                    const TileTaker& take) {
  const long pairs = w.inputs / 2;
  const bf16* data = (const bf16*)w.data + panel * w.inputs * PANEL;
  // The next panel is prefetched in the first two passes over the rows.
  const char* next = (const char*)(data + w.inputs * PANEL);
  const bool once = rows <= TILE;
  float tile[TILE * PANEL];
  long pass = 0;
  tiles(rows, [&](long first, long count) {
    const int fetch = once ? 128 : pass < 2 ? 64 : 0;
    multiply_rows[count](x + first * stride, stride, data, pairs, tile, PANEL,
                         next + (pass == 1 ? pairs * 64 : 0), fetch, false);
    pass++;
    take(first, count, tile);
  });
}

}  // namespace

const Multiply multiply_rows[TILE + 1] = {
    nullptr,      multiply<1>,  multiply<2>,  multiply<3>,  multiply<4>,
    multiply<5>,  multiply<6>,  multiply<7>,  multiply<8>,  multiply<9>,
    multiply<10>, multiply<11>, multiply<12>, multiply<13>, multiply<14>};

}  // namespace linear

void multiply_panel(const Matrix& w, long panel, const bf16* x, long stride, long rows,
                    const TileTaker& take) {
  switch (w.kind * 2 + (w.mins != nullptr)) {
    case INT8 * 2: return quantized::multiply_panel<INT8, false>(w, panel, x, stride, rows, take);
    case INT8 * 2 + 1: return quantized::multiply_panel<INT8, true>(w, panel, x, stride, rows, take);
    case INT4 * 2: return quantized::multiply_panel<INT4, false>(w, panel, x, stride, rows, take);
    case INT4 * 2 + 1: return quantized::multiply_panel<INT4, true>(w, panel, x, stride, rows, take);
    case FP8 * 2: return quantized::multiply_panel<FP8, false>(w, panel, x, stride, rows, take);
    default: return linear::multiply_panel(w, panel, x, stride, rows, take);
  }
}
