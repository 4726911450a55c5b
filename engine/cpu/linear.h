// y = x * W^T + b, over weights that were packed when the model was loaded.
//
// A panel is 32 outputs. For each pair of inputs, the 32 pairs of weights are adjacent, so that one
// instruction multiplies 16 outputs by a pair of x that all lanes share. Panels are consecutive,
// and while one is multiplied the next is prefetched. A tile is up to 14 rows by 32 outputs: 28
// sums in registers of AVX-512; other CPUs divide it into pieces. Each sum runs over the inputs in
// order, whatever the other rows are. So a row's result is the same bit for bit in every batch.

#pragma once

#include "lanes.h"

const int PANEL = 32;
const int TILE = 14;

enum Kind { BF16 = 0, INT8 = 1, INT4 = 2, FP8 = 3 };

// One weight [outputs, inputs], packed by engine/cpu/structs.py. `inputs` is even.
struct Matrix {
  int64_t kind, outputs, inputs, group, half_scales;
  const void* data;        // BF16: [panels][inputs / 2][32][2]; the others: see quantized.h
  const void* scales;      // [panels][inputs / group][32], fp16 if half_scales, else fp32; or null
  const void* mins;        // like scales, or null
  const float* bias;       // [outputs], or null
  const int64_t* columns;  // [inputs]: which x each stored input takes, or null: in order

  long panels() const { return (outputs + PANEL - 1) / PANEL; }
};

// Takes a tile of sums, [count][32], of the rows from `first` on. It refers to a function object,
// which must outlive it: products are compiled once, and not for every use of their results.
class TileTaker {
 public:
  template <class Take>
  TileTaker(const Take& take)
      : take_(&take), call_([](const void* take, long first, long count, float* tile) {
          (*(const Take*)take)(first, count, tile);
        }) {}

  void operator()(long first, long count, float* tile) const { call_(take_, first, count, tile); }

 private:
  const void* take_;
  void (*call_)(const void*, long, long, float*);
};

// Multiplies x [rows, stride] by one panel; calls take(first row, count, tile [count][32]).
void multiply_panel(const Matrix& w, long panel, const bf16* x, long stride, long rows,
                    const TileTaker& take);

namespace linear {

// Multiplies rows [rows, stride] by a panel → out [rows, out_stride] with 32 outputs each. For
// every pair, `fetch` bytes of `next` are prefetched. With `more`, the result is added to `out`.
typedef void (*Multiply)(const bf16* x, long stride, const bf16* panel, long pairs, float* out,
                         long out_stride, const char* next, int fetch, bool more);

extern const Multiply multiply_rows[TILE + 1];  // by the number of rows

// Divides rows into equal tiles: calls each(first row, count).
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
