// Copies bytes and computes their NH checksum in one pass; kvtransfer/memory/checksum.py defines it.
//
// Word i of the first half is multiplied by word i of the second, so two streams half a piece apart
// are read and written in parallel. The keys are computed when they are needed: a table of them
// would be as long as the data, and reading it costs more (25 against 21 GB/s on a Zen 5 core).

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum's words are little-endian: numpy does it here"
#endif

namespace {

const uint32_t KEY_SEED = 0x6B767472;
const uint64_t LENGTH_FACTOR = 0x9E3779B97F4A7C15;

// As wide as the CPU's registers.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
const int LANES = VECTOR_BYTES / 4;
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Sums __attribute__((vector_size(VECTOR_BYTES)));

// Chris Wellons' lowbias32, of one word or of a vector of them.
template <class W>
inline W mix(W x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The full products of the lower word of each pair of lanes. With intrinsics: the compiler would
// multiply whole 64-bit lanes, three times slower.
inline Sums lower_products(Sums a, Sums b) {
#if defined(__AVX512F__)
  return (Sums)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Sums)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Sums)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Stores to memory past the caches; `to` is aligned to the vector.
inline void stream(void* to, Words v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)to, (__m256i)v);
#elif defined(__SSE2__)
  _mm_stream_si128((__m128i*)to, (__m128i)v);
#else
  memcpy(to, &v, sizeof v);
#endif
}

inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

enum Store { NONE, CACHED, STREAMED };

template <Store store>
inline void put(char* to, Words v) {
  if (store == CACHED) memcpy(to, &v, sizeof v);
  if (store == STREAMED) stream(to, v);
}

// The sum over `pairs` pairs of words, a multiple of LANES, `half` bytes apart.
template <Store store>
uint64_t sum_of_pairs(char* to, const char* from, int64_t half, int64_t pairs) {
  Words numbers, left, right;
  for (int lane = 0; lane < LANES; lane++) numbers[lane] = 2 * lane;
  Sums even = {}, odd = {};
  for (int64_t at = 0; at < 4 * pairs; at += VECTOR_BYTES) {
    memcpy(&left, from + at, sizeof left);
    memcpy(&right, from + half + at, sizeof right);
    put<store>(to + at, left);
    put<store>(to + half + at, right);
    const Words seeded = numbers ^ KEY_SEED;
    left += mix(seeded);
    right += mix(seeded ^ 1u);
    even += lower_products((Sums)left, (Sums)right);
    odd += lower_products((Sums)left >> 32, (Sums)right >> 32);
    numbers += 2 * LANES;
  }
  even += odd;
  uint64_t sum = 0;
  for (int lane = 0; lane < LANES / 2; lane++) sum += even[lane];
  return sum;
}

// The word at a place that may be beyond the end, where zeros follow.
inline uint32_t word_at(const char* data, int64_t bytes, int64_t at) {
  uint32_t word = 0;
  if (at < bytes) memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
  return word;
}

template <Store store>
uint64_t checksum(char* to, const char* from, int64_t bytes) {
  const int64_t pairs = (bytes + 7) / 8, half = 4 * pairs;
  // Pairs of whole words on both sides.
  const int64_t whole = bytes > half ? (bytes - half) / 4 : 0;
  const int64_t fast = whole - whole % LANES, done = 4 * fast;
  uint64_t sum = bytes * LENGTH_FACTOR + sum_of_pairs<store>(to, from, half, fast);
  if (store == STREAMED) end_streams();
  const char* rest = from;
  if (store != NONE) {
    // The checksum covers what was written; a second read might find changed bytes.
    rest = to;
    const int64_t first = bytes < half ? bytes : half;
    memcpy(to + done, from + done, first - done);
    if (bytes > half + done) memcpy(to + half + done, from + half + done, bytes - half - done);
  }
  for (int64_t i = fast; i < pairs; i++) {
    const uint32_t left = word_at(rest, bytes, 4 * i) + mix((uint32_t)(2 * i) ^ KEY_SEED);
    const uint32_t right =
        word_at(rest, bytes, half + 4 * i) + mix((uint32_t)(2 * i + 1) ^ KEY_SEED);
    sum += (uint64_t)left * right;
  }
  return sum;
}

}  // namespace

extern "C" {

uint64_t kv_checksum(const void* data, int64_t bytes) {
  return checksum<NONE>((char*)data, (const char*)data, bytes);  // writes nothing
}

// The two must not overlap. `streamed`: the copy is not read soon, so it bypasses the caches;
// otherwise it stays in them.
uint64_t kv_copy(void* to, const void* from, int64_t bytes, int streamed) {
  const int64_t half = (bytes + 7) / 8 * 4;
  const bool aligned = ((uintptr_t)to | (uintptr_t)half) % VECTOR_BYTES == 0;
  if (streamed && aligned) return checksum<STREAMED>((char*)to, (const char*)from, bytes);
  return checksum<CACHED>((char*)to, (const char*)from, bytes);
}

// The same for several parts of equal length. Without targets (`to` is null), it only computes
// checksums.
void kv_copy_many(void* const* to, const void* const* from, int64_t parts, int64_t bytes,
                  int streamed, uint64_t* sums) {
  for (int64_t i = 0; i < parts; i++)
    sums[i] = to ? kv_copy(to[i], from[i], bytes, streamed) : kv_checksum(from[i], bytes);
}
}
