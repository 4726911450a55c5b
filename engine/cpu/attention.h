// Attention over the paged KV cache: FlashAttention's running softmax (Dao et al., 2022) with bf16
// products and fp32 sums.
//
// Keys are processed in runs of 128, counted from the sequence's first token. Scores, weights and
// sums of a row depend only on that row. A prompt in one piece, in chunks, and a single query of a
// decode step give the same bits.
//
// If the cache holds codes (KIND), they are converted to bf16 for the products. A key's scale
// multiplies its score, a value's scale its weight before that is rounded to bf16.

#pragma once

#include <vector>

#include "kv_codes.h"

namespace attention {

const long RUN = 128;

struct Problem {
  const bf16* queries;  // [tokens, heads, dim]
  bf16* out;            // [tokens, heads, dim]
  const void* cache;    // the layer's part of the first block
  const float* scales;  // of its codes, or null
  long block_stride, scale_block_stride, block_size;
  long heads, kv_heads, dim, window;
  float scale, softcap;
};

// Adjacent queries of one sequence: tokens `first …` of the batch, `start …` of the sequence.
struct Part {
  long first, count, start;
  const int32_t* table;
};

// What a thread computes at a time: all queries of a part that belong to `heads` KV heads.
struct Task {
  const Part* part;
  long kv_head, heads;
};

struct Memory {
  std::vector<bf16> keys, values, weights, queries;
  std::vector<float> sums, high, total, scores;
  float key_scales[RUN], value_scales[RUN];  // of a run's codes
};

// Divides the parts into tasks, in the order of the parts; `kind` is the cache's.
void divide(long kind, const Problem& p, const std::vector<Part>& parts, long threads,
            std::vector<Task>& tasks);

// Computes a task. `next` is the most likely next one of this thread, or null: its first keys are
// prefetched.
void attend(long kind, const Problem& p, const Task& task, const Task* next, Memory& memory);

}  // namespace attention
