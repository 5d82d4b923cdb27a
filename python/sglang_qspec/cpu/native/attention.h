// Attention of one token to its KV row up to itself; the slots may lie anywhere in the pool.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace qspec {

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
  const int padded = (cache.length + LANES - 1) / LANES * LANES;
  for (int block = 0; block < dim; block += BLOCK) {
    Floats part[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) part[h][v] = load(query + h * dim + block + v * LANES);
    }
    for (int p = 0; p < cache.length; ++p) {
      const KV* key = cache.keys + cache.slots[p] * cache.stride + block;
      Floats sum[HEADS];
      for (int v = 0; v < VECTORS; ++v) {
        const Floats k = load(key + v * LANES);
        for (int h = 0; h < HEADS; ++h) {
          sum[h] = v == 0 ? part[h][v] * k : fma(part[h][v], k, sum[h]);
        }
      }
      for (int h = 0; h < HEADS; ++h) {
        float& score = scores[h * padded + p];
        score = sum_of(sum[h]) + (block == 0 ? 0.0F : score);
      }
    }
  }
  float norm[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    float* row = scores + h * padded;
    std::fill(row + cache.length, row + padded, -std::numeric_limits<float>::max());
    Floats high = load(row);
    for (int p = LANES; p < padded; p += LANES) high = larger(high, load(row + p));
    const float most = largest(high);
    Floats total = Floats{};
    for (int p = 0; p < padded; p += LANES) {
      const Floats weight = exponential(load(row + p) - most);
      store(row + p, weight);
      total += weight;
    }
    norm[h] = 1.0F / sum_of(total);
  }
  for (int block = 0; block < dim; block += BLOCK) {
    Floats sum[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) sum[h][v] = Floats{};
    }
    for (int p = 0; p < cache.length; ++p) {
      const KV* value = cache.values + cache.slots[p] * cache.stride + block;
      Floats part[VECTORS];
      for (int v = 0; v < VECTORS; ++v) part[v] = load(value + v * LANES);
      for (int h = 0; h < HEADS; ++h) {
        const Floats weight = broadcast(scores[h * padded + p]);
        for (int v = 0; v < VECTORS; ++v) sum[h][v] = fma(weight, part[v], sum[h][v]);
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      for (int v = 0; v < VECTORS; ++v) {
        store(mixed + h * dim + block + v * LANES, sum[h][v] * norm[h]);
      }
    }
  }
}

// Attention of `heads` query heads that share a KV head, in steps of at most AT_ONCE.
template <typename KV>
void attend(const Cache<KV>& cache, const float* query, int heads, int dim, float* scores,
            float* mixed) {
  while (heads > 0) {
    const int now = std::min(heads, AT_ONCE);
    with_constant<AT_ONCE>(now, [&](auto count) {
      attend<KV, count.value>(cache, query, dim, scores, mixed);
    });
    heads -= now;
    query += now * dim;
    mixed += now * dim;
  }
}

}  // namespace qspec
