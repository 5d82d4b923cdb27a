// The operations of a target's decoder layer other than its products, for the few rows of a pass.
// The result of a row does not depend on the other rows of the pass.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace qspec {

constexpr std::int64_t LEAST_SHARED = 32768;  // values from which several threads share the rows

// RMS norm of `rows` rows of `width` values, a multiple of LANES.
template <typename T>
void rms_norm(const T* from, const float* weight, T* to, std::int64_t rows, int width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= LEAST_SHARED)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* in = from + row * width;
    T* out = to + row * width;
    Floats sum = Floats{};
    for (int i = 0; i < width; i += LANES) {
      const Floats v = load(in + i);
      sum = fma(v, v, sum);
    }
    const float mean = sum_of(sum) / static_cast<float>(width);
    const float factor = 1.0F / std::sqrt(mean + eps);
    for (int i = 0; i < width; i += LANES) {
      store(out + i, load(in + i) * factor * load(weight + i));
    }
  }
}

// The SiLU of the first `width` values of each row times the other `width`.
template <typename T>
void silu_and_mul(const T* from, T* to, std::int64_t rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= LEAST_SHARED)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* gate = from + row * 2 * width;
    T* out = to + row * width;
    for (int i = 0; i < width; i += LANES) {
      store(out + i, gated(load(gate + i), load(gate + width + i)));
    }
  }
}

// Rotate the first `heads` heads of each row in place, in half-split form. Rows are `stride` values
// apart. `cos_sin` float [rows, dim] has the cosines of all angles, then the sines; half of `dim` is
// a multiple of LANES.
template <typename T>
void rotate(T* rows, std::int64_t count, std::int64_t stride, int heads, int dim,
            const float* cos_sin, int threads) {
  const int half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * heads * dim >= LEAST_SHARED)
  for (std::int64_t row = 0; row < count; ++row) {
    const float* cosines = cos_sin + row * dim;
    T* head = rows + row * stride;
    for (int h = 0; h < heads; ++h, head += dim) {
      for (int i = 0; i < half; i += LANES) {
        const Floats c = load(cosines + i), s = load(cosines + half + i);
        const Floats a = load(head + i), b = load(head + half + i);
        store(head + i, fma(a, c, -(b * s)));
        store(head + half + i, fma(b, c, a * s));
      }
    }
  }
}

// The new tokens of one request: the last `rows` of its `length` positions.
struct Request {
  std::int64_t first;         // its first token in the pass
  int rows;
  int length;
  const std::int32_t* slots;  // [length]: KV slots
  const bool* visible;        // [rows, stride]: whether a new token sees another one
  std::int64_t stride;
};

// One layer's KV, [slots, kv_heads, dim].
template <typename T>
struct Pool {
  T* keys;
  T* values;
};

// Attention of the new tokens of a pass to the positions that they see.
class RowAttention {
 public:
  RowAttention(int heads, int kv_heads, int dim, float scale)
      : kv_heads_(kv_heads), group_(heads / kv_heads), dim_(dim), scale_(scale) {}

  // Later passes over `requests`; the arrays that they name must live as long.
  void begin(std::vector<Request> requests) {
    requests_ = std::move(requests);
    tasks_.clear();
    longest_ = 0;
    for (std::size_t r = 0; r < requests_.size(); ++r) {
      longest_ = std::max(longest_, round(requests_[r].length));
      for (int kv = 0; kv < kv_heads_; ++kv) {
        for (int from = 0; from < requests_[r].rows * group_; from += QUERIES) {
          tasks_.push_back({static_cast<int>(r), kv, from});
        }
      }
    }
  }

  // `query` [tokens, heads, dim], with tokens `stride` values apart; `out` is dense.
  template <typename T>
  void attend(const T* query, std::int64_t stride, Pool<const T> pool, T* out, int threads) {
    const auto count = static_cast<std::int64_t>(tasks_.size());
    const std::size_t room = static_cast<std::size_t>(QUERIES) *
                             static_cast<std::size_t>(longest_ + dim_);
    buffer_.reserve(room * static_cast<std::size_t>(threads));
    // The KV of many requests is not in the caches. Then a thread takes all KV heads of a request, which
    // lie side by side in memory, and fetches them.
    const bool fetches = count >= std::int64_t{2} * kv_heads_ * threads;
    const int share = fetches ? kv_heads_ : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1) schedule(dynamic, share)
    for (std::int64_t i = 0; i < count; ++i) {
      float* own = buffer_.get() + room * static_cast<std::size_t>(omp_get_thread_num());
      run(tasks_[static_cast<std::size_t>(i)], query, stride, pool, fetches, out, own);
    }
  }

 private:
  static constexpr int QUERIES = 32;  // queries of a task, at most
  static constexpr int TILE = 4;      // queries whose sums of scores fit into registers
  static constexpr float NEVER = -std::numeric_limits<float>::max();

  // Queries `from` and up to QUERIES more, of a request and a KV head. Query `i` is head `i %
  // group` of the new token `i / group`.
  struct Task {
    int request, kv, from;
  };

  static int round(int length) { return (length + LANES - 1) / LANES * LANES; }

  template <typename T>
  void run(const Task& task, const T* query, std::int64_t stride, Pool<const T> pool, bool fetches,
           T* out, float* buffer) const {
    const Request& request = requests_[static_cast<std::size_t>(task.request)];
    const int count = std::min(QUERIES, request.rows * group_ - task.from);
    const std::int64_t width = std::int64_t{kv_heads_} * dim_;
    const T* keys = pool.keys + task.kv * dim_;
    const T* values = pool.values + task.kv * dim_;
    const int padded = round(request.length);
    float* scaled = buffer;
    float* scores = buffer + QUERIES * dim_;
    const auto place = [&](int i) {
      const int at = task.from + i;
      return std::pair<std::int64_t, int>(request.first + at / group_,
                                          task.kv * group_ + at % group_);
    };
    for (int i = 0; i < count; ++i) {
      const auto [token, head] = place(i);
      const T* from = query + token * stride + head * dim_;
      for (int d = 0; d < dim_; d += LANES) {
        store(scaled + i * dim_ + d, load(from + d) * scale_);
      }
    }
    for (int p = 0; p < request.length; p += LANES) {
      if (fetches) {
        fetch(request, keys, width, p + LANES);
        fetch(request, values, width, p);
      }
      score(request, keys, width, p, scaled, count, padded, scores);
    }
    for (int i = 0; i < count; ++i) {
      weigh(request, (task.from + i) / group_, scores + i * padded, padded);
    }
    for (int i = 0; i < count; i += AT_ONCE) {
      T* to[AT_ONCE] = {};
      const int tile = std::min(AT_ONCE, count - i);
      for (int q = 0; q < tile; ++q) {
        const auto [token, head] = place(i + q);
        to[q] = out + (token * kv_heads_ * group_ + head) * dim_;
      }
      const float* weights = scores + i * padded;
      with_constant<AT_ONCE>(tile, [&](auto queries) {
        mix<T, queries.value>(request, values, width, weights, padded, to);
      });
    }
  }

  // Fetch one head's KV at the positions `p` to `p + 15` from memory, as far as there are any.
  template <typename T>
  void fetch(const Request& request, const T* kv, std::int64_t width, int p) const {
    const int end = std::min(p + LANES, request.length);
    for (; p < end; ++p) {
      const auto* at = reinterpret_cast<const char*>(kv + request.slots[p] * width);
      for (std::size_t line = 0; line < static_cast<std::size_t>(dim_) * sizeof(T); line += 64) {
        __builtin_prefetch(at + line);
      }
    }
  }

  // The scores of all queries at the positions `p` to `p + 15`.
  template <typename T>
  void score(const Request& request, const T* keys, std::int64_t width, int p, const float* scaled,
             int count, int padded, float* scores) const {
    const T* key[LANES];
    for (int j = 0; j < LANES; ++j) {
      key[j] = keys + request.slots[std::min(p + j, request.length - 1)] * width;
    }
    alignas(64) float turned[HEAD_STEP * LANES];
    for (int block = 0; block < dim_; block += HEAD_STEP) {
      for (int d = 0; d < HEAD_STEP; d += LANES) {
        Floats square[LANES];
        for (int j = 0; j < LANES; ++j) square[j] = load(key[j] + block + d);
        transpose(square);
        for (int j = 0; j < LANES; ++j) store(turned + (d + j) * LANES, square[j]);
      }
      int i = 0;
      for (; i + TILE <= count; i += TILE) {
        dots<TILE>(turned, scaled + i * dim_ + block, scores + i * padded + p, padded, block == 0);
      }
      for (; i < count; ++i) {
        dots<1>(turned, scaled + i * dim_ + block, scores + i * padded + p, padded, block == 0);
      }
    }
  }

  template <int COUNT>
  void dots(const float* turned, const float* scaled, float* scores, int padded, bool first) const {
    Floats even[COUNT], odd[COUNT];
    for (int q = 0; q < COUNT; ++q) {
      even[q] = first ? Floats{} : load(scores + q * padded);
      odd[q] = Floats{};
    }
    for (int d = 0; d < HEAD_STEP; d += 2) {
      const Floats a = load(turned + d * LANES), b = load(turned + (d + 1) * LANES);
      for (int q = 0; q < COUNT; ++q) {
        even[q] = fma(broadcast(scaled[q * dim_ + d]), a, even[q]);
        odd[q] = fma(broadcast(scaled[q * dim_ + d + 1]), b, odd[q]);
      }
    }
    for (int q = 0; q < COUNT; ++q) store(scores + q * padded, even[q] + odd[q]);
  }

  // Replace the scores of new token `row` by their softmax.
  void weigh(const Request& request, int row, float* scores, int padded) const {
    const bool* sees = request.visible + row * request.stride;
    for (int j = 0; j < request.rows; ++j) {
      if (!sees[j]) scores[request.length - request.rows + j] = NEVER;
    }
    std::fill(scores + request.length, scores + padded, NEVER);
    const Floats never = broadcast(NEVER);
    Floats top = never;
    for (int p = 0; p < padded; p += LANES) top = larger(top, load(scores + p));
    const float most = largest(top);
    Floats total = Floats{};
    for (int p = 0; p < padded; p += LANES) {
      const Floats s = load(scores + p);
      const Floats weight = s != never ? exponential(s - most) : Floats{};
      store(scores + p, weight);
      total += weight;
    }
    const float share = 1.0F / sum_of(total);
    for (int p = 0; p < padded; p += LANES) {
      store(scores + p, load(scores + p) * share);
    }
  }

  // The sums of all values times `weights`, for COUNT queries.
  template <typename T, int COUNT>
  void mix(const Request& request, const T* values, std::int64_t width, const float* weights,
           int padded, T* const* to) const {
    for (int block = 0; block < dim_; block += BLOCK) {
      Floats sum[COUNT][VECTORS];
      for (int q = 0; q < COUNT; ++q) {
        for (int v = 0; v < VECTORS; ++v) sum[q][v] = Floats{};
      }
      for (int p = 0; p < request.length; ++p) {
        const T* value = values + request.slots[p] * width + block;
        Floats part[VECTORS];
        for (int v = 0; v < VECTORS; ++v) part[v] = load(value + v * LANES);
        for (int q = 0; q < COUNT; ++q) {
          const Floats weight = broadcast(weights[q * padded + p]);
          for (int v = 0; v < VECTORS; ++v) sum[q][v] = fma(weight, part[v], sum[q][v]);
        }
      }
      for (int q = 0; q < COUNT; ++q) {
        for (int v = 0; v < VECTORS; ++v) store(to[q] + block + v * LANES, sum[q][v]);
      }
    }
  }

  int kv_heads_, group_, dim_;
  float scale_;
  std::vector<Request> requests_;
  std::vector<Task> tasks_;
  int longest_ = 0;
  Buffer<float> buffer_;
};

// Copy rows of `width` values, `stride` apart, to the slots of a pool.
template <typename T>
void store_rows(const T* rows, std::int64_t count, std::int64_t stride, std::int64_t width,
                const std::int64_t* slots, T* pool) {
  for (std::int64_t row = 0; row < count; ++row) {
    std::copy_n(rows + row * stride, width, pool + slots[row] * width);
  }
}

}  // namespace qspec
