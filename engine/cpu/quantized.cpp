// Products of weights that are codes: see quantized.h.

#include "quantized.h"

#include <algorithm>
#include <vector>

#include "sums.h"

namespace quantized {
namespace {

const long PART = 512;  // pairs of a panel that are converted at once: 64 KiB of bf16

template <int KIND>
const int BYTES = KIND == INT4 ? 32 : 64;  // of a pair's codes

inline f32x16 factors(const void* from, bool half, long at) {
  if (!half) return load<f32x16>((const float*)from + at);
#ifdef __AVX512F__
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)((const uint16_t*)from + at)));
#else
  typedef _Float16 f16x16 __attribute__((vector_size(32)));
  return __builtin_convertvector(load<f16x16>((const uint16_t*)from + at), f32x16);
#endif
}

// Scales or minimums of a group, each twice, because an output's two codes are adjacent.
struct Doubled {
  f32x16 lanes[4];

  Doubled(const void* from, bool half, long at) {
    typedef i32x16 Order;
    const Order low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}, high = low + 8;
    for (int i = 0; i < 2; i++) {
      const f32x16 v = factors(from, half, at + 16 * i);
      lanes[2 * i] = __builtin_shuffle(v, low);
      lanes[2 * i + 1] = __builtin_shuffle(v, high);
    }
  }
};

// One group's factors, and the conversion of a pair of inputs to bf16.
template <int KIND, bool MINS>
struct Group {
  const Doubled scales, mins;

  Group(const Matrix& w, long at)
      : scales(w.scales, w.half_scales, at), mins(MINS ? w.mins : w.scales, w.half_scales, at) {}

  inline __attribute__((always_inline)) f32x16 part(const uint8_t* codes, int q) const {
    const f32x16 v = values<KIND>(codes, q) * scales.lanes[q];
    return MINS ? v + mins.lanes[q] : v;
  }

  inline __attribute__((always_inline)) u32x16 left(const uint8_t* codes) const {
    return halves(part(codes, 0), part(codes, 1));
  }

  inline __attribute__((always_inline)) u32x16 right(const uint8_t* codes) const {
    return halves(part(codes, 2), part(codes, 3));
  }
};

inline long factor_at(const Matrix& w, long panel, long pair) {
  return (panel * (w.inputs / w.group) + 2 * pair / w.group) * PANEL;
}

// Converts pairs `from` … `to - 1` of a panel to bf16 [pairs][32][2].
template <int KIND, bool MINS>
void turn(const Matrix& w, long panel, long from, long to, bf16* out) {
  const uint8_t* codes = (const uint8_t*)w.data + panel * w.inputs / 2 * BYTES<KIND>;
  for (long p = from; p < to;) {
    const Group<KIND, MINS> group(w, factor_at(w, panel, p));
    for (const long end = std::min(to, (2 * p / w.group + 1) * w.group / 2); p < end; p++) {
      store(out + (p - from) * 64, group.left(codes + p * BYTES<KIND>));
      store(out + (p - from) * 64 + 32, group.right(codes + p * BYTES<KIND>));
    }
  }
}

// Does linear::multiply over codes.
template <int KIND, bool MINS, int ROWS>
void multiply(const Matrix& w, long panel, const bf16* x, long stride, float* out) {
  const long pairs = w.inputs / 2;
  const uint8_t* codes = (const uint8_t*)w.data + panel * pairs * BYTES<KIND>;
  const uint8_t* next = codes + pairs * BYTES<KIND>;
  linear::Sums<ROWS> sums;
  for (long p = 0; p < pairs;) {
    const Group<KIND, MINS> group(w, factor_at(w, panel, p));
    for (const long end = p + w.group / 2; p < end; p++) {
      __builtin_prefetch(next + p * BYTES<KIND>, 0, 3);
      sums.add(x + 2 * p, stride, group.left(codes + p * BYTES<KIND>),
               group.right(codes + p * BYTES<KIND>));
    }
  }
  sums.finish(out, PANEL);
}

// Maximum rows for conversion in registers: with more, codes would be converted too often, or the
// registers would not hold the sums.
#ifdef __AVX512F__
const int FEW = 8;
#else
const int FEW = 2;
#endif

typedef void (*Multiply)(const Matrix&, long, const bf16*, long, float*);

template <int KIND, bool MINS>
const Multiply multiply_rows[FEW + 1] = {
    nullptr,
    multiply<KIND, MINS, 1>, multiply<KIND, MINS, 2>,
#ifdef __AVX512F__
    multiply<KIND, MINS, 3>, multiply<KIND, MINS, 4>, multiply<KIND, MINS, 5>,
    multiply<KIND, MINS, 6>, multiply<KIND, MINS, 7>, multiply<KIND, MINS, 8>,
#endif
};

}  // namespace

template <int KIND, bool MINS>
void multiply_panel(const Matrix& w, long panel, const bf16* x, long stride, long rows,
                    const TileTaker& take) {
  float tile[TILE * PANEL];
  if (rows <= FEW) {
    multiply_rows<KIND, MINS>[rows](w, panel, x, stride, tile);
    take(0, rows, tile);
    return;
  }
  static thread_local std::vector<bf16> part(PART * 64);
  static thread_local std::vector<float> sums;
  const long pairs = w.inputs / 2;
  sums.resize(std::max<size_t>(sums.size(), rows * PANEL));
  for (long from = 0; from < pairs; from += PART) {
    const long to = std::min(pairs, from + PART);
    turn<KIND, MINS>(w, panel, from, to, part.data());
    linear::tiles(rows, [&](long first, long count) {
      linear::multiply_rows[count](x + first * stride + 2 * from, stride, part.data(), to - from,
                                   sums.data() + first * PANEL, PANEL, nullptr, 0, from > 0);
    });
  }
  linear::tiles(rows, [&](long first, long count) { take(first, count, sums.data() + first * PANEL); });
}

template void multiply_panel<INT8, false>(const Matrix&, long, const bf16*, long, long,
                                          const TileTaker&);
template void multiply_panel<INT8, true>(const Matrix&, long, const bf16*, long, long,
                                         const TileTaker&);
template void multiply_panel<INT4, false>(const Matrix&, long, const bf16*, long, long,
                                          const TileTaker&);
template void multiply_panel<INT4, true>(const Matrix&, long, const bf16*, long, long,
                                         const TileTaker&);
template void multiply_panel<FP8, false>(const Matrix&, long, const bf16*, long, long,
                                         const TileTaker&);

}  // namespace quantized
