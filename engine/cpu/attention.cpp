// See attention.h.

#include "attention.h"

#include <math.h>

#include <algorithm>

#include "linear.h"

namespace attention {
namespace {

const long AHEAD = 32;

// Bytes of a run that are computed together: they stay in the second-level cache until their values
// are used.
const long CACHED_BYTES = 1 << 18;

using kv::Code;

template <int KIND>
inline const Code<KIND>* page(const Problem& p, const Part& part, long position, long kv, long head) {
  const int64_t block = part.table[position / p.block_size];
  return (const Code<KIND>*)p.cache + block * p.block_stride +
         (kv * p.kv_heads + head) * p.block_size * p.dim + position % p.block_size * p.dim;
}

inline const float* scales_of(const Problem& p, const Part& part, long position, long kv, long head) {
  const int64_t block = part.table[position / p.block_size];
  return p.scales + block * p.scale_block_stride + (kv * p.kv_heads + head) * p.block_size +
         position % p.block_size;
}

#ifdef __AVX512F__
// 32 dims of 16 keys, `dim` apart → 16 vectors: the pairs of dims, each of all 16 keys.
template <int KIND>
inline void turn_block(const Code<KIND>* keys, long dim, __m512i* pairs) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = kv::halves<KIND>(keys + i * dim);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + j] holds, in its 128-bit lane l, pair 4 l + j of keys 4 g … 4 g + 3.
  for (int j = 0; j < 4; j++) {
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    pairs[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    pairs[j + 4] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    pairs[j + 8] = _mm512_shuffle_i32x4(high, high2, 0x88);
    pairs[j + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// 32 dims of two slots → two vectors of pairs.
template <int KIND>
inline void pair_block(const Code<KIND>* a, const Code<KIND>* b, __m512i* pairs) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i x = kv::halves<KIND>(a), y = kv::halves<KIND>(b);
  pairs[0] = _mm512_permutex2var_epi16(x, low, y);
  pairs[1] = _mm512_permutex2var_epi16(x, high, y);
}
#endif

// 16 keys [16][dim] → [dim / 2][16] pairs, `stride` pairs apart.
template <int KIND>
inline void turn_keys(const Code<KIND>* keys, long dim, bf16* to, long stride) {
  long d = 0;
#ifdef __AVX512F__
  for (; d + 32 <= dim; d += 32) {
    __m512i pairs[16];
    turn_block<KIND>(keys + d, dim, pairs);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (d / 2 + i) * stride * 2, pairs[i]);
  }
#endif
  for (; d < dim; d += 16)
    for (int i = 0; i < 16; i++) {
      bf16 room[16];
      const bf16* key = kv::halves<KIND>(keys + i * dim + d, room);
      for (int j = 0; j < 16; j += 2) memcpy(to + (d + j) / 2 * stride * 2 + i * 2, key + j, 4);
    }
}

// Converts two slots' values [dim] to pairs, in panels of 32 dims.
template <int KIND>
inline void pair_values(const Code<KIND>* a, const Code<KIND>* b, long dim, bf16* to,
                        long panel_stride) {
  for (long d = 0; d < dim; d += PANEL) {
    bf16* panel = to + d / PANEL * panel_stride;
    const long left = dim - d < PANEL ? dim - d : PANEL;
#ifdef __AVX512F__
    if (left == PANEL) {
      __m512i pairs[2];
      pair_block<KIND>(a + d, b + d, pairs);
      _mm512_storeu_si512(panel, pairs[0]);
      _mm512_storeu_si512(panel + 32, pairs[1]);
      continue;
    }
#endif
    for (long i = 0; i < left; i += 16) {
      bf16 rooms[2][16];
      const bf16* x = kv::halves<KIND>(a + d + i, rooms[0]);
      const bf16* y = kv::halves<KIND>(b + d + i, rooms[1]);
      for (long j = 0; j < 16; j++) panel[2 * (i + j)] = x[j], panel[2 * (i + j) + 1] = y[j];
    }
    for (long i = left; i < PANEL; i++) panel[2 * i] = panel[2 * i + 1] = 0;
  }
}

// Converts one row's scores of a run to weights (bf16), and updates the row's maximum and total.
// `begin` and `end` bound the keys that the row sees within the run. Scores and maximum are in
// powers of two. Returns the factor for the previous sums.
template <int KIND>
inline float weigh(const Problem& p, const Memory& memory, float* scores, long width, long begin,
                   long end, float& high, float* total, bf16* weights) {
  const float to_powers = 1.44269504f;
  const f32x16 none = all(-INFINITY);
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 most = none;
  for (long t = 0; t < width; t += 16) {
    f32x16 s = load<f32x16>(scores + t);
    if (KIND != BF16) s = s * load<f32x16>(memory.key_scales + t);
    if (p.softcap > 0) s = p.softcap * to_powers * tanh_of(s * (p.scale / p.softcap));
    else s = s * (p.scale * to_powers);
    if (t < begin || t + 16 > end) {
      const i32x16 at = lane + (int)t;
      s = (at >= (int)begin) & (at < (int)end) ? s : none;
    }
    store(scores + t, s);
    most = larger(most, s);
  }
  const float before = high, found = largest_of(most);
  high = found > before ? found : before;
  // A row that has seen no key yet has no maximum: all its weights are 0.
  const f32x16 highest = all(high == -INFINITY ? 0.0f : high);
  f32x16 sum = {};
  for (long t = 0; t < width; t += 16) {
    f32x16 weight = power_of_two(load<f32x16>(scores + t) - highest);
    sum += weight;
    if (KIND != BF16) weight = weight * load<f32x16>(memory.value_scales + t);
    store(weights + t, half_of(weight));
  }
  const float factor = before == -INFINITY ? 0.0f : power_of_two(all(before - high))[0];
  store(total, load<f32x16>(total) * factor + sum);
  return factor;
}

// Prefetches keys or values of 16 slots: the next block of a sequence may be anywhere, so the CPU
// cannot predict it. (Always inline: the compiler drops calls of functions that only prefetch.)
template <int KIND>
inline __attribute__((always_inline)) void fetch(const Problem& p, const Part& part, long position,
                                                 long kv, long head) {
  const Code<KIND>* from = page<KIND>(p, part, position, kv, head);
  for (long i = 0; i < 16 * p.dim; i += 64 / (long)sizeof(*from)) __builtin_prefetch(from + i, 0, 3);
}

// Reads the scales of a run, 0 after the last key, and prefetches those of the next run.
inline void take_scales(const Problem& p, const Part& part, long kv_head, long run, long length,
                        Memory& memory) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const long last = part.start + part.count;
  for (long t = 0; t < RUN; t += 16)
    for (long kv = 0; kv < 2; kv++) {
      f32x16 found = {};
      if (t < length) found = load<f32x16>(scales_of(p, part, run + t, kv, kv_head));
      if (t + 16 > length) found = lane + (int)t < (int)length ? found : f32x16{};
      store((kv ? memory.value_scales : memory.key_scales) + t, found);
      if (run + RUN + t < last)
        __builtin_prefetch(scales_of(p, part, run + RUN + t, kv, kv_head), 0, 3);
    }
}

// Keys and values of a run, transposed for the products: [panels of 32 keys][dim / 2][32][2] and
// [panels of 32 dims][slots / 2][32][2]. Entries after the last key are 0.
template <int KIND>
inline void turn(const Problem& p, const Part& part, long kv_head, long run, long length,
                 Memory& memory) {
  const long panels = (p.dim + PANEL - 1) / PANEL, width = (length + PANEL - 1) / PANEL * PANEL;
  static const Code<KIND> zeros[1024] = {};
  const long last = part.start + part.count;
  for (long t = 0; t < width; t += 16) {
    if (run + t + AHEAD < last) {
      fetch<KIND>(p, part, run + t + AHEAD, 0, kv_head);
      fetch<KIND>(p, part, run + t + AHEAD, 1, kv_head);
    }
    bf16* key = memory.keys.data() + t / PANEL * PANEL * p.dim + t % PANEL * 2;
    bf16* value = memory.values.data() + t * PANEL;
    if (t >= length) {
      for (long d = 0; d < p.dim / 2; d++) memset(key + d * PANEL * 2, 0, 64);
      for (long d = 0; d < panels; d++)
        memset(value + d * RUN * PANEL, 0, 16 * PANEL * sizeof(bf16));
      continue;
    }
    turn_keys<KIND>(page<KIND>(p, part, run + t, 0, kv_head), p.dim, key, PANEL);
    const Code<KIND>* values = page<KIND>(p, part, run + t, 1, kv_head);
    for (long i = 0; i < 16; i += 2) {
      const Code<KIND>* a = t + i < length ? values + i * p.dim : zeros;
      const Code<KIND>* b = t + i + 1 < length ? values + (i + 1) * p.dim : zeros;
      pair_values<KIND>(a, b, p.dim, value + i * PANEL, RUN * PANEL);
    }
  }
}

// The queries [rows, dim] of a part that belong to one KV head, and the place of their sums.
struct Rows {
  const Problem& p;
  const Part& part;
  const long kv_head, group, wide;

  Rows(const Problem& problem, const Part& of, long head)
      : p(problem),
        part(of),
        kv_head(head),
        group(problem.heads / problem.kv_heads),
        wide((problem.dim + PANEL - 1) / PANEL * PANEL) {}

  long count() const { return part.count * group; }
  long position(long row) const { return part.start + row / group; }
  long place(long row) const {
    return ((part.first + row / group) * p.heads + kv_head * group + row % group) * p.dim;
  }
  long first_key(long row) const {
    return p.window && position(row) + 1 > p.window ? position(row) + 1 - p.window : 0;
  }
};

// Computes rows `first …` over a run that was transposed.
template <int KIND>
inline void attend_tile(const Rows& rows, long first, long count, long run, long width,
                        Memory& memory) {
  const Problem& p = rows.p;
  // The last row sees the latest keys; with a window, the first row sees the earliest.
  const long seen = rows.position(first + count - 1) + 1 - run;
  if (seen <= 0 || rows.first_key(first) >= run + RUN) return;
  const long most = seen < width ? (seen + PANEL - 1) / PANEL * PANEL : width;
  const bf16* queries = memory.queries.data() + first * p.dim;
  for (long t = 0; t < most; t += PANEL)
    linear::multiply_rows[count](queries, p.dim, memory.keys.data() + t * p.dim, p.dim / 2,
                                 memory.scores.data() + t, RUN, nullptr, 0, false);
  float factors[TILE];
  for (long r = 0; r < count; r++)
    factors[r] = weigh<KIND>(p, memory, memory.scores.data() + r * RUN, most,
                             rows.first_key(first + r) - run, rows.position(first + r) + 1 - run,
                             memory.high[first + r], memory.total.data() + (first + r) * 16,
                             memory.weights.data() + r * RUN);
  float tile[TILE * PANEL];
  for (long d = 0; d < rows.wide; d += PANEL) {
    linear::multiply_rows[count](memory.weights.data(), RUN, memory.values.data() + d * RUN, most / 2,
                                 tile, PANEL, nullptr, 0, false);
    for (long r = 0; r < count; r++) {
      float* sum = memory.sums.data() + (first + r) * rows.wide + d;
      for (int i = 0; i < PANEL; i += 16)
        store(sum + i, load<f32x16>(sum + i) * factors[r] + load<f32x16>(tile + r * PANEL + i));
    }
  }
}

#ifdef __AVX512F__
// A part with a single query, and the KV heads that are computed together.
struct Single {
  const Problem& p;
  const Part& part;
  const long kv_head, heads;

  long first_key() const {
    return p.window && part.start + 1 > p.window ? part.start + 1 - p.window : 0;
  }
  long first_run() const { return first_key() / RUN * RUN; }
  template <int KIND>
  const Code<KIND>* page(long position, long kv, long head) const {
    return attention::page<KIND>(p, part, std::min(position, part.start), kv, kv_head + head);
  }
};

// Prefetches one of 16 parts of 32 dims of 16 slots to the second-level cache. A core can have only
// some requests to memory in flight, and a burst of more makes it wait. So arithmetic and prefetches
// alternate.
template <int KIND>
inline __attribute__((always_inline)) void fetch_part(const Code<KIND>* from, int i) {
  if (i * 64 < 512 * (int)sizeof(*from)) __builtin_prefetch((const char*)from + i * 64, 0, 2);
}

// Computes one run for a single query, with every sum in the same order as `attend_tile`. It works in
// registers: for so few rows, storing the transposed run would cost more than transposing it.
//
// The products with keys prefetch the run's values, and those with values prefetch the keys of run
// `then` of `next`. A first run may be longer than the run before it, so it prefetches its own later
// keys. The heads of a block are adjacent in memory: processors prefetch best in that order.
template <int KIND, int ROWS>
void attend_run(const Single& now, long run, const Single& next, long then, Memory& memory) {
  const Problem& p = now.p;
  const long length = std::min(RUN, now.part.start + 1 - run), width = (length + 15) / 16 * 16;
  const bool first = run == now.first_run();
  for (long t = 0; t < width; t += 16)
    for (long h = 0; h < now.heads; h++) {
      const Code<KIND>* keys = now.page<KIND>(run + t, 0, h);
      const Code<KIND>* values = now.page<KIND>(run + t, 1, h);
      const Code<KIND>* later = first ? now.page<KIND>(run + t + AHEAD, 0, h) : values;
      f32x16 sums[ROWS] = {};
      for (long d = 0; d < p.dim; d += 32) {
        __m512i pairs[16];
        turn_block<KIND>(keys + d, p.dim, pairs);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          fetch_part<KIND>(values + d * 16, i);
          fetch_part<KIND>(later + d * 16, i);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            uint32_t bits;
            memcpy(&bits, memory.queries.data() + (h * ROWS + r) * p.dim + d + 2 * i, 4);
            sums[r] = add_products(sums[r], (u32x16)pairs[i], bits - (u32x16){});
          }
        }
      }
      for (int r = 0; r < ROWS; r++) store(memory.scores.data() + (h * ROWS + r) * RUN + t, sums[r]);
    }
  for (long h = 0; h < now.heads; h++) {
    if (KIND != BF16) take_scales(p, now.part, now.kv_head + h, run, length, memory);
    float factors[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const long row = h * ROWS + r;
      factors[r] = weigh<KIND>(p, memory, memory.scores.data() + row * RUN, width,
                               now.first_key() - run, length, memory.high[row],
                               memory.total.data() + row * 16, memory.weights.data() + row * RUN);
    }
    static const Code<KIND> zeros[PANEL] = {};
    for (long d = 0; d < p.dim; d += PANEL) {
      f32x16 sums[ROWS][2] = {};
      for (long t = 0; t < length; t += 16) {
        const Code<KIND>* values = now.page<KIND>(run + t, 1, h) + d;
        const Code<KIND>* keys = next.page<KIND>(then + t, 0, std::min(h, next.heads - 1)) + d * 16;
        for (long i = 0; i < 16 && t + i < length; i += 2) {
          fetch_part<KIND>(keys, i);
          fetch_part<KIND>(keys, i + 1);
          __m512i pairs[2];
          pair_block<KIND>(values + i * p.dim,
                           t + i + 1 < length ? values + (i + 1) * p.dim : zeros, pairs);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            uint32_t bits;
            memcpy(&bits, memory.weights.data() + (h * ROWS + r) * RUN + t + i, 4);
            const u32x16 weights = bits - (u32x16){};
            sums[r][0] = add_products(sums[r][0], (u32x16)pairs[0], weights);
            sums[r][1] = add_products(sums[r][1], (u32x16)pairs[1], weights);
          }
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2; i++) {
          float* sum = memory.sums.data() + (h * ROWS + r) * p.dim + d + i * 16;
          store(sum, load<f32x16>(sum) * factors[r] + sums[r][i]);
        }
    }
  }
}

typedef void (*AttendRun)(const Single&, long, const Single&, long, Memory&);
template <int KIND>
const AttendRun attend_runs[9] = {
    nullptr,
    attend_run<KIND, 1>, attend_run<KIND, 2>, attend_run<KIND, 3>, attend_run<KIND, 4>,
    attend_run<KIND, 5>, attend_run<KIND, 6>, attend_run<KIND, 7>, attend_run<KIND, 8>};

// Computes the query of a part for its heads.
template <int KIND>
inline void attend_single(const Single& now, const Single& next, Memory& memory) {
  const Problem& p = now.p;
  const long group = p.heads / p.kv_heads, rows = now.heads * group;
  memory.weights.resize(rows * RUN);
  memory.scores.resize(rows * RUN);
  memory.sums.assign(rows * p.dim, 0.0f);
  memory.high.assign(rows, -INFINITY);
  memory.total.assign(rows * 16, 0.0f);
  const long place = (now.part.first * p.heads + now.kv_head * group) * p.dim;
  memory.queries.assign(p.queries + place, p.queries + place + rows * p.dim);
  for (long run = now.first_run(); run <= now.part.start; run += RUN) {
    const bool is_last = run + RUN > now.part.start;
    attend_runs<KIND>[group](now, run, is_last ? next : now, is_last ? next.first_run() : run + RUN,
                             memory);
  }
  for (long r = 0; r < rows; r++) {
    const float share = 1.0f / sum_of(load<f32x16>(memory.total.data() + r * 16));
    for (long d = 0; d < p.dim; d += 16)
      store(p.out + place + r * p.dim + d,
            half_of(load<f32x16>(memory.sums.data() + r * p.dim + d) * share));
  }
}
#endif

// Computes one run for all rows.
template <int KIND>
inline void attend_rows(const Rows& rows, long run, long length, Memory& memory) {
  if (KIND != BF16) take_scales(rows.p, rows.part, rows.kv_head, run, length, memory);
  turn<KIND>(rows.p, rows.part, rows.kv_head, run, length, memory);
  const long width = (length + PANEL - 1) / PANEL * PANEL;
  linear::tiles(rows.count(), [&](long first, long number) {
    attend_tile<KIND>(rows, first, number, run, width, memory);
  });
}

// Computes all queries of a part that belong to one KV head.
template <int KIND>
inline void attend_queries(const Problem& p, const Part& part, long kv_head, Memory& memory) {
  const Rows rows(p, part, kv_head);
  const long count = rows.count(), last = part.start + part.count;
  memory.keys.resize(RUN * p.dim);
  memory.values.resize(RUN * rows.wide);
  memory.weights.resize(TILE * RUN);
  memory.scores.resize(TILE * RUN);
  memory.queries.resize(count * p.dim);
  memory.sums.assign(count * rows.wide, 0.0f);
  memory.high.assign(count, -INFINITY);
  memory.total.assign(count * 16, 0.0f);
  for (long r = 0; r < count; r++)
    memcpy(memory.queries.data() + r * p.dim, p.queries + rows.place(r), p.dim * sizeof(bf16));
  const long from = rows.first_key(0);
  for (long run = from - from % RUN; run < last; run += RUN)
    attend_rows<KIND>(rows, run, std::min(RUN, last - run), memory);
  for (long r = 0; r < count; r++) {
    const float share = 1.0f / sum_of(load<f32x16>(memory.total.data() + r * 16));
    for (long d = 0; d < p.dim; d += 16)
      store(p.out + rows.place(r) + d,
            half_of(load<f32x16>(memory.sums.data() + r * rows.wide + d) * share));
  }
}

// Whether `attend_single` computes a part.
inline bool is_single(const Problem& p, const Part& part) {
#ifdef __AVX512F__
  return part.count == 1 && p.heads / p.kv_heads <= 8 && p.dim % 32 == 0;
#else
  return false;
#endif
}

template <int KIND>
inline void attend(const Problem& p, const Task& task, const Task* next, Memory& memory) {
#ifdef __AVX512F__
  if (is_single(p, *task.part)) {
    const Single now = {p, *task.part, task.kv_head, task.heads};
    const bool known = next && is_single(p, *next->part);
    attend_single<KIND>(now, known ? Single{p, *next->part, next->kv_head, next->heads} : now, memory);
    return;
  }
#endif
  for (long h = 0; h < task.heads; h++) attend_queries<KIND>(p, *task.part, task.kv_head + h, memory);
}

}  // namespace

void divide(long kind, const Problem& p, const std::vector<Part>& parts, long threads,
            std::vector<Task>& tasks) {
  const long bytes = 2 * RUN * p.dim * (kind == BF16 ? sizeof(bf16) : 1);
  long most = std::max<long>(1, CACHED_BYTES / bytes);
  // Several tasks for each thread: threads then end together.
  if (threads > 1) most = std::min(most, (long)parts.size() * p.kv_heads / (4 * threads));
  tasks.clear();
  for (const Part& part : parts) {
    const long heads = is_single(p, part) ? std::clamp<long>(most, 1, p.kv_heads) : 1;
    for (long head = 0; head < p.kv_heads; head += heads)
      tasks.push_back({&part, head, std::min(heads, p.kv_heads - head)});
  }
}

void attend(long kind, const Problem& p, const Task& task, const Task* next, Memory& memory) {
  switch (kind) {
    case INT8: return attend<INT8>(p, task, next, memory);
    case FP8: return attend<FP8>(p, task, next, memory);
    default: return attend<BF16>(p, task, next, memory);
  }
}

}  // namespace attention
