// Matrix products with int8 weights: VNNI or AMX multiplies bytes and sums the products exactly in 32
// bits, so both give the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tiles.h"
#include "vectors.h"

namespace qspec {

// The sum of byte products must fit 32 bits: 255 * 128 times the number of inputs.
constexpr int MOST_INPUTS = 65'793;
constexpr int MOST_OUTPUTS = 1 << 30;
constexpr int MOST_ROWS_OF_X = 1 << 24;

// Rows (tokens) of activations as bytes. A row has one 8-bit digit per value, or two: the second digit
// holds the rounding error of the first. Except for rounding,
// x[k] = offset + sum over digits of scale[d] * (byte[d][k] - zero).
class Digits {
 public:
  int rows = 0;
  int digits = 1;
  int width = 0;  // bytes of a row: the number of inputs, rounded up to a multiple of 4

  const std::uint8_t* row(int number) const {
    return bytes_.get() + static_cast<std::size_t>(number) * static_cast<std::size_t>(width);
  }
  float scale(int number) const { return scales_.get()[number]; }
  float offset(int row) const { return offsets_.get()[row]; }
  int zero() const { return digits == 1 ? 0 : MIDDLE; }

  // Convert x [rows, inputs]; each row has a scale of its own.
  void assign(const float* x, int rows_in, int inputs, int digits_in) {
    rows = rows_in;
    digits = digits_in;
    width = (inputs + 3) / 4 * 4;
    const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(digits);
    // A tile reads whole groups of rows; what it reads beyond the last row does not count.
    bytes_.reserve((count + TILE_ROWS) * static_cast<std::size_t>(width) + 64);
    scales_.reserve(count);
    offsets_.reserve(static_cast<std::size_t>(rows));
    for (int row = 0; row < rows; ++row, x += inputs) {
      digits == 1 ? one_digit(row, x, inputs) : two_digits(row, x, inputs);
    }
  }

 private:
  static constexpr float TINY = 1e-30F;
  static constexpr float LARGEST = 127.0F;
  static constexpr int MIDDLE = 128;

  std::uint8_t* out(int number) {
    return bytes_.get() + static_cast<std::size_t>(number) * static_cast<std::size_t>(width);
  }

  static __mmask16 lanes(int left) {
    return left >= LANES ? __mmask16(0xFFFF) : static_cast<__mmask16>((1U << left) - 1U);
  }

  // One digit: 256 steps from the smallest to the largest value.
  void one_digit(int row, const float* x, int inputs) {
    __m512 low = _mm512_set1_ps(x[0]), high = low;
    for (int k = 0; k < inputs; k += LANES) {
      const __mmask16 mask = lanes(inputs - k);
      const __m512 v = _mm512_maskz_loadu_ps(mask, x + k);
      low = _mm512_mask_min_ps(low, mask, low, v);
      high = _mm512_mask_max_ps(high, mask, high, v);
    }
    const float least = _mm512_reduce_min_ps(low);
    const float step = std::max((_mm512_reduce_max_ps(high) - least) / 255.0F, TINY);
    scales_.get()[row] = step;
    offsets_.get()[row] = least;
    const __m512 inverse = _mm512_set1_ps(1.0F / step), base = _mm512_set1_ps(least);
    std::uint8_t* to = out(row);
    std::fill(to + inputs / 4 * 4, to + width, std::uint8_t{0});
    for (int k = 0; k < inputs; k += LANES) {
      const __mmask16 mask = lanes(inputs - k);
      const __m512 v = _mm512_maskz_loadu_ps(mask, x + k);
      const __m512i digit = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(v, base), inverse));
      _mm512_mask_cvtusepi32_storeu_epi8(to + k, mask, _mm512_max_epi32(digit, _mm512_setzero_si512()));
    }
  }

  // Two digits: one from -127 to 127, and 254 times its rounding error. Both are stored plus MIDDLE.
  void two_digits(int row, const float* x, int inputs) {
    __m512 high = _mm512_setzero_ps();
    for (int k = 0; k < inputs; k += LANES) {
      high = _mm512_max_ps(high, _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(inputs - k), x + k)));
    }
    const float step = std::max(_mm512_reduce_max_ps(high) / LARGEST, TINY);
    const float finer = 2.0F * LARGEST;
    scales_.get()[2 * row] = step;
    scales_.get()[2 * row + 1] = step / finer;
    offsets_.get()[row] = 0.0F;
    const __m512 inverse = _mm512_set1_ps(1.0F / step);
    const __m512i middle = _mm512_set1_epi32(MIDDLE);
    std::uint8_t *upper = out(2 * row), *lower = out(2 * row + 1);
    std::fill(upper + inputs / 4 * 4, upper + width, std::uint8_t{0});
    std::fill(lower + inputs / 4 * 4, lower + width, std::uint8_t{0});
    for (int k = 0; k < inputs; k += LANES) {
      const __mmask16 mask = lanes(inputs - k);
      const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k), inverse);
      const __m512i digit = _mm512_cvtps_epi32(v);
      const __m512 left = _mm512_sub_ps(v, _mm512_cvtepi32_ps(digit));
      const __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(left, _mm512_set1_ps(finer)));
      _mm512_mask_cvtusepi32_storeu_epi8(upper + k, mask, _mm512_add_epi32(digit, middle));
      _mm512_mask_cvtusepi32_storeu_epi8(lower + k, mask, _mm512_add_epi32(rest, middle));
    }
  }

  Buffer<std::uint8_t> bytes_;
  Buffer<float> scales_;
  Buffer<float> offsets_;
};

// An int8 weight [outputs, inputs] with a scale per output, stored in panels of 64 outputs.
class PackedInt8 {
 public:
  PackedInt8(const std::int8_t* q, const float* scale, int outputs, int inputs)
      : outputs_(outputs),
        inputs_(inputs),
        fours_((inputs + 3) / 4),
        panels_((outputs + PANEL - 1) / PANEL) {
    const auto columns = static_cast<std::size_t>(panels_) * PANEL;
    weights_.reserve(columns * static_cast<std::size_t>(fours_) * 4);
    scales_.reserve(columns);
    sums_.reserve(columns);
    std::fill_n(weights_.get(), columns * static_cast<std::size_t>(fours_) * 4, std::int8_t{0});
    std::fill_n(scales_.get(), columns, 0.0F);
    std::fill_n(sums_.get(), columns, 0);
    for (int n = 0; n < outputs; ++n) {
      std::int8_t* panel = weights_.get() + panel_bytes() * static_cast<std::size_t>(n / PANEL);
      std::int32_t sum = 0;
      for (int k = 0; k < inputs; ++k) {
        const std::int8_t value = q[static_cast<std::size_t>(n) * static_cast<std::size_t>(inputs) +
                                    static_cast<std::size_t>(k)];
        panel[(k / 4) * 4 * PANEL + (n % PANEL) * 4 + k % 4] = value;
        sum += value;
      }
      scales_.get()[n] = scale[n];
      sums_.get()[n] = sum;
    }
  }

  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }

  // Compute y [rows, outputs] = x @ weight.T; with `add`, add to y instead.
  void multiply(const Digits& x, float* y, bool add, int threads) const {
    const bool tiled = x.width % TILE_ROW_BYTES == 0 && may_use_tiles();
    if (tiled) {
#pragma omp parallel num_threads(threads) if (threads > 1)
      {
        const TileLayout layout;
#pragma omp for schedule(static)
        for (int panel = 0; panel < panels_; ++panel) {
          for (int first = 0; first < x.rows * x.digits; first += TILE_ROWS) {
            tiles(x, panel, first, y, add);
          }
        }
      }
      return;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int panel = 0; panel < panels_; ++panel) {
      const int all = x.rows * x.digits;
      const int blocks = (all + MOST_ROWS - 1) / MOST_ROWS;
      for (int block = 0; block < blocks; ++block) {
        const int first = share(all, block, blocks), last = share(all, block + 1, blocks);
        switch (last - first) {
          case 1: vectors<1>(x, panel, first, y, add); break;
          case 2: vectors<2>(x, panel, first, y, add); break;
          case 3: vectors<3>(x, panel, first, y, add); break;
          default: vectors<MOST_ROWS>(x, panel, first, y, add); break;
        }
      }
    }
  }

 private:
  static constexpr int PANEL = 64;
  static constexpr int VECTORS = PANEL / LANES;
  static constexpr int MOST_ROWS = 4;  // with more, the compiler runs out of registers
  static constexpr int AHEAD = 2;      // steps of a tiled product for which weights are fetched ahead

  // Start of part `part` if `all` rows are divided evenly into `parts`.
  static int share(int all, int part, int parts) {
    return static_cast<int>(std::int64_t{all} * part / parts);
  }

  std::size_t panel_bytes() const { return static_cast<std::size_t>(fours_) * 4 * PANEL; }

  __m512i sums(int column) const { return _mm512_load_si512(sums_.get() + column); }

  const std::int8_t* weights(int panel) const {
    return weights_.get() + panel_bytes() * static_cast<std::size_t>(panel);
  }

  // Multiply up to 16 digit rows from `first` on by one panel.
  __attribute__((target("amx-tile,amx-int8"))) void tiles(const Digits& x, int panel, int first,
                                                          float* y, bool add) const {
    const std::int8_t* w = weights(panel);
    const auto width = static_cast<std::size_t>(x.width);
    const std::uint8_t* bytes = x.row(first);
    constexpr int STEP = TILE_ROWS * 4 * PANEL;  // bytes of a panel that 64 inputs need
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < x.width; k += TILE_ROW_BYTES, w += STEP) {
      for (int line = 0; line < STEP; line += 64) _mm_prefetch(w + AHEAD * STEP + line, _MM_HINT_T0);
      _tile_loadd(4, bytes + k, width);
      _tile_loadd(5, w, 4 * PANEL);
      _tile_loadd(6, w + 64, 4 * PANEL);
      _tile_dpbusd(0, 4, 5);
      _tile_dpbusd(1, 4, 6);
      _tile_loadd(5, w + 128, 4 * PANEL);
      _tile_loadd(6, w + 192, 4 * PANEL);
      _tile_dpbusd(2, 4, 5);
      _tile_dpbusd(3, 4, 6);
    }
    alignas(64) std::int32_t products[TILE_ROWS * PANEL];
    _tile_stored(0, products, 4 * PANEL);
    _tile_stored(1, products + LANES, 4 * PANEL);
    _tile_stored(2, products + 2 * LANES, 4 * PANEL);
    _tile_stored(3, products + 3 * LANES, 4 * PANEL);
    const int column = panel * PANEL, count = std::min(TILE_ROWS, x.rows * x.digits - first);
    const __m512i zero = _mm512_set1_epi32(-x.zero());
    for (int r = 0; r < count; ++r) {
      __m512i sum[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        const __m512i product = _mm512_load_si512(products + r * PANEL + v * LANES);
        sum[v] = _mm512_add_epi32(product, _mm512_mullo_epi32(zero, sums(column + v * LANES)));
      }
      write(x, first + r, column, sum, y, add);
    }
  }

  // Multiply `ROWS` digit rows from `first` on by one panel.
  template <int ROWS>
  void vectors(const Digits& x, int panel, int first, float* y, bool add) const {
    const std::int8_t* w = weights(panel);
    const std::uint8_t* bytes[ROWS];
    __m512i sum[ROWS][VECTORS];
    const int column = panel * PANEL;
    const __m512i zero = _mm512_set1_epi32(-x.zero());
    for (int r = 0; r < ROWS; ++r) {
      bytes[r] = x.row(first + r);
      for (int v = 0; v < VECTORS; ++v) {
        sum[r][v] = _mm512_mullo_epi32(zero, sums(column + v * LANES));
      }
    }
    for (int k = 0; k < fours_; ++k, w += 4 * PANEL) {
      __m512i weight[VECTORS];
      for (int v = 0; v < VECTORS; ++v) weight[v] = _mm512_load_si512(w + 64 * v);
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t four;
        std::memcpy(&four, bytes[r] + 4 * k, 4);
        const __m512i same = _mm512_set1_epi32(four);
        for (int v = 0; v < VECTORS; ++v) {
          sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], same, weight[v]);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) write(x, first + r, column, sum[r], y, add);
  }

  // Write the `sum` of digit row `number` and the outputs of the panel from `column` on. The digits of
  // a row come in order, and the later ones are added to the first.
  void write(const Digits& x, int number, int column, const __m512i (&sum)[VECTORS], float* y,
             bool add) const {
    const int row = number / x.digits;
    const bool leads = number % x.digits == 0;
    const __m512 scale = _mm512_set1_ps(x.scale(number));
    const __m512 offset = _mm512_set1_ps(leads ? x.offset(row) : 0.0F);
    float* to = y + static_cast<std::size_t>(row) * static_cast<std::size_t>(outputs_);
    for (int v = 0; v < VECTORS; ++v) {
      const int at = column + v * LANES, left = outputs_ - at;
      if (left <= 0) break;
      const auto mask = left >= LANES ? __mmask16(0xFFFF) : static_cast<__mmask16>((1U << left) - 1U);
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[v]), scale);
      value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums(at)), offset, value);
      value = _mm512_mul_ps(value, load(scales_.get() + at));
      if (add || !leads) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to + at));
      _mm512_mask_storeu_ps(to + at, mask, value);
    }
  }

  int outputs_, inputs_, fours_, panels_;
  Buffer<std::int8_t> weights_;
  Buffer<float> scales_;
  Buffer<std::int32_t> sums_;  // sum of the weights of each output
};

}  // namespace qspec
