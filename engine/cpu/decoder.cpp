// One step of a decoder: embedding, layers, logits. The plain-torch model in engine/model/model.py
// is the reference. This code computes the same for bf16 weights, without a call through Python for
// each of the thousand small operations of a step.
//
// The residual stream and all sums are fp32; inputs of matrix products are bf16.

#include <float.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "threads.h"

enum QkNorm { QK_NONE = 0, QK_HEAD = 1, QK_FULL = 2 };
enum Activation { SILU = 0, GELU_TANH = 1 };

struct Layer {
  const float *attention_norm, *query_norm, *key_norm, *attention_post_norm, *mlp_norm,
      *mlp_post_norm;     // [hidden] or as wide as their input; null: none
  const float* feature_norm;  // for an EAGLE layer, which takes [embedding, feature]; else null
  int64_t residual_normed;    // whether that layer's residual stream begins with this norm
  const float* rope;      // [context][2][rotary / 2], or null: no rotation
  int64_t rotary, window;  // window 0: all keys
  Matrix query, key, value, output;
  int64_t experts;  // 0: one dense MLP, the first of gate, up, down
  Matrix router;
  const Matrix *gate, *up, *down;
};

struct Model {
  int64_t layers, hidden, heads, kv_heads, dim, vocab, qk_norm, activation, experts_per_token,
      experts_normalized;
  float eps, attention_scale, attention_softcap, logits_softcap, embedding_scale;
  const bf16* embedding;  // [vocab, hidden]
  const float* norm;
  Matrix head;
  Matrix combine;  // for an EAGLE head: makes a feature from several layers' inputs
  const Layer* layer;
};

// The tokens of one step, one sequence after another.
struct Step {
  int64_t tokens, rows, outputs, threads;
  const int64_t *token_ids, *positions;  // [tokens]
  const int32_t *blocks, *slots;         // [tokens]: where each token's keys and values go
  const int32_t *first, *count, *start, *table;  // [rows]; table: offsets into tables
  const int32_t* tables;
  const int64_t* output;  // [outputs]: tokens whose logits are wanted
  const float* embedded;  // [tokens, hidden] in place of the table's rows, or null
  float* logits;          // [outputs, vocab], or null
  int64_t* best;          // [outputs]: the most likely token, the lowest on a tie; or null
  int64_t* layers_done;   // set as layers store the keys and values of all tokens
  const float* features;  // [tokens, hidden] for an EAGLE layer, or null
  const float* combined;  // [tokens, combine.inputs] in place of features, or null
  float* hidden;          // [tokens, hidden_layers, hidden]: inputs of these layers, or null
  const int64_t* hidden_layer;  // [hidden_layers]; the number of layers: the last one's output
  int64_t hidden_layers;
};

namespace {

class Decoder {
 public:
  Decoder(const Model& model, const Cache& cache) : model_(model), cache_(cache) {
    layers_.assign(model.layer, model.layer + model.layers);
  }

  void share(const Board& board, bool yields) { threads_.share(board, yields); }

  void run(const Step& step) {
    step_ = &step;
    tokens_ = step.tokens;
    outputs_alone_ = false;
    make_room();
    embed();
    for (const Layer& layer : layers_) {
      threads_.is_alive();
      tell(&layer - layers_.data());
      attend(layer);
      if (!tokens()) return;
      if (layer.experts) mix(layer);
      else feed(layer);
    }
    tell(model_.layers);
    finish();
  }

 private:
  long tokens() const { return tokens_; }

  template <class Body>
  void parallel(long count, Body&& body) {
    threads_.run(count, (int)step_->threads, body);
  }

  // Single rows are cheap: only many of them are worth several threads.
  template <class Body>
  void over_rows(long rows, Body&& body) {
    const long part = 16;
    if (rows <= part) {
      for (long i = 0; i < rows; i++) body(i);
      return;
    }
    parallel((rows + part - 1) / part, [&](long n) {
      for (long i = n * part; i < std::min(rows, (n + 1) * part); i++) body(i);
    });
  }

  void make_room() {
    const Model& m = model_;
    const size_t wide = m.heads * m.dim, narrow = m.kv_heads * m.dim, n = tokens();
    residual_.resize(n * m.hidden);
    normed_.resize(n * m.hidden * (step_->features || step_->combined ? 2 : 1));
    projected_.resize(n * std::max<size_t>(wide + 2 * narrow, m.hidden));
    queries_.resize(n * wide);
    attended_.resize(n * wide);
  }

  void embed() {
    const long hidden = model_.hidden;
    float* rows = residual_.data();
    if (step_->features || step_->combined) {
      embedded_.resize(tokens() * hidden);
      rows = embedded_.data();
      if (step_->combined) combine();
      else memcpy(residual_.data(), step_->features, tokens() * hidden * sizeof(float));
    }
    over_rows(tokens(), [&](long t) {
      float* to = rows + t * hidden;
      if (step_->embedded) {
        memcpy(to, step_->embedded + t * hidden, hidden * sizeof(float));
      } else {
        const bf16* from = model_.embedding + step_->token_ids[t] * hidden;
        for (long i = 0; i < hidden; i++) to[i] = float_of(from[i]);
      }
      if (model_.embedding_scale != 1.0f)
        for (long i = 0; i < hidden; i++) to[i] *= model_.embedding_scale;
    });
  }

  // Computes the features of an EAGLE layer, with which its residual stream begins.
  void combine() {
    const long hidden = model_.hidden, wide = model_.combine.inputs;
    gathered_.resize(tokens() * wide);
    over_rows(tokens(), [&](long t) {
      const float* from = step_->combined + t * wide;
      for (long i = 0; i < wide; i++) gathered_[t * wide + i] = half_of(from[i]);
    });
    multiply(&model_.combine, 1, gathered_.data(), wide, tokens(),
             [&](int, long t, long n, long width, const float* values) {
               memcpy(residual_.data() + t * hidden + n, values, width * sizeof(float));
             });
  }

  // Root mean square (Zhang & Sennrich, 2019): the factor for a row.
  float factor_of(const float* x, long width) const {
    f32x16 sums = {};
    long i = 0;
    for (; i + 16 <= width; i += 16) {
      const f32x16 v = load<f32x16>(x + i);
      sums += v * v;
    }
    float total = sum_of(sums);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / width + model_.eps);
  }

  void norm_to_half(const float* x, const float* weight, long width, bf16* to) const {
    const float factor = weight ? factor_of(x, width) : 1.0f;
    long i = 0;
    for (; i + 16 <= width; i += 16) {
      f32x16 v = load<f32x16>(x + i) * factor;
      if (weight) v = v * load<f32x16>(weight + i);
      store(to + i, half_of(v));
    }
    for (; i < width; i++) to[i] = half_of(x[i] * factor * (weight ? weight[i] : 1.0f));
  }

  void norm_in_place(float* x, const float* weight, long width) const {
    const float factor = factor_of(x, width);
    for (long i = 0; i < width; i++) x[i] = x[i] * factor * weight[i];
  }

  void norm_rows(const float* weight) {
    const long hidden = model_.hidden;
    over_rows(tokens(), [&](long t) {
      norm_to_half(residual_.data() + t * hidden, weight, hidden, normed_.data() + t * hidden);
    });
  }

  // Computes the input of an EAGLE layer's attention: the normed embedding and the normed feature.
  void norm_pairs(const Layer& layer) {
    const long hidden = model_.hidden;
    over_rows(tokens(), [&](long t) {
      bf16* to = normed_.data() + t * 2 * hidden;
      norm_to_half(embedded_.data() + t * hidden, layer.attention_norm, hidden, to);
      float* feature = residual_.data() + t * hidden;
      norm_to_half(feature, layer.feature_norm, hidden, to + hidden);
      if (layer.residual_normed) norm_in_place(feature, layer.feature_norm, hidden);
    });
  }

  // Copies the input of a layer, if it was requested.
  void tell(long layer) {
    const long hidden = model_.hidden, count = step_->hidden_layers;
    for (long n = 0; n < count; n++)
      if (step_->hidden_layer[n] == layer)
        for (long t = 0; t < tokens(); t++)
          memcpy(step_->hidden + (t * count + n) * hidden, residual_.data() + t * hidden,
                 hidden * sizeof(float));
  }

  // Number of adjacent panels that a thread takes: few enough that threads end together, and that a
  // helper can leave within some tens of microseconds.
  long panels_at_once(long panels, long rows) const {
    if (step_->threads == 1) return panels;
    return std::max<long>(1, std::min<long>(panels / (step_->threads * 6), 512 / rows));
  }

  // Products of rows [rows, stride] with a matrix: `each(m, n, count, values)` gets up to 32
  // adjacent outputs n … of row m, bias added. Panels are divided in runs.
  template <class Each>
  void multiply(const Matrix* matrices, int number, const bf16* x, long stride, long rows,
                Each&& each) {
    long panels = 0;
    const bf16* inputs[3];
    for (int i = 0; i < number; i++) {
      panels += matrices[i].panels();
      inputs[i] = ordered(matrices[i], x, stride, rows, ordered_[i]);
    }
    const long run = panels_at_once(panels, rows);
    parallel((panels + run - 1) / run, [&](long part) {
      for (long i = part * run; i < std::min(panels, (part + 1) * run); i++) {
        long panel = i;
        int which = 0;
        while (panel >= matrices[which].panels()) panel -= matrices[which++].panels();
        const Matrix& w = matrices[which];
        multiply_panel(w, panel, inputs[which], stride, rows, [&](long m, long count, float* tile) {
          const long n = panel * PANEL, width = std::min<long>(PANEL, w.outputs - n);
          for (long r = 0; r < count; r++) {
            float* values = tile + r * PANEL;
            if (w.bias)
              for (long c = 0; c < width; c++) values[c] += w.bias[n + c];
            each(which, m + r, n, width, values);
          }
        });
      }
    });
  }

  // Adds a block's output to the residual stream. If a norm comes between, it is stored for that.
  auto adder(const float* post_norm) {
    float* to = post_norm ? projected_.data() : residual_.data();
    const long hidden = model_.hidden;
    return [to, hidden, post_norm](int, long t, long n, long width, const float* values) {
      float* at = to + t * hidden + n;
      if (post_norm) memcpy(at, values, width * sizeof(float));
      else
        for (long i = 0; i < width; i++) at[i] += values[i];
    };
  }

  // Rows in the order of a weight's columns (GPTQ's act-order); `x` itself if the order is plain.
  const bf16* ordered(const Matrix& w, const bf16* x, long stride, long rows,
                      std::vector<bf16>& memory) {
    if (!w.columns) return x;
    memory.resize(std::max<size_t>(memory.size(), rows * stride));
    over_rows(rows, [&](long m) {
      for (long k = 0; k < w.inputs; k++) memory[m * stride + k] = x[m * stride + w.columns[k]];
    });
    return memory.data();
  }

  void attend(const Layer& layer) {
    const Model& m = model_;
    const long hidden = m.hidden, wide = m.heads * m.dim, narrow = m.kv_heads * m.dim;
    const long row = wide + 2 * narrow;
    const bool paired = layer.feature_norm;
    if (paired) norm_pairs(layer);
    else norm_rows(layer.attention_norm);
    const long offset[3] = {0, wide, wide + narrow};
    const Matrix matrices[3] = {layer.query, layer.key, layer.value};
    multiply(matrices, 3, normed_.data(), paired ? 2 * hidden : hidden, tokens(),
             [&](int which, long t, long n, long width, const float* values) {
               memcpy(projected_.data() + t * row + offset[which] + n, values, width * sizeof(float));
             });
    over_rows(tokens(), [&](long t) { place(layer, t, projected_.data() + t * row); });
    // Other threads send what is there while the rest is computed.
    std::atomic_ref(*step_->layers_done).store(&layer - layers_.data() + 1);
    if (&layer == &layers_.back()) keep_outputs();
    if (!tokens()) return;
    look_back(layer);
    multiply(&layer.output, 1, attended_.data(), wide, tokens(), adder(layer.attention_post_norm));
    add_normed(layer.attention_post_norm);
  }

  void add_normed(const float* post_norm) {
    if (!post_norm) return;
    const long hidden = model_.hidden;
    over_rows(tokens(), [&](long t) {
      float* from = projected_.data() + t * hidden;
      norm_in_place(from, post_norm, hidden);
      for (long i = 0; i < hidden; i++) residual_[t * hidden + i] += from[i];
    });
  }

  // Rotates a token's query for the attention, and writes its key and value to the cache.
  void place(const Layer& layer, long t, float* projected) {
    const Model& m = model_;
    const long dim = m.dim, wide = m.heads * dim, narrow = m.kv_heads * dim;
    if (m.qk_norm == QK_FULL) {
      norm_in_place(projected, layer.query_norm, wide);
      norm_in_place(projected + wide, layer.key_norm, narrow);
    } else if (m.qk_norm == QK_HEAD) {
      for (long h = 0; h < m.heads; h++) norm_in_place(projected + h * dim, layer.query_norm, dim);
      for (long h = 0; h < m.kv_heads; h++)
        norm_in_place(projected + wide + h * dim, layer.key_norm, dim);
    }
    if (layer.rope) {
      const float* table = layer.rope + step_->positions[t] * layer.rotary;
      for (long h = 0; h < m.heads + m.kv_heads; h++) rotate(projected + h * dim, table, layer.rotary);
    }
    halve(projected, wide, queries_.data() + t * wide);
    keep(layer, t, projected + wide);
  }

  // Writes a token's keys and values [K/V, head, dim] to the cache.
  void keep(const Layer& layer, long t, const float* projected) {
    const Cache& c = cache_;
    const long dim = model_.dim, number = &layer - layers_.data();
    const long block = step_->blocks[t] * c.block_stride + number * c.layer_stride;
    const long scales = step_->blocks[t] * c.scale_block_stride + number * c.scale_layer_stride;
    for (long h = 0; h < 2 * model_.kv_heads; h++) {
      const float* from = projected + h * dim;
      const long place = h * c.block_size + step_->slots[t], at = block + place * dim;
      if (c.kind == BF16) halve(from, dim, (bf16*)c.data + at);
      else
        c.scales[scales + place] = c.kind == INT8
                                       ? kv::encode<INT8>(from, dim, (uint8_t*)c.data + at)
                                       : kv::encode<FP8>(from, dim, (uint8_t*)c.data + at);
    }
  }

  static void rotate(float* x, const float* table, long rotary) {
    const long half = rotary / 2;
    for (long i = 0; i < half; i++) {
      const float a = x[i], b = x[half + i], cosine = table[i], sine = table[half + i];
      x[i] = a * cosine - b * sine;
      x[half + i] = b * cosine + a * sine;
    }
  }

  static void halve(const float* from, long count, bf16* to) {
    for (long i = 0; i < count; i += 16) store(to + i, half_of(load<f32x16>(from + i)));
  }

  // In the last layer, once all keys and values are in the cache, only the outputs' rows matter.
  void keep_outputs() {
    const Step& step = *step_;
    const int64_t* asked = step.hidden_layer + step.hidden_layers;
    if (std::find(step.hidden_layer, asked, model_.layers) != asked) return;
    if (step.outputs == tokens() || !std::is_sorted(step.output, step.output + step.outputs)) return;
    const long hidden = model_.hidden, wide = model_.heads * model_.dim;
    for (long r = 0; r < step.outputs; r++) {
      const long from = step.output[r];
      memmove(residual_.data() + r * hidden, residual_.data() + from * hidden, hidden * sizeof(float));
      memmove(queries_.data() + r * wide, queries_.data() + from * wide, wide * sizeof(bf16));
    }
    tokens_ = step.outputs;
    outputs_alone_ = true;
  }

  // Finds adjacent queries that process their sequence's keys together.
  void divide() {
    const Step& step = *step_;
    const long most = std::max<long>(1, QUERY_ROWS / (model_.heads / model_.kv_heads));
    parts_.clear();
    for (long r = 0, output = 0; r < step.rows; r++) {
      const int32_t* table = step.tables + step.table[r];
      const long first = step.first[r], count = step.count[r], start = step.start[r];
      if (!outputs_alone_)
        for (long at = 0; at < count; at += most)
          parts_.push_back({first + at, std::min(most, count - at), start + at, table});
      else
        for (; output < step.outputs && step.output[output] < first + count; output++)
          parts_.push_back({output, 1, start + step.output[output] - first, table});
    }
  }

  void look_back(const Layer& layer) {
    const Model& m = model_;
    const Cache& c = cache_;
    const long number = &layer - layers_.data(), width = c.kind == BF16 ? sizeof(bf16) : 1;
    const attention::Problem problem = {
        queries_.data(),
        attended_.data(),
        (const char*)c.data + number * c.layer_stride * width,
        c.scales ? c.scales + number * c.scale_layer_stride : nullptr,
        c.block_stride,
        c.scale_block_stride,
        c.block_size,
        m.heads,
        m.kv_heads,
        m.dim,
        layer.window,
        m.attention_scale,
        m.attention_softcap};
    divide();
    attention::divide(c.kind, problem, parts_, step_->threads, tasks_);
    // The last parts of a prompt see the most keys, so they go first: threads then end together.
    std::reverse(tasks_.begin(), tasks_.end());
    const long count = (long)tasks_.size(), threads = parts_.size() > 1 ? step_->threads : 1;
    parallel(count, [&](long i) {
      static thread_local attention::Memory memory;
      attention::attend(c.kind, problem, tasks_[i], i + threads < count ? &tasks_[i + threads] : nullptr,
                        memory);
    });
  }

  f32x16 activate(f32x16 x) const { return model_.activation == SILU ? silu(x) : gelu_tanh(x); }

  // Computes act(gate(x)) * up(x) for rows of x → inner [rows, inner].
  void gate(const Matrix& gate, const Matrix& up, const bf16* x, long rows, bf16* inner) {
    const long hidden = model_.hidden, width = gate.outputs, panels = gate.panels();
    const bf16* to_gate = ordered(gate, x, hidden, rows, ordered_[0]);
    const bf16* to_up = ordered(up, x, hidden, rows, ordered_[1]);
    const long run = panels_at_once(panels, rows);
    parallel((panels + run - 1) / run, [&](long part) {
      static thread_local std::vector<float> gated;
      gated.resize(std::max<size_t>(gated.size(), rows * PANEL));
      for (long i = part * run; i < std::min(panels, (part + 1) * run); i++) {
        multiply_panel(gate, i, to_gate, hidden, rows, [&](long m, long count, float* tile) {
          add_bias(gate, i, count, tile);
          memcpy(gated.data() + m * PANEL, tile, count * PANEL * sizeof(float));
        });
        multiply_panel(up, i, to_up, hidden, rows, [&](long m, long count, float* tile) {
          add_bias(up, i, count, tile);
          for (long r = 0; r < count; r++) {
            bf16 halves[PANEL];
            for (int c = 0; c < PANEL; c += 16) {
              const f32x16 g = load<f32x16>(gated.data() + (m + r) * PANEL + c);
              store(halves + c, half_of(activate(g) * load<f32x16>(tile + r * PANEL + c)));
            }
            const long n = i * PANEL;
            memcpy(inner + (m + r) * width + n, halves,
                   std::min<long>(PANEL, width - n) * sizeof(bf16));
          }
        });
      }
    });
  }

  static void add_bias(const Matrix& w, long panel, long count, float* tile) {
    if (!w.bias) return;
    const long n = panel * PANEL, width = std::min<long>(PANEL, w.outputs - n);
    for (long r = 0; r < count; r++)
      for (long c = 0; c < width; c++) tile[r * PANEL + c] += w.bias[n + c];
  }

  void feed(const Layer& layer) {
    const long inner = layer.gate->outputs;
    norm_rows(layer.mlp_norm);
    inner_.resize(tokens() * inner);
    gate(*layer.gate, *layer.up, normed_.data(), tokens(), inner_.data());
    multiply(layer.down, 1, inner_.data(), inner, tokens(), adder(layer.mlp_post_norm));
    add_normed(layer.mlp_post_norm);
  }

  // A mixture of experts. Each token's row goes through the experts that its router chose, and the
  // tokens of one expert are computed together. Results are added in the order of the choice.
  void mix(const Layer& layer) {
    const Model& m = model_;
    const long hidden = m.hidden, chosen = m.experts_per_token, n = tokens(), experts = layer.experts;
    norm_rows(layer.mlp_norm);
    scores_.resize(n * experts);
    multiply(&layer.router, 1, normed_.data(), hidden, n,
             [&](int, long t, long at, long width, const float* values) {
               memcpy(scores_.data() + t * experts + at, values, width * sizeof(float));
             });
    choices_.resize(n * chosen);
    shares_.resize(n * chosen);
    for (long t = 0; t < n; t++) choose(t, experts);
    std::vector<std::vector<long>> places(experts);
    for (long i = 0; i < n * chosen; i++) places[choices_[i]].push_back(i);
    mixed_.resize(n * chosen * hidden);
    for (long e = 0; e < experts; e++) {
      const std::vector<long>& mine = places[e];
      if (mine.empty()) continue;
      const long rows = (long)mine.size(), inner = layer.gate[e].outputs;
      gathered_.resize(rows * hidden);
      for (long r = 0; r < rows; r++)
        memcpy(gathered_.data() + r * hidden, normed_.data() + mine[r] / chosen * hidden,
               hidden * sizeof(bf16));
      inner_.resize(std::max<size_t>(inner_.size(), rows * inner));
      gate(layer.gate[e], layer.up[e], gathered_.data(), rows, inner_.data());
      multiply(layer.down + e, 1, inner_.data(), inner, rows,
               [&](int, long r, long at, long width, const float* values) {
                 memcpy(mixed_.data() + mine[r] * hidden + at, values, width * sizeof(float));
               });
    }
    over_rows(n, [&](long t) {
      float* to = (layer.mlp_post_norm ? projected_.data() : residual_.data()) + t * hidden;
      if (layer.mlp_post_norm) std::fill(to, to + hidden, 0.0f);
      for (long c = 0; c < chosen; c++) {
        const float share = shares_[t * chosen + c];
        const float* from = mixed_.data() + (t * chosen + c) * hidden;
        for (long i = 0; i < hidden; i++) to[i] += share * from[i];
      }
    });
    add_normed(layer.mlp_post_norm);
  }

  // The most likely experts of a token, the lowest first on a tie, and their shares.
  void choose(long t, long experts) {
    const long chosen = model_.experts_per_token;
    float* scores = scores_.data() + t * experts;
    // NaN scores have no order: those experts come last.
    for (long e = 0; e < experts; e++) scores[e] = std::isnan(scores[e]) ? -FLT_MAX : scores[e];
    const float most = *std::max_element(scores, scores + experts);
    float total = 0;
    for (long e = 0; e < experts; e++) total += scores[e] = expf(scores[e] - most);
    std::vector<int> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](int a, int b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    if (model_.experts_normalized) {
      total = 0;
      for (long c = 0; c < chosen; c++) total += scores[order[c]];
    }
    for (long c = 0; c < chosen; c++) {
      choices_[t * chosen + c] = order[c];
      shares_[t * chosen + c] = scores[order[c]] / total;
    }
  }

  // The first place of the largest of a panel's values.
  static long place_of_largest(const float* values, long width) {
    long place = 0;
    if (width < PANEL) {
      for (long i = 1; i < width; i++) place = values[i] > values[place] ? i : place;
      return place;
    }
    const float largest = largest_of(larger(load<f32x16>(values), load<f32x16>(values + 16)));
    while (place < PANEL && values[place] != largest) place++;
    return place < PANEL ? place : 0;  // NaN equals nothing
  }

  void finish() {
    const long hidden = model_.hidden, rows = step_->outputs, vocab = model_.vocab;
    if (!rows) return;
    for (long r = 0; r < rows; r++)
      norm_to_half(residual_.data() + (outputs_alone_ ? r : step_->output[r]) * hidden, model_.norm,
                   hidden, normed_.data() + r * hidden);
    const long panels = model_.head.panels();
    best_.resize(rows * panels);
    where_.resize(rows * panels);
    const float cap = model_.logits_softcap;
    multiply(&model_.head, 1, normed_.data(), hidden, rows,
             [&](int, long r, long n, long width, float* values) {
               if (cap > 0)
                 for (long i = 0; i < width; i++) values[i] = cap * tanhf(values[i] / cap);
               if (step_->logits) memcpy(step_->logits + r * vocab + n, values, width * sizeof(float));
               const long most = place_of_largest(values, width);
               best_[r * panels + n / PANEL] = values[most];
               where_[r * panels + n / PANEL] = n + most;
             });
    if (!step_->best) return;
    for (long r = 0; r < rows; r++) {
      const float* best = best_.data() + r * panels;
      step_->best[r] = where_[r * panels + (std::max_element(best, best + panels) - best)];
    }
  }

  // Query rows of one part: enough to make transposing the keys cheap in comparison.
  static const long QUERY_ROWS = 192;

  const Model model_;
  const Cache cache_;
  std::vector<Layer> layers_;
  Threads threads_;
  const Step* step_ = nullptr;
  long tokens_ = 0;  // rows that are still computed
  bool outputs_alone_ = false;  // whether only the outputs' rows are left
  std::vector<float> residual_, embedded_, projected_, scores_, shares_, mixed_, best_;
  std::vector<bf16> ordered_[3];
  std::vector<bf16> normed_, queries_, attended_, inner_, gathered_;
  std::vector<int> choices_;
  std::vector<int64_t> where_;
  std::vector<attention::Part> parts_;
  std::vector<attention::Task> tasks_;
};

}  // namespace

extern "C" {

// The model's tensors and the cache must outlive the decoder; the structs are copied.
void* baton_decoder_new(const Model* model, const Cache* cache) { return new Decoder(*model, *cache); }
void baton_decoder_free(void* decoder) { delete (Decoder*)decoder; }
// Call it before a step: `lines` is the board, or null; see board.h.
void baton_decoder_share(void* decoder, void* lines, int64_t count, int64_t mine, int64_t cores,
                         int64_t yields) {
  ((Decoder*)decoder)->share({(Line*)lines, count, mine, cores}, yields);
}
void baton_decoder_run(void* decoder, const Step* step) { ((Decoder*)decoder)->run(*step); }
}
