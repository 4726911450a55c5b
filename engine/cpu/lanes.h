// Sixteen numbers at a time, in the compiler's own vector types: one source for AVX-512, AVX2 and
// every other target of the compiler. Intrinsics are used only where they pay.
//
// bf16 is the upper half of an fp32; rounding is to nearest even.

#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

template <class V>
static inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
static inline void store(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

static inline f32x16 all(float x) { return x - (f32x16){}; }

// In parts as wide as the CPU's registers: the compiler splits comparisons of wider vectors into
// single numbers (seen with GCC 12).
#if defined(__AVX512F__)
#define PART_BYTES 64
#elif defined(__AVX2__)
#define PART_BYTES 32
#else
#define PART_BYTES 16
#endif
typedef float f32part __attribute__((vector_size(PART_BYTES)));
typedef uint32_t u32part __attribute__((vector_size(PART_BYTES)));

template <class To, class Each>
static inline To by_parts(f32x16 a, f32x16 b, Each each) {
  f32part left[64 / PART_BYTES], right[64 / PART_BYTES];
  memcpy(left, &a, sizeof a);
  memcpy(right, &b, sizeof b);
  decltype(each(left[0], right[0])) found[64 / PART_BYTES];
  for (int i = 0; i < 64 / PART_BYTES; i++) found[i] = each(left[i], right[i]);
  return load<To>(found);
}

static inline f32x16 larger(f32x16 a, f32x16 b) {
  return by_parts<f32x16>(a, b, [](f32part x, f32part y) { return x > y ? x : y; });
}

static inline f32x16 smaller(f32x16 a, f32x16 b) {
  return by_parts<f32x16>(a, b, [](f32part x, f32part y) { return x < y ? x : y; });
}

// Sets all bits of a lane where a >= b.
static inline i32x16 reaches(f32x16 a, f32x16 b) {
  return by_parts<i32x16>(a, b, [](f32part x, f32part y) { return x >= y; });
}

static inline float float_of(bf16 half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline f32x16 float_of(u16x16 halves) {
  return (f32x16)(__builtin_convertvector(halves, u32x16) << 16);
}

static inline u16x16 half_of(f32x16 x) {
#ifdef __AVX512BF16__
  return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
  const u32x16 bits = (u32x16)x;
  return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, u16x16);
#endif
}

static inline bf16 half_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Converts bytes to 32 bits, with intrinsics: the compiler splits its own conversion into single
// bytes if they come from memory (seen with GCC 12).
static inline i32x16 wide(i8x16 x) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
  const __m256i parts[2] = {_mm256_cvtepi8_epi32((__m128i)x),
                            _mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)x, 8))};
  return load<i32x16>(parts);
#else
  return __builtin_convertvector(x, i32x16);
#endif
}

static inline u32x16 wide(u8x16 x) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  const __m256i parts[2] = {_mm256_cvtepu8_epi32((__m128i)x),
                            _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)x, 8))};
  return load<u32x16>(parts);
#else
  return __builtin_convertvector(x, u32x16);
#endif
}

// The lowest byte of each 32-bit lane.
static inline u8x16 narrow(u32x16 x) {
#ifdef __AVX512F__
  return (u8x16)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, u8x16);
#endif
}

// Adds to each lane the products of its pair of bf16: the inner operation of a matrix product.
static inline f32x16 add_products(f32x16 sum, u32x16 a, u32x16 b) {
#ifdef __AVX512BF16__
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += (f32x16)(a << 16) * (f32x16)(b << 16);
  return sum + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}

// Sums in halves: lane i and lane i + 8, then i + 4, and so on.
static inline float sum_of(f32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

static inline float largest_of(f32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// e^x to about one unit in the last place: 2^n * p(f) with x = (n + f) ln 2 and the polynomial of
// Cephes' expf (Moshier). Beyond ±87 it keeps the value there.
static inline f32x16 exp_of(f32x16 x) {
  x = smaller(larger(x, all(-87.0f)), all(87.0f));
  const f32x16 shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const f32x16 n = (x * 1.44269504f + shift) - shift;
  f32x16 f = x - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  f32x16 p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + (f + 1.0f);
  const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return p * (f32x16)power;
}

// 2^x for x <= 0, to about 2^-23: much more precise than bf16, to which it is rounded. -inf gives
// 0.
static inline f32x16 power_of_two(f32x16 x) {
#ifdef __AVX512F__
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, 0);
#else
  x = larger(x, all(-126.0f));
  const f32x16 shift = all(12582912.0f);
  const f32x16 n = (x + shift) - shift;
#endif
  const f32x16 f = x - n;
  f32x16 p = all(1.32186725e-03f);
  p = p * f + 9.67169794e-03f;
  p = p * f + 5.55089295e-02f;
  p = p * f + 2.40222380e-01f;
  p = p * f + 6.93146856e-01f;
  p = p * f + 1.0f;
#ifdef __AVX512F__
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (f32x16)((__builtin_convertvector(n, i32x16) + 127) << 23);
#endif
}

static inline f32x16 tanh_of(f32x16 x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

static inline f32x16 silu(f32x16 x) { return x / (1.0f + exp_of(-x)); }

// GELU (Hendrycks & Gimpel, 2016), approximated with tanh.
static inline f32x16 gelu_tanh(f32x16 x) {
  return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}
