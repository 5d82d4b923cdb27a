// The layers of a Llama model with int8 weights: one pass over new tokens of any KV rows.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "product.h"

namespace qspec {

struct Shape {
  int hidden;
  int heads;
  int kv_heads;
  int head_dim;
  float eps;  // epsilon of the RMS norms
};

template <typename KV>
struct Layer {
  std::shared_ptr<PackedInt8> qkv, out, gate_up, down;
  const float *input_norm, *post_norm;
  KV *keys, *values;  // [slots, kv_heads, head_dim]
};

// The new tokens of a pass. The tokens of one KV row are in order, and the pool has the KV of all
// earlier tokens of the row.
struct Tokens {
  int count;
  const std::int64_t* positions;
  const std::int64_t* slots;  // KV slot of each token
  const std::int64_t* rows;   // row of `table` of each token
  const std::int32_t* table;  // [.., stride]: KV slot of each position, new tokens included
  std::int64_t stride;
};

template <typename KV>
class Decoder {
 public:
  // `cos_sin` float [positions, head_dim]: the cosines of all angles, then the sines.
  Decoder(Shape shape, std::vector<Layer<KV>> layers, const float* final_norm, const float* cos_sin)
      : shape_(shape), layers_(std::move(layers)), final_norm_(final_norm), cos_sin_(cos_sin) {
    const int heads = shape.heads, dim = shape.head_dim;
    check_range("heads", heads, 1, MOST_INPUTS);
    check_range("kv_heads", shape.kv_heads, 1, heads);
    check_range("cos_sin.shape[1] (head_dim)", dim, HEAD_STEP, MOST_INPUTS / heads);
    check_multiple("cos_sin.shape[1] (head_dim)", dim, HEAD_STEP);
    check_range("len(final_norm) (hidden)", shape.hidden, LANES, MOST_INPUTS);
    check_multiple("len(final_norm) (hidden)", shape.hidden, LANES);
    check_multiple("heads", heads, shape.kv_heads);
    for (std::size_t at = 0; at < layers_.size(); ++at) {
      const Layer<KV>& layer = layers_[at];
      const std::string name = "layers[" + std::to_string(at) + "]: ";
      const int inner = layer.down->inputs();
      check_shape(name + "qkv", *layer.qkv, qkv_width(), shape.hidden);
      check_shape(name + "out", *layer.out, shape.hidden, heads * dim);
      check_multiple(name + "the inputs of down", inner, LANES);
      check_shape(name + "down", *layer.down, shape.hidden, inner);
      check_shape(name + "gate_up", *layer.gate_up, 2 * inner, shape.hidden);
      widest_ = std::max(widest_, inner);
    }
  }

  // Replace `hidden` [tokens, hidden] by the output of the final norm. Activations have `digits` 8-bit
  // digits, 1 or 2.
  void forward(float* hidden, const Tokens& tokens, int digits, int threads) {
    const int n = tokens.count;
    normed_.reserve(size_of(n, shape_.hidden));
    qkv_.reserve(size_of(n, qkv_width()));
    mixed_.reserve(size_of(n, shape_.heads * shape_.head_dim));
    gate_up_.reserve(size_of(n, 2 * widest_));
    for (const Layer<KV>& layer : layers_) {
      const int inner = layer.down->inputs();
      norm(hidden, layer.input_norm, normed_.get(), n);
      multiply(*layer.qkv, normed_.get(), qkv_.get(), n, digits, threads, false);
      for (int t = 0; t < n; ++t) rotate_and_store(layer, tokens, t);
      attend_all(layer, tokens, threads);
      multiply(*layer.out, mixed_.get(), hidden, n, digits, threads, true);
      norm(hidden, layer.post_norm, normed_.get(), n);
      multiply(*layer.gate_up, normed_.get(), gate_up_.get(), n, digits, threads, false);
      for (int t = 0; t < n; ++t) gate(gate_up_.get() + size_of(t, 2 * inner), inner, t);
      multiply(*layer.down, gate_up_.get(), hidden, n, digits, threads, true);
    }
    norm(hidden, final_norm_, hidden, n);
  }

 private:
  static void check_multiple(const std::string& name, int value, int factor) {
    check(value % factor == 0, [&] {
      return name + " is " + std::to_string(value) + ", but must be a multiple of " +
             std::to_string(factor);
    });
  }

  static void check_shape(const std::string& name, const PackedInt8& weight, int outputs,
                          int inputs) {
    check(weight.outputs() == outputs && weight.inputs() == inputs, [&] {
      return name + " is " + of_shape(weight.outputs(), weight.inputs()) + ", but must be " +
             of_shape(outputs, inputs);
    });
  }

  static std::string of_shape(int outputs, int inputs) {
    return "[" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]";
  }

  static std::size_t size_of(int rows, int width) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(width);
  }

  int qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }

  void multiply(const PackedInt8& weight, const float* x, float* y, int rows, int digits,
                int threads, bool add) {
    digits_.assign(x, rows, weight.inputs(), digits, weight.most_of_digit());
    weight.multiply(digits_, y, add, threads);
  }

  // RMS norm; `to` may equal `from`.
  void norm(const float* from, const float* weight, float* to, int rows) const {
    const int width = shape_.hidden;
    for (int row = 0; row < rows; ++row, from += width, to += width) {
      Floats sum = Floats{};
      for (int i = 0; i < width; i += LANES) {
        const Floats v = load(from + i);
        sum = fma(v, v, sum);
      }
      const float mean = sum_of(sum) / static_cast<float>(width);
      const float factor = 1.0F / std::sqrt(mean + shape_.eps);
      for (int i = 0; i < width; i += LANES) {
        store(to + i, load(from + i) * factor * load(weight + i));
      }
    }
  }

  // Rotate a token's queries and keys by its position, scale the queries, and store its KV.
  void rotate_and_store(const Layer<KV>& layer, const Tokens& tokens, int t) {
    const int dim = shape_.head_dim, half = dim / 2;
    float* head = qkv_.get() + size_of(t, qkv_width());
    const float* cosines = cos_sin_ + tokens.positions[t] * dim;
    const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
    for (int h = 0; h < shape_.heads + shape_.kv_heads; ++h, head += dim) {
      for (int i = 0; i < half; i += LANES) {
        const Floats c = load(cosines + i), s = load(cosines + half + i);
        const Floats a = load(head + i), b = load(head + half + i);
        Floats first = fma(a, c, -(b * s));
        Floats second = fma(b, c, a * s);
        if (h < shape_.heads) {
          first *= scale;
          second *= scale;
        }
        store(head + i, first);
        store(head + half + i, second);
      }
    }
    const int width = shape_.kv_heads * dim;
    const float* keys = qkv_.get() + size_of(t, qkv_width()) + shape_.heads * dim;
    const std::int64_t at = tokens.slots[t] * width;
    for (int i = 0; i < width; i += LANES) {
      store(layer.keys + at + i, load(keys + i));
      store(layer.values + at + i, load(keys + width + i));
    }
  }

  void attend_all(const Layer<KV>& layer, const Tokens& tokens, int threads) {
    const int dim = shape_.head_dim, group = shape_.heads / shape_.kv_heads;
    const std::int64_t longest =
        *std::max_element(tokens.positions, tokens.positions + tokens.count) + 1;
    const auto room = static_cast<std::size_t>((longest + LANES - 1) / LANES * LANES * AT_ONCE);
    scores_.reserve(room * static_cast<std::size_t>(threads));
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int t = 0; t < tokens.count; ++t) {
      for (int kv = 0; kv < shape_.kv_heads; ++kv) {
        const Cache<KV> cache{layer.keys + kv * dim, layer.values + kv * dim,
                              std::int64_t{shape_.kv_heads} * dim,
                              tokens.table + tokens.rows[t] * tokens.stride,
                              static_cast<int>(tokens.positions[t]) + 1};
        attend(cache, qkv_.get() + size_of(t, qkv_width()) + kv * group * dim, group, dim,
               scores_.get() + room * static_cast<std::size_t>(omp_get_thread_num()),
               mixed_.get() + size_of(t, shape_.heads * dim) + kv * group * dim);
      }
    }
  }

  // Multiply the SiLU of the first half by the second. In `gate_up_` the result is row `t` of width
  // `inner`, which never overlaps the input of a later token.
  void gate(const float* gate_up, int inner, int t) {
    float* to = gate_up_.get() + size_of(t, inner);
    for (int i = 0; i < inner; i += LANES) {
      store(to + i, gated(load(gate_up + i), load(gate_up + inner + i)));
    }
  }

  Shape shape_;
  std::vector<Layer<KV>> layers_;
  const float* final_norm_;
  const float* cos_sin_;
  int widest_ = 0;  // largest inner width of the layers, which may differ
  Digits digits_;
  Buffer<float> normed_, qkv_, mixed_, gate_up_, scores_;
};

}  // namespace qspec
