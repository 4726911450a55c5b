// The sums of a tile during its computation.

#pragma once

#include "linear.h"

namespace linear {

// The sums of ROWS rows by 32 outputs, in registers.
template <int ROWS>
struct Sums {
  f32x16 sums[ROWS][2] = {};

  void start(const float* from, long stride) {
    for (int m = 0; m < ROWS; m++)
      for (int i = 0; i < 2; i++) sums[m][i] = load<f32x16>(from + m * stride + i * 16);
  }

  // Adds one pair of inputs; x points to the first row's.
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

}  // namespace linear
