// Draws the tokens of one step. engine/sampling/sampling.py is the reference, and the tokens are
// the same. Two things make it fast.
//
// Noise: a token can win only if its score plus its noise reaches the best sum found so far. An
// upper bound of the noise takes no logarithm (`noise_bound`). So the noise itself is computed, in
// double precision like the reference, only for the few tokens that the bound lets through.
//
// top_p: nothing is sorted. A token is drawn from all, and one pass then finds how much probability
// comes before it. The allowed tokens are a prefix of the order. So if the winner among all tokens
// is allowed, it is the winner among the allowed ones. If it is not, no token after it is allowed
// either, and the draw is repeated among those before it. On average that takes at most 1 + ln(1 /
// top_p) draws.

#include <float.h>
#include <math.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "lanes.h"
#include "threads.h"

// How one row is drawn. Its token ids are consecutive in `ids`: those of the prompt, those of the
// output, forbidden ones, biased ones, and the only allowed ones (none: all are allowed). The
// biases are in `biases`. A set bit of `mask` allows its token.
struct Draw {
  const uint32_t* mask;  // null: all are allowed
  uint64_t seed;
  int64_t choice, position, top_k;
  int64_t ids, prompt, output, forbidden, biased, allowed;  // an offset, five counts
  int64_t biases;                                           // an offset
  float temperature, top_p, min_p;                     // temperature 0: the most likely token
  float presence, frequency, repetition;
};

namespace {

const long LANES = 16;
const float INF = INFINITY;

// Bit i: a_i >= b_i, if neither is NaN.
inline uint32_t at_least(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  const i32x16 found = reaches(a, b);
  uint64_t pairs[8], some = 0;
  memcpy(pairs, &found, sizeof found);
  for (uint64_t pair : pairs) some |= pair;
  uint32_t bits = 0;
  if (some)
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(found[i] & 1) << i;
  return bits;
#endif
}

// Chris Wellons' lowbias32: see engine/sampling/noise.py.
template <class U>
inline U lowbias32(U x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct Keys {
  uint32_t first, second;

  Keys(uint64_t seed, uint32_t choice, uint32_t position) {
    const uint32_t golden = 0x9E3779B9u, low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t a = lowbias32(low ^ lowbias32(position + golden));
    const uint32_t b = lowbias32(high ^ lowbias32(choice * golden + position));
    first = lowbias32(a ^ b);
    second = lowbias32(b + golden);
  }

  template <class U>
  U bits(U token_ids) const {
    return lowbias32(lowbias32(token_ids ^ first) + second);
  }
};

// Standard Gumbel noise of a token's bits.
inline double gumbel(uint32_t bits) { return -log(-log(((double)bits + 0.5) / 4294967296.0)); }

// At least `gumbel`. With u = (bits + 0.5) / 2^32 and v = 1 - u: -log(u) >= v, so the noise is at
// most -log(v), and v >= h / 2^31 where h is the upper 31 bits of the complement. The bits of a
// float, read as an integer, are 2^23 (127 + log2 of it) or less, by up to 0.0861 * 2^23. So ln 2
// (158 - bits of h / 2^23) is a bound. Where u is near 1, as for winners, it is too large by some
// 0.1 (by 0.6 for the last few bits), at u = 1/2 by 0.33, and below that by more: noise is negative
// there. h = 0 gives 109, more than the largest noise, 22.9. The rounding errors (h to 24 bits; the
// integer, at most 1.3e9, to 24 bits; the constants; the products) are less than 3e-5, which the
// 1e-4 covers.
inline f32x16 noise_bound(u32x16 bits) {
  const f32x16 h = __builtin_convertvector((i32x16)(~bits >> 1), f32x16);
  return (109.517254f + 1e-4f) - __builtin_convertvector((i32x16)h, f32x16) * 8.26295832e-8f;
}

// Memory from which vectors can be loaded without crossing a cache line.
struct alignas(64) Line {
  float at[LANES];
};

inline long lines(long count) { return (count + LANES - 1) / LANES; }

// The scores to draw from, without NaN, in the order of their tokens, padded with -inf.
struct Pool {
  const float* scores;
  const int32_t* ids;  // null: a score's place is its token
  long count;          // a multiple of LANES

  long token(long place) const { return ids ? ids[place] : place; }
};

// A place in the order: larger scores come before it, and on a tie the lower tokens.
struct Limit {
  float score;
  long place;
};

const i32x16 COUNTING = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

class Row {
 public:
  // Draws the token of one row of logits, which do not change.
  int64_t draw(const float* logits, long vocab, const Draw& how, const int32_t* ids,
               const float* biases) {
    how_ = &how;
    vocab_ = vocab;
    scores_.resize(lines(vocab));
    const bool adjusted = adjust(logits, ids + how.ids, biases + how.biases);
    return choose(adjusted ? scores() : logits);
  }

 private:
  float* scores() { return scores_.data()->at; }

  // Applies penalties, biases, forbidden and allowed tokens and the mask to a copy of the logits;
  // returns false if there are none. Each step rounds to fp32 where the reference does.
  bool adjust(const float* logits, const int32_t* ids, const float* biases) {
    const Draw& h = *how_;
    if (!(h.prompt || h.output || h.forbidden || h.biased || h.allowed || h.mask)) return false;
    memcpy(scores(), logits, vocab_ * sizeof(float));
    counts_.resize(vocab_);
    if (h.repetition != 1.0f) penalise_seen(ids, h.prompt + h.output);
    ids += h.prompt;
    if (h.presence != 0.0f || h.frequency != 0.0f) penalise_output(ids, h.output);
    ids += h.output;
    for (long i = 0; i < h.biased; i++)
      if (float* score = score_of(ids[h.forbidden + i])) *score += biases[i];
    for (long i = 0; i < h.forbidden; i++)
      if (float* score = score_of(ids[i])) *score = -INF;
    if (h.allowed) keep(ids + h.forbidden + h.biased, h.allowed);
    if (h.mask) forbid(h.mask);
    return true;
  }

  // Sets -inf for each token except these.
  void keep(const int32_t* ids, long count) {
    found_.assign(count, -INF);
    for (long i = 0; i < count; i++)
      if (const float* score = score_of(ids[i])) found_[i] = *score;
    std::fill(scores(), scores() + vocab_, -INF);
    for (long i = 0; i < count; i++)
      if (float* score = score_of(ids[i])) *score = found_[i];
  }

  // Sets -inf for each token whose bit is 0. Most words forbid all of their tokens or none.
  void forbid(const uint32_t* mask) {
    for (long i = 0; i < vocab_; i += LANES) {
      const uint32_t allowed = mask[i / 32] >> i % 32 & 0xFFFF;
      if (allowed == 0xFFFF) continue;
      // After the vocabulary there is padding, which has room for whole vectors.
      const i32x16 keep = -(((i32x16){} + (int32_t)allowed) >> COUNTING & 1);
      const i32x16 score = load<i32x16>(scores() + i);
      store(scores() + i, (f32x16)((score & keep) | ((i32x16)all(-INF) & ~keep)));
    }
  }

  // Null for an id that is no token of this model.
  float* score_of(int32_t id) { return id >= 0 && id < vocab_ ? scores() + id : nullptr; }

  void penalise_seen(const int32_t* ids, long count) {
    const float penalty = how_->repetition;
    for (long i = 0; i < count; i++) {
      float* score = score_of(ids[i]);
      if (score && !counts_[ids[i]]++) *score = *score > 0 ? *score / penalty : *score * penalty;
    }
    for (long i = 0; i < count; i++)
      if (score_of(ids[i])) counts_[ids[i]] = 0;
  }

  void penalise_output(const int32_t* ids, long count) {
    for (long i = 0; i < count; i++)
      if (score_of(ids[i])) counts_[ids[i]]++;
    for (long i = 0; i < count; i++) {
      float* score = score_of(ids[i]);
      if (!score || !counts_[ids[i]]) continue;
      // Through double, where the product is exact, so that it is rounded to fp32 before the sum.
      const float product = (float)((double)how_->frequency * counts_[ids[i]]);
      *score -= how_->presence + product;
      counts_[ids[i]] = 0;
    }
  }

  int64_t choose(const float* logits) {
    const bool greedy = how_->temperature == 0.0f;
    if (!divide(logits, greedy ? 1.0f : how_->temperature)) return first_broken();
    // If the largest are infinite, noise does not change that, and no filter removes the first.
    if (greedy || fabsf(most_) == INF) return first_largest();
    const float floor = how_->min_p > 0.0f ? std::min(most_, most_ + logf(how_->min_p)) : -FLT_MAX;
    Pool pool = {scores(), nullptr, (long)scores_.size() * LANES};
    if (how_->top_k > 0 && how_->top_k < vocab_) pool = largest(pool, how_->top_k);
    const Keys keys(how_->seed, (uint32_t)how_->choice, (uint32_t)how_->position);
    const Limit all = {-INF, -1};
    if (how_->top_p >= 1.0f) return pool.token(winner(pool, keys, floor, all));
    return nucleus(pool, keys, floor);
  }

  // Writes logits over the temperature to scores_, and finds the largest; false if one is NaN.
  bool divide(const float* logits, float temperature) {
    const f32x16 by = all(temperature);
    f32x16 most[2] = {all(-INF), all(-INF)};
    i32x16 sound = COUNTING | -1;
    for (long i = 0; i < vocab_; i += LANES) {
      f32x16 v = all(-INF);
      if (i + LANES <= vocab_) v = load<f32x16>(logits + i);
      else memcpy(&v, logits + i, (vocab_ - i) * sizeof(float));
      if (temperature != 1.0f) v = v / by;
      store(scores() + i, v);
      f32x16& largest = most[i / LANES % 2];
      largest = larger(v, largest);
      sound &= reaches(v, v);
    }
    most_ = largest_of(larger(most[0], most[1]));
    int every = -1;
    for (int i = 0; i < LANES; i++) every &= sound[i];
    return every;
  }

  // The reference's argmax treats NaN as the largest, and its filters keep the first one.
  int64_t first_broken() {
    return std::find_if(scores(), scores() + vocab_, [](float v) { return v != v; }) - scores();
  }

  int64_t first_largest() { return std::find(scores(), scores() + vocab_, most_) - scores(); }

  // The `count` largest scores and their tokens; on a tie the lower tokens.
  Pool largest(const Pool& from, long count) {
    const float least = least_of_largest(from, count);
    // Fewer than that are finite; the others are never drawn.
    if (least == -INF) return from;
    long equal = count - std::count_if(found_.begin(), found_.begin() + count,
                                       [&](float v) { return v > least; });
    kept_.assign(lines(count), Line{});
    ids_.assign(kept_.size() * LANES, 0);
    float* to = kept_.data()->at;
    std::fill(to, to + kept_.size() * LANES, -INF);
    long at = 0;
    for (long i = 0; i < from.count; i += LANES) {
      uint32_t some = at_least(load<f32x16>(from.scores + i), all(least));
      for (; some; some &= some - 1) {
        const long place = i + __builtin_ctz(some);
        if (from.scores[place] == least && --equal < 0) continue;
        to[at] = from.scores[place];
        ids_[at++] = (int32_t)from.token(place);
      }
    }
    return {to, ids_.data(), (long)kept_.size() * LANES};
  }

  // The score that `count - 1` others precede; found_ begins with those. -inf: there are fewer.
  float least_of_largest(const Pool& from, long count) {
    const size_t room = 2 * count + 256;
    float least = -INF;
    found_.clear();
    const auto cut = [&] {
      std::nth_element(found_.begin(), found_.begin() + count - 1, found_.end(),
                       std::greater<float>());
      least = found_[count - 1];
    };
    for (long i = 0; i < from.count; i += LANES) {
      const f32x16 scores = load<f32x16>(from.scores + i);
      uint32_t some = at_least(scores, all(least));
      if (!some) continue;
      for (; some; some &= some - 1) {
        const float score = from.scores[i + __builtin_ctz(some)];
        if (score > least) found_.push_back(score);
      }
      if (found_.size() < room) continue;
      cut();
      found_.resize(count);
    }
    if ((long)found_.size() < count) return -INF;
    cut();
    return least;
  }

  // The place of the largest sum of score and noise, among the scores that are at least `floor` and
  // come before `limit`; the first on a tie.
  long winner(const Pool& pool, const Keys& keys, float floor, Limit limit) const {
    const f32x16 lowest = all(std::max(floor, limit.score));
    double best = -INFINITY;
    f32x16 to_reach = all(-FLT_MAX);
    long place = 0;
    for (long i = 0; i < pool.count; i += LANES) {
      const f32x16 scores = load<f32x16>(pool.scores + i);
      uint32_t some = at_least(scores, lowest);
      if (!some) continue;
      const i32x16 ids = pool.ids ? load<i32x16>(pool.ids + i) : COUNTING + (int32_t)i;
      const u32x16 bits = keys.bits((u32x16)ids);
      some &= at_least(scores + noise_bound(bits), to_reach);
      for (; some; some &= some - 1) {
        const int lane = __builtin_ctz(some);
        const float score = scores[lane];
        if (score == limit.score && i + lane >= limit.place) continue;
        const double value = (double)score + gumbel(bits[lane]);
        if (value <= best) continue;
        best = value;
        place = i + lane;
        // A float that is at most `best`: rounding is monotonic, so a sum that reaches one in exact
        // arithmetic also reaches the other when rounded.
        to_reach = all((float)best - fabsf((float)best) * FLT_EPSILON);
      }
    }
    return place;
  }

  // The draw with top_p. The reference sums fp32 probabilities in another order. A token can be
  // allowed here and not there only if the probability before it is within some 1e-6 of top_p.
  int64_t nucleus(const Pool& pool, const Keys& keys, float floor) const {
    const double within = how_->top_p * mass(pool, 0, pool.count, -INF);
    if (within <= 1.0)  // of which the likeliest token is 1
      return pool.token(std::find(pool.scores, pool.scores + pool.count, most_) - pool.scores);
    for (Limit limit = {-INF, -1};;) {
      const long place = winner(pool, keys, floor, limit);
      limit = {pool.scores[place], place};
      const double before = mass_before(pool, limit);
      if (before == 0.0 || before < within) return pool.token(place);
    }
  }

  // The sum of exp(score - most_) over everything before the limit; on a tie, the earlier tokens.
  double mass_before(const Pool& pool, Limit limit) const {
    const long line = limit.place / LANES * LANES;
    double total = mass(pool, 0, line, limit.score) +
                   mass(pool, line + LANES, pool.count, nextafterf(limit.score, INF));
    for (long i = line; i < line + LANES; i++) {
      const float score = pool.scores[i];
      if (score > limit.score || (score == limit.score && i < limit.place))
        total += exp((double)score - most_);
    }
    return total;
  }

  // The same over scores of at least `least`: in fp32 over a few, then in double.
  double mass(const Pool& pool, long from, long to, float least) const {
    const f32x16 lowest = all(least), most = all(most_);
    const long run = 16 * LANES;
    double total = 0.0;
    for (long start = from; start < to; start += run) {
      f32x16 sums = {};
      for (long i = start; i < std::min(start + run, to); i += LANES) {
        const f32x16 scores = load<f32x16>(pool.scores + i);
        if (!at_least(scores, lowest)) continue;
        const i32x16 shares = (i32x16)exp_of(scores - most);
        sums += (f32x16)(shares & reaches(scores, lowest));
      }
      total += sum_of(sums);
    }
    return total;
  }

  const Draw* how_ = nullptr;
  long vocab_ = 0;
  float most_ = 0.0f;
  std::vector<Line> scores_, kept_;
  std::vector<int32_t> ids_, counts_;
  std::vector<float> found_;
};

}  // namespace

extern "C" {

void* baton_sampler_new() { return new Threads; }
void baton_sampler_free(void* sampler) { delete (Threads*)sampler; }

// Draws one token for each of `rows` rows of logits [vocab], `stride` floats apart.
void baton_sampler_draw(void* sampler, const float* logits, int64_t stride, int64_t vocab,
                        int64_t rows, const Draw* draws, const int32_t* ids, const float* biases,
                        int64_t threads, int64_t* tokens) {
  ((Threads*)sampler)->run(rows, (int)threads, [&](long i) {
    static thread_local Row row;
    tokens[i] = row.draw(logits + i * stride, vocab, draws[i], ids, biases);
  });
}
}
