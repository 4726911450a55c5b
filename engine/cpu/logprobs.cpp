// Log probabilities of tokens; engine/sampling/logprobs.py is the reference.
//
// Two passes over a row of logits find its largest logit and the most likely tokens, and then the
// sum of all exponentials. A row's numbers depend only on the row, bit for bit.

#include <math.h>

#include <algorithm>
#include <vector>

#include "lanes.h"

namespace {

const long LANES = 16;

struct Scored {
  float score;
  int32_t id;
};

f32x16 numbers_at(const float* logits, long vocab, long i) {
  if (i + LANES <= vocab) return load<f32x16>(logits + i);
  f32x16 v = all(-INFINITY);
  memcpy(&v, logits + i, (vocab - i) * sizeof(float));
  return v;
}

// Finds the `count` largest, the largest first and the lower token first on a tie. Returns the
// largest of all.
float likeliest(const float* logits, long vocab, long count, std::vector<Scored>& best) {
  best.clear();
  f32x16 most = all(-INFINITY);
  float least = -INFINITY;
  for (long i = 0; i < vocab; i += LANES) {
    const f32x16 v = numbers_at(logits, vocab, i);
    most = larger(v, most);
    if (!count || ((long)best.size() == count && !(largest_of(v) > least))) continue;
    for (long lane = 0; lane < std::min(LANES, vocab - i); lane++) {
      const Scored found = {v[lane], (int32_t)(i + lane)};
      if ((long)best.size() == count) {
        if (!(found.score > least)) continue;
        best.pop_back();
      }
      const auto after = [](const Scored& a, const Scored& b) { return a.score > b.score; };
      best.insert(std::upper_bound(best.begin(), best.end(), found, after), found);
      least = best.back().score;
    }
  }
  return largest_of(most);
}

// The logarithm of the sum of all exponentials: in fp32 over a few, then in double.
double log_sum(const float* logits, long vocab, float most) {
  const long run = 16 * LANES;
  double total = 0.0;
  for (long start = 0; start < vocab; start += run) {
    f32x16 sums = {};
    for (long i = start; i < std::min(start + run, vocab); i += LANES) {
      // Values too small for a float count as e^-87; all of a vocabulary together is then
      // negligible.
      sums += exp_of(numbers_at(logits, vocab, i) - all(most));
    }
    total += sum_of(sums);
  }
  return (double)most + log(total);
}

}  // namespace

// For each of `rows` places: the row of logits, the token there, and the number of most likely
// tokens wanted, at most `width`. Writes the token's log probability, and [rows, width] of the most
// likely tokens and theirs.
extern "C" void baton_logprobs(const float* logits, int64_t stride, int64_t vocab, int64_t rows,
                               const int64_t* row, const int64_t* token, const int64_t* wanted,
                               int64_t width, float* logprob, int32_t* top_ids, float* top) {
  std::vector<Scored> best;
  for (int64_t n = 0; n < rows; n++) {
    const float* at = logits + row[n] * stride;
    const float most = likeliest(at, vocab, std::min(wanted[n], vocab), best);
    const double whole = log_sum(at, vocab, most);
    logprob[n] = (float)((double)at[token[n]] - whole);
    for (size_t i = 0; i < best.size(); i++) {
      top_ids[n * width + i] = best[i].id;
      top[n * width + i] = (float)((double)best[i].score - whole);
    }
  }
}
