// y = x * W^T + b, over weights that were packed when the model was loaded.
//
// A panel is 32 outputs: for each pair of inputs the 32 pairs of weights lie side by side, so that
// one instruction multiplies 16 outputs by a pair of x that all lanes share. Panels follow one
// another, and while one is multiplied the next is fetched. A tile is up to 14 rows by 32 outputs:
// 28 sums in registers. Each sum runs over the inputs in order, whatever the other rows are: a row's
// result is the same bit for bit in every batch.

#pragma once

#include "lanes.h"

const int PANEL = 32;
const int TILE = 14;

enum Kind { BF16 = 0, INT8 = 1, INT4 = 2, FP8 = 3 };

// One weight [outputs, inputs], packed by engine/cpu/packing.py. `inputs` is even.
struct Matrix {
  int64_t kind, outputs, inputs, group, half_scales;
  const void* data;        // BF16: [panels][inputs / 2][32][2]; the others: see quantized.h
  const void* scales;      // [panels][inputs / group][32], fp16 if half_scales, else fp32; or null
  const void* mins;        // like scales, or null
  const float* bias;       // [outputs], or null
  const int64_t* columns;  // [inputs]: which x each stored input takes, or null: in order

  long panels() const { return (outputs + PANEL - 1) / PANEL; }
};

namespace linear {

// The sums of ROWS rows by 32 outputs, in registers.
template <int ROWS>
struct Sums {
  f32x16 sums[ROWS][2] = {};

  void start(const float* from, long stride) {
    for (int m = 0; m < ROWS; m++)
      for (int i = 0; i < 2; i++) sums[m][i] = load<f32x16>(from + m * stride + i * 16);
  }

  // One pair of inputs: x points to the first row's.
  inline __attribute__((always_inline)) void add(const bf16* x, long stride, u32x16 left,
                                                 u32x16 right) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
      uint32_t bits;
      memcpy(&bits, x + m * stride, 4);
      const u32x16 pair = bits - (u32x16){};
      sums[m][0] = add_products(sums[m][0], left, pair);
      sums[m][1] = add_products(sums[m][1], right, pair);
    }
  }

  void finish(float* to, long stride) const {
    for (int m = 0; m < ROWS; m++)
      for (int i = 0; i < 2; i++) store(to + m * stride + i * 16, sums[m][i]);
  }
};

// Rows [rows, stride] times a panel → out [rows, out_stride] of 32 outputs each. `fetch` bytes of
// `next` are fetched for every pair. With `more`, what is in `out` is added to.
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

typedef void (*Multiply)(const bf16*, long, const bf16*, long, float*, long, const char*, int, bool);

static const Multiply multiply_rows[TILE + 1] = {
    nullptr,      multiply<1>,  multiply<2>,  multiply<3>,  multiply<4>,
    multiply<5>,  multiply<6>,  multiply<7>,  multiply<8>,  multiply<9>,
    multiply<10>, multiply<11>, multiply<12>, multiply<13>, multiply<14>};

// Rows in equal tiles: calls each(first row, count).
template <class Each>
inline void tiles(long rows, Each&& each) {
  const long parts = (rows + TILE - 1) / TILE;
  for (long i = 0, at = 0; i < parts; i++) {
    const long count = (rows - at + parts - i - 1) / (parts - i);
    each(at, count);
    at += count;
  }
}

}  // namespace linear
