// The dense product of vectors of floats, to which bfloat16 weights are converted as they are read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dense.h"
#include "vectors.h"

namespace qspec {

constexpr int PAIRS = 2 * LANES;

// One half of the next PAIRS values: those with even places, or the `other` ones.
inline Floats half(const BFloat16* from, bool other) {
  Ints pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return reinterpret_cast<Floats>(other ? pairs & ~0xFFFF : pairs << 16);
}

// One half of the next PAIRS values: the first ones, or the `other` ones.
inline Floats half(const float* from, bool other) { return load(from + (other ? LANES : 0)); }

// Rows of x [rows, inputs] as floats: of each PAIRS values one half, then the other one.
class FloatRows {
 public:
  template <typename T>
  void assign(const T* x, std::int64_t rows, int inputs) {
    inputs_ = inputs;
    values_.reserve(static_cast<std::size_t>(rows * inputs));
    float* to = values_.get();
    for (std::int64_t at = 0; at < rows * inputs; at += PAIRS) {
      store(to + at, half(x + at, false));
      store(to + at + LANES, half(x + at, true));
    }
  }

  const float* row(std::int64_t row) const { return values_.get() + row * inputs_; }

 private:
  int inputs_ = 0;
  Buffer<float> values_;
};

template <typename T>
class VectorProduct : public Dense<T> {
 public:
  explicit VectorProduct(const Dense<T>& dense) : Dense<T>(dense) {}

  void multiply(const FloatRows& x, int threads) const {
    const std::int64_t row_bytes = std::int64_t{inputs} * static_cast<int>(sizeof(float));
    const std::int64_t group = std::max(LEAST_GROUP, GROUP_BYTES / row_bytes / MOST_ROWS * MOST_ROWS);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (std::int64_t first = 0; first < rows; first += group) {
      const std::int64_t last = std::min(rows, first + group);
#pragma omp for schedule(static) nowait
      for (int column = 0; column < outputs; column += OUTPUT_STEP) {
        for (std::int64_t row = first; row < last; row += MOST_ROWS) {
          const auto count = static_cast<int>(std::min<std::int64_t>(MOST_ROWS, last - row));
          with_constant<MOST_ROWS>(count, [&](auto rows) {
            block<rows.value>(x, row, column, row == first);
          });
        }
      }
    }
  }

 private:
  using Dense<T>::weight;
  using Dense<T>::rows;
  using Dense<T>::inputs;
  using Dense<T>::outputs;

  static constexpr int MOST_ROWS = 4;
  // All outputs of a group of rows come before the next group, so that the rows stay in the L2 cache.
  static constexpr std::int64_t GROUP_BYTES = 1 << 18;
  static constexpr std::int64_t LEAST_GROUP = 16;  // rows; fewer would read the weight too often

  // OUTPUT_STEP outputs of ROWS rows. With `fetch`, fetch the weights of the next outputs from memory.
  template <int ROWS>
  void block(const FloatRows& x, std::int64_t row, int column, bool fetch) const {
    constexpr int OUTPUTS = ROWS > 1 ? 2 : 4;  // at once; the sums of all rows fit into registers
    float sums[ROWS][OUTPUT_STEP];
    for (int at = 0; at < OUTPUT_STEP; at += OUTPUTS) {
      const T* from = weight + std::int64_t{column + at} * inputs;
      Floats sum[ROWS][OUTPUTS] = {};
      for (int k = 0; k < inputs; k += PAIRS) {
        for (int o = 0; fetch && o < OUTPUTS; ++o) {
          _mm_prefetch(from + std::int64_t{OUTPUTS + o} * inputs + k, _MM_HINT_T0);
        }
        for (const bool other : {false, true}) {
          Floats w[OUTPUTS];
          for (int o = 0; o < OUTPUTS; ++o) w[o] = half(from + std::int64_t{o} * inputs + k, other);
          for (int r = 0; r < ROWS; ++r) {
            const Floats value = load(x.row(row + r) + k + (other ? LANES : 0));
            for (int o = 0; o < OUTPUTS; ++o) sum[r][o] = fma(w[o], value, sum[r][o]);
          }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        for (int o = 0; o < OUTPUTS; ++o) sums[r][at + o] = sum_of(sum[r][o]);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int at = 0; at < OUTPUT_STEP; at += LANES) this->write(row + r, column + at, load(sums[r] + at));
    }
  }
};

}  // namespace qspec
