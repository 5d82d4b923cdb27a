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
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < width; i += LANES) {
      const __m512 v = load(in + i);
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    const float mean = _mm512_reduce_add_ps(sum) / static_cast<float>(width);
    const __m512 factor = _mm512_set1_ps(1.0F / std::sqrt(mean + eps));
    for (int i = 0; i < width; i += LANES) {
      store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(in + i), factor), load(weight + i)));
    }
  }
}

// The SiLU of the first `width` values of each row times the other `width`.
template <typename T>
void silu_and_mul(const T* from, T* to, std::int64_t rows, int width, int threads) {
  const __m512 one = _mm512_set1_ps(1.0F);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= LEAST_SHARED)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* gate = from + row * 2 * width;
    T* out = to + row * width;
    for (int i = 0; i < width; i += LANES) {
      const __m512 g = load(gate + i);
      const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), g));
      store(out + i,
            _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), load(gate + width + i)));
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
        const __m512 c = load(cosines + i), s = load(cosines + half + i);
        const __m512 a = load(head + i), b = load(head + half + i);
        store(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
      }
    }
  }
}

// Transpose a square of 16 x 16 floats.
inline void transpose(__m512 (&row)[LANES]) {
  __m512 pair[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pair[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  // row[4g + c] now has the columns c, c + 4, c + 8 and c + 12 of the rows 4g to 4g + 3.
  for (int g = 0; g < LANES; g += 4) {
    row[g] = low(pair[g], pair[g + 2]);
    row[g + 1] = high(pair[g], pair[g + 2]);
    row[g + 2] = low(pair[g + 1], pair[g + 3]);
    row[g + 3] = high(pair[g + 1], pair[g + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(row[c], row[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(row[8 + c], row[12 + c], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(row[c], row[4 + c], 0xDD);
    const __m512 e = _mm512_shuffle_f32x4(row[8 + c], row[12 + c], 0xDD);
    pair[c] = _mm512_shuffle_f32x4(a, b, 0x88);
    pair[8 + c] = _mm512_shuffle_f32x4(a, b, 0xDD);
    pair[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88);
    pair[12 + c] = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
  for (int i = 0; i < LANES; ++i) row[i] = pair[i];
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
  static constexpr int DIM_STEP = 64;  // the head dimension is a multiple of this

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
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1) schedule(dynamic)
    for (std::int64_t i = 0; i < count; ++i) {
      float* own = buffer_.get() + room * static_cast<std::size_t>(omp_get_thread_num());
      run(tasks_[static_cast<std::size_t>(i)], query, stride, pool, out, own);
    }
  }

 private:
  static constexpr int QUERIES = 32;  // queries of a task, at most
  static constexpr int TILE = 4;      // queries whose sums fit into registers
  static constexpr int VECTORS = DIM_STEP / LANES;
  static constexpr float NEVER = -std::numeric_limits<float>::max();

  // Queries `from` and up to QUERIES more, of a request and a KV head. Query `i` is head `i %
  // group` of the new token `i / group`.
  struct Task {
    int request, kv, from;
  };

  static int round(int length) { return (length + LANES - 1) / LANES * LANES; }

  template <typename T>
  void run(const Task& task, const T* query, std::int64_t stride, Pool<const T> pool, T* out,
           float* buffer) const {
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
    const __m512 scale = _mm512_set1_ps(scale_);
    for (int i = 0; i < count; ++i) {
      const auto [token, head] = place(i);
      const T* from = query + token * stride + head * dim_;
      for (int d = 0; d < dim_; d += LANES) {
        store(scaled + i * dim_ + d, _mm512_mul_ps(load(from + d), scale));
      }
    }
    for (int p = 0; p < request.length; p += LANES) {
      score(request, keys, width, p, scaled, count, padded, scores);
    }
    for (int i = 0; i < count; ++i) {
      weigh(request, (task.from + i) / group_, scores + i * padded, padded);
    }
    for (int i = 0; i < count; i += TILE) {
      T* to[TILE] = {};
      const int tile = std::min(TILE, count - i);
      for (int q = 0; q < tile; ++q) {
        const auto [token, head] = place(i + q);
        to[q] = out + (token * kv_heads_ * group_ + head) * dim_;
      }
      const float* weights = scores + i * padded;
      switch (tile) {
        case 1: mix<T, 1>(request, values, width, weights, padded, to); break;
        case 2: mix<T, 2>(request, values, width, weights, padded, to); break;
        case 3: mix<T, 3>(request, values, width, weights, padded, to); break;
        default: mix<T, TILE>(request, values, width, weights, padded, to); break;
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
    alignas(64) float turned[DIM_STEP * LANES];
    for (int block = 0; block < dim_; block += DIM_STEP) {
      for (int d = 0; d < DIM_STEP; d += LANES) {
        __m512 square[LANES];
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
    __m512 even[COUNT], odd[COUNT];
    for (int q = 0; q < COUNT; ++q) {
      even[q] = first ? _mm512_setzero_ps() : load(scores + q * padded);
      odd[q] = _mm512_setzero_ps();
    }
    for (int d = 0; d < DIM_STEP; d += 2) {
      const __m512 a = load(turned + d * LANES), b = load(turned + (d + 1) * LANES);
      for (int q = 0; q < COUNT; ++q) {
        even[q] = _mm512_fmadd_ps(_mm512_set1_ps(scaled[q * dim_ + d]), a, even[q]);
        odd[q] = _mm512_fmadd_ps(_mm512_set1_ps(scaled[q * dim_ + d + 1]), b, odd[q]);
      }
    }
    for (int q = 0; q < COUNT; ++q) store(scores + q * padded, _mm512_add_ps(even[q], odd[q]));
  }

  // Replace the scores of new token `row` by their softmax.
  void weigh(const Request& request, int row, float* scores, int padded) const {
    const bool* sees = request.visible + row * request.stride;
    for (int j = 0; j < request.rows; ++j) {
      if (!sees[j]) scores[request.length - request.rows + j] = NEVER;
    }
    std::fill(scores + request.length, scores + padded, NEVER);
    const __m512 never = _mm512_set1_ps(NEVER);
    __m512 top = never;
    for (int p = 0; p < padded; p += LANES) top = _mm512_max_ps(top, load(scores + p));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 total = _mm512_setzero_ps();
    for (int p = 0; p < padded; p += LANES) {
      const __m512 s = load(scores + p);
      const __mmask16 seen = _mm512_cmp_ps_mask(s, never, _CMP_NEQ_OQ);
      const __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(s, most)));
      store(scores + p, weight);
      total = _mm512_add_ps(total, weight);
    }
    const __m512 share = _mm512_set1_ps(1.0F / _mm512_reduce_add_ps(total));
    for (int p = 0; p < padded; p += LANES) {
      store(scores + p, _mm512_mul_ps(load(scores + p), share));
    }
  }

  // The sums of all values times `weights`, for COUNT queries.
  template <typename T, int COUNT>
  void mix(const Request& request, const T* values, std::int64_t width, const float* weights,
           int padded, T* const* to) const {
    for (int block = 0; block < dim_; block += DIM_STEP) {
      __m512 sum[COUNT][VECTORS];
      for (int q = 0; q < COUNT; ++q) {
        for (int v = 0; v < VECTORS; ++v) sum[q][v] = _mm512_setzero_ps();
      }
      for (int p = 0; p < request.length; ++p) {
        const T* value = values + request.slots[p] * width + block;
        __m512 part[VECTORS];
        for (int v = 0; v < VECTORS; ++v) part[v] = load(value + v * LANES);
        for (int q = 0; q < COUNT; ++q) {
          const __m512 weight = _mm512_set1_ps(weights[q * padded + p]);
          for (int v = 0; v < VECTORS; ++v) sum[q][v] = _mm512_fmadd_ps(weight, part[v], sum[q][v]);
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
