// Attention of query tokens over the paged KV cache, in bf16 with fp32 sums. A query is a token of
// one sequence; those of a prompt's chunk share their sequence's table.
//
// The cache is [block, layer, K/V, head, slot, dim]: a head's keys in a block lie one after another.
// All query heads of a KV head go through its keys together. Scores are kept, so that the softmax is
// the plain one: maximum, exponentials, sum.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <vector>

#include "cpu_lanes.h"

namespace {

// e^x for x <= 0, to about one unit in the last place: 2^n * p(f) with x = (n + f) ln 2 and the
// polynomial of Cephes' expf.
inline __m512 exp_of_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, f), f, _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

struct Problem {
  const bf16* queries;    // [queries, heads, dim]
  const bf16* cache;      // the layer's part of the cache's first block
  bf16* out;              // [queries, heads, dim]
  const int64_t* tables;  // a query's begins table_stride after that of the one before
  const int64_t* lengths;  // [queries]: how many keys each attends to
  long table_stride, heads, kv_heads, dim, block_size, block_stride;
  float scale;
};

inline const bf16* page(const Problem& p, long query, long position, long kv, long head) {
  const int64_t block = p.tables[query * p.table_stride + position / p.block_size];
  return p.cache + block * p.block_stride + (kv * p.kv_heads + head) * p.block_size * p.dim;
}

// Scores of 16 keys, which follow one another, with one query.
inline __m512 score(const bf16* keys, const bf16* query, long dim) {
  __m512 sums[16];
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  for (long d = 0; d < dim; d += 32) {
    const __m512bh q = load_bf16(query + d);
    for (int i = 0; i < 16; i++)
      sums[i] = _mm512_dpbf16_ps(sums[i], load_bf16(keys + i * dim + d), q);
  }
  return add_lanes(sums);
}

// Turns `length` scores into weights that add up to 1; what lies behind them becomes 0.
void softmax(float* scores, long length) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  __m512 most = none;
  for (long t = 0; t < length; t += 16) {
    const __mmask16 mask = length - t >= 16 ? 0xffff : (1u << (length - t)) - 1;
    const __m512 x = _mm512_mask_loadu_ps(none, mask, scores + t);
    _mm512_storeu_ps(scores + t, x);
    most = _mm512_max_ps(most, x);
  }
  const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  __m512 sums = _mm512_setzero_ps();
  for (long t = 0; t < length; t += 16) {
    const __mmask16 mask = length - t >= 16 ? 0xffff : (1u << (length - t)) - 1;
    const __m512 difference = _mm512_sub_ps(_mm512_loadu_ps(scores + t), highest);
    const __m512 x = _mm512_maskz_mov_ps(mask, exp_of_negative(difference));
    _mm512_storeu_ps(scores + t, x);
    sums = _mm512_add_ps(sums, x);
  }
  const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sums));
  for (long t = 0; t < length; t += 16)
    _mm512_storeu_ps(scores + t, _mm512_mul_ps(_mm512_loadu_ps(scores + t), share));
}

// Adds the values of up to 16 slots, weighed, to `sums` [dim].
inline void weigh(const bf16* values, const float* weights, long count, long dim, float* sums) {
  for (long d = 0; d < dim; d += 16) {
    __m512 sum = _mm512_loadu_ps(sums + d);
    for (long i = 0; i < count; i++) {
      const __m256i half = _mm256_loadu_si256((const __m256i*)(values + i * dim + d));
      const __m512 value =
          _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[i]), value, sum);
    }
    _mm512_storeu_ps(sums + d, sum);
  }
}

// Queries that share a table and follow one another go through the keys together, so that a page is
// read once for all of them. Each attends to its own number of keys.
void attend(const Problem& p, long first, long count, long kv_head, std::vector<float>& memory) {
  const long group = p.heads / p.kv_heads, rows = count * group;
  long longest = 0;
  for (long i = 0; i < count; i++)
    if (p.lengths[first + i] > longest) longest = p.lengths[first + i];
  const long stride = (longest + 15) / 16 * 16;
  memory.resize(rows * (stride + p.dim));
  float* scores = memory.data();
  float* sums = scores + rows * stride;
  for (long i = 0; i < rows * p.dim; i++) sums[i] = 0.0f;
  const __m512 scale = _mm512_set1_ps(p.scale);
  for (long t = 0; t < longest; t += 16) {
    const bf16* keys = page(p, first, t, 0, kv_head) + t % p.block_size * p.dim;
    for (long r = 0; r < rows; r++) {
      const long query = first + r / group, head = kv_head * group + r % group;
      if (t >= p.lengths[query]) continue;
      const __m512 found = score(keys, p.queries + (query * p.heads + head) * p.dim, p.dim);
      _mm512_storeu_ps(scores + r * stride + t, _mm512_mul_ps(found, scale));
    }
  }
  for (long r = 0; r < rows; r++) softmax(scores + r * stride, p.lengths[first + r / group]);
  for (long t = 0; t < longest; t += 16) {
    const bf16* values = page(p, first, t, 1, kv_head) + t % p.block_size * p.dim;
    for (long r = 0; r < rows; r++) {
      const long left = p.lengths[first + r / group] - t;
      if (left <= 0) continue;
      weigh(values, scores + r * stride + t, left < 16 ? left : 16, p.dim, sums + r * p.dim);
    }
  }
  for (long r = 0; r < rows; r++) {
    bf16* out = p.out + ((first + r / group) * p.heads + kv_head * group + r % group) * p.dim;
    for (long d = 0; d < p.dim; d += 16)
      _mm256_storeu_si256((__m256i*)(out + d),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums + r * p.dim + d)));
  }
}

const long TOGETHER = 8;

}  // namespace

// dim is a multiple of 32 and block_size one of 16; block_stride counts elements.
extern "C" void baton_attend(const void* queries, const void* cache, void* out,
                             const int64_t* tables, const int64_t* lengths, long count,
                             long table_stride, long heads, long kv_heads, long dim, long block_size,
                             long block_stride, float scale, int threads) {
  const Problem p = {(const bf16*)queries, (const bf16*)cache, (bf16*)out, tables,     lengths,
                     table_stride,         heads,              kv_heads,   dim,        block_size,
                     block_stride,         scale};
  const long together = table_stride ? 1 : TOGETHER;
  const long parts = (count + together - 1) / together;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> memory;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < parts * kv_heads; i++) {
      const long first = i / kv_heads * together;
      attend(p, first, count - first < together ? count - first : together, i % kv_heads, memory);
    }
  }
}
