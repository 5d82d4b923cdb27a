// Attention of one token to its KV row up to itself; the slots may lie anywhere in the pool.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace qspec {

constexpr int HEAD_BLOCK = 64;  // head dimensions per step; a head has a multiple of this number
constexpr int MOST_HEADS = 4;   // query heads of one KV head per step

// Location of the KV of one layer and head: token `slots[i]` at `keys + slots[i] * stride`.
template <typename KV>
struct Cache {
  const KV* keys;
  const KV* values;
  std::int64_t stride;
  const std::int32_t* slots;
  int length;
};

// Attention of `HEADS` query heads that share a KV head. `query`, already scaled, and `mixed`, the
// result, are float [HEADS, dim]. `scores` has room for HEADS * (length rounded up to 16).
template <typename KV, int HEADS>
void attend(const Cache<KV>& cache, const float* query, int dim, float* scores, float* mixed) {
  constexpr int VECTORS = HEAD_BLOCK / LANES;
  const int padded = (cache.length + LANES - 1) / LANES * LANES;
  for (int block = 0; block < dim; block += HEAD_BLOCK) {
    __m512 part[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) part[h][v] = load(query + h * dim + block + v * LANES);
    }
    for (int p = 0; p < cache.length; ++p) {
      const KV* key = cache.keys + cache.slots[p] * cache.stride + block;
      __m512 sum[HEADS];
      for (int v = 0; v < VECTORS; ++v) {
        const __m512 k = load(key + v * LANES);
        for (int h = 0; h < HEADS; ++h) {
          sum[h] = v == 0 ? _mm512_mul_ps(part[h][v], k) : _mm512_fmadd_ps(part[h][v], k, sum[h]);
        }
      }
      for (int h = 0; h < HEADS; ++h) {
        float& score = scores[h * padded + p];
        score = _mm512_reduce_add_ps(sum[h]) + (block == 0 ? 0.0F : score);
      }
    }
  }
  float norm[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    float* row = scores + h * padded;
    std::fill(row + cache.length, row + padded, -std::numeric_limits<float>::max());
    __m512 high = load(row);
    for (int p = LANES; p < padded; p += LANES) high = _mm512_max_ps(high, load(row + p));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    __m512 total = _mm512_setzero_ps();
    for (int p = 0; p < padded; p += LANES) {
      const __m512 weight = exponential(_mm512_sub_ps(load(row + p), most));
      store(row + p, weight);
      total = _mm512_add_ps(total, weight);
    }
    norm[h] = 1.0F / _mm512_reduce_add_ps(total);
  }
  for (int block = 0; block < dim; block += HEAD_BLOCK) {
    __m512 sum[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) sum[h][v] = _mm512_setzero_ps();
    }
    for (int p = 0; p < cache.length; ++p) {
      const KV* value = cache.values + cache.slots[p] * cache.stride + block;
      __m512 part[VECTORS];
      for (int v = 0; v < VECTORS; ++v) part[v] = load(value + v * LANES);
      for (int h = 0; h < HEADS; ++h) {
        const __m512 weight = _mm512_set1_ps(scores[h * padded + p]);
        for (int v = 0; v < VECTORS; ++v) sum[h][v] = _mm512_fmadd_ps(weight, part[v], sum[h][v]);
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) {
        store(mixed + h * dim + block + v * LANES,
              _mm512_mul_ps(sum[h][v], _mm512_set1_ps(norm[h])));
      }
    }
  }
}

// Attention of `heads` query heads that share a KV head, in steps of at most MOST_HEADS.
template <typename KV>
void attend(const Cache<KV>& cache, const float* query, int heads, int dim, float* scores,
            float* mixed) {
  while (heads > 0) {
    const int now = std::min(heads, MOST_HEADS);
    switch (now) {
      case 1: attend<KV, 1>(cache, query, dim, scores, mixed); break;
      case 2: attend<KV, 2>(cache, query, dim, scores, mixed); break;
      case 3: attend<KV, 3>(cache, query, dim, scores, mixed); break;
      default: attend<KV, 4>(cache, query, dim, scores, mixed); break;
    }
    heads -= now;
    query += now * dim;
    mixed += now * dim;
  }
}

}  // namespace qspec
