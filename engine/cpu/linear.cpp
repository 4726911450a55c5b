// Products of bf16 weights, and the choice among all kinds of weights.

#include "linear.h"

#include "quantized.h"
#include "sums.h"

namespace linear {
namespace {

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
