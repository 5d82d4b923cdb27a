// Matrix products with int8 weights. VNNI, AMX and AVX2 sum the products of digits exactly in 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "digits.h"
#include "tiles.h"
#include "vectors.h"

namespace qspec {

// The sum of products of bytes must fit 32 bits: 255 * 128 times the number of inputs.
constexpr int MOST_INPUTS = 65'793;
constexpr int MOST_OUTPUTS = 1 << 30;
constexpr int MOST_ROWS_OF_X = 1 << 24;

// An int8 weight [outputs, inputs] with a scale per output, stored in panels of PANEL outputs.
class PackedInt8 {
 public:
  PackedInt8(const std::int8_t* q, const float* scale, int outputs, int inputs)
      : outputs_(outputs),
        inputs_(inputs),
        groups_((inputs + GROUP - 1) / GROUP),
        panels_((outputs + PANEL - 1) / PANEL) {
    const auto columns = static_cast<std::size_t>(panels_) * PANEL;
    weights_.reserve(columns * static_cast<std::size_t>(groups_) * GROUP);
    scales_.reserve(columns);
    sums_.reserve(columns);
    std::fill_n(weights_.get(), columns * static_cast<std::size_t>(groups_) * GROUP, std::int8_t{0});
    std::fill_n(scales_.get(), columns, 0.0F);
    std::fill_n(sums_.get(), columns, 0);
    for (int n = 0; n < outputs; ++n) {
      std::int8_t* panel = weights_.get() + panel_bytes() * static_cast<std::size_t>(n / PANEL);
      std::int32_t sum = 0, size = 0;
      for (int k = 0; k < inputs; ++k) {
        const std::int8_t value = q[static_cast<std::size_t>(n) * static_cast<std::size_t>(inputs) +
                                    static_cast<std::size_t>(k)];
        panel[(k / GROUP * PANEL + n % PANEL) * GROUP + k % GROUP] = value;
        sum += value;
        size += std::abs(value);
      }
      largest_ = std::max(largest_, size);
      scales_.get()[n] = scale[n];
      sums_.get()[n] = sum;
    }
  }

  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }

  // The largest digit with which the sums fit 32 bits.
  int most_of_digit() const {
    if constexpr (sizeof(Digit) == 1) return MOST_OF_BYTE;
    const int most = std::numeric_limits<std::int32_t>::max() / std::max(1, largest_);
    return std::min<int>(most, std::numeric_limits<Digit>::max());
  }

  // Compute y [rows, outputs] = x @ weight.T; with `add`, add to y instead.
  void multiply(const Digits& x, float* y, bool add, int threads) const {
#ifdef QSPEC_TILES
    if (x.width % TILE_ROW_BYTES == 0 && may_use_tiles()) {
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
#endif
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int panel = 0; panel < panels_; ++panel) {
      const int all = x.rows * x.digits;
      const int blocks = (all + MOST_ROWS - 1) / MOST_ROWS;
      for (int block = 0; block < blocks; ++block) {
        const int first = share(all, block, blocks), last = share(all, block + 1, blocks);
        with_constant<MOST_ROWS>(last - first, [&](auto count) {
          vectors<count.value>(x, panel, first, y, add, block == 0);
        });
      }
    }
  }

 private:
  static constexpr int PARTS = AT_ONCE;  // vectors of a panel
  static constexpr int PANEL = PARTS * LANES;
  static constexpr int MOST_ROWS = 4;  // with more, the compiler runs out of registers
  static constexpr bool FETCHES = LANES == 8;  // not measured with AVX-512
  static constexpr int FETCH_AHEAD = 2048;     // bytes
  static constexpr int AHEAD = 2;      // steps of a tiled product for which weights are fetched ahead

  // Start of part `part` if `all` rows are divided evenly into `parts`.
  static int share(int all, int part, int parts) {
    return static_cast<int>(std::int64_t{all} * part / parts);
  }

  std::size_t panel_bytes() const { return static_cast<std::size_t>(groups_) * GROUP * PANEL; }

  static Ints load_ints(const std::int32_t* from) {
    Ints values;
    std::memcpy(&values, from, sizeof values);
    return values;
  }

  Ints sums(int column) const { return load_ints(sums_.get() + column); }

  const std::int8_t* weights(int panel) const {
    return weights_.get() + panel_bytes() * static_cast<std::size_t>(panel);
  }

#ifdef QSPEC_TILES
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
    for (int r = 0; r < count; ++r) {
      Ints sum[PARTS];
      for (int v = 0; v < PARTS; ++v) {
        sum[v] = load_ints(products + r * PANEL + v * LANES) - x.zero() * sums(column + v * LANES);
      }
      write(x, first + r, column, sum, y, add);
    }
  }
#endif

  // Multiply `ROWS` digit rows from `first` on by one panel. With `fetch`, fetch its weights from memory
  // ahead of their use, and those of the next panel.
  template <int ROWS>
  void vectors(const Digits& x, int panel, int first, float* y, bool add, bool fetch) const {
    const std::int8_t* w = weights(panel);
    const Digit* digits[ROWS];
    Ints sum[ROWS][PARTS];
    const int column = panel * PANEL;
    for (int r = 0; r < ROWS; ++r) {
      digits[r] = x.row(first + r);
      for (int v = 0; v < PARTS; ++v) sum[r][v] = -x.zero() * sums(column + v * LANES);
    }
    for (int k = 0; k < groups_; ++k, w += GROUP * PANEL) {
      Ints weight[PARTS];
      if (FETCHES && fetch) _mm_prefetch(w + FETCH_AHEAD, _MM_HINT_T0);
      for (int v = 0; v < PARTS; ++v) weight[v] = load_weights(w + v * GROUP * LANES);
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t group;
        std::memcpy(&group, digits[r] + GROUP * k, sizeof group);
        const Ints same = Ints{} + group;
        for (int v = 0; v < PARTS; ++v) sum[r][v] = add_products(sum[r][v], same, weight[v]);
      }
    }
    for (int r = 0; r < ROWS; ++r) write(x, first + r, column, sum[r], y, add);
  }

  // Write the `sum` of digit row `number` and the outputs of the panel from `column` on. The digits of
  // a row come in order, and the later ones are added to the first.
  void write(const Digits& x, int number, int column, const Ints (&sum)[PARTS], float* y,
             bool add) const {
    const int row = number / x.digits;
    const bool leads = number % x.digits == 0;
    const float scale = x.scale(number);
    const Floats offset = broadcast(leads ? x.offset(row) : 0.0F);
    float* to = y + static_cast<std::size_t>(row) * static_cast<std::size_t>(outputs_);
    for (int v = 0; v < PARTS; ++v) {
      const int at = column + v * LANES, left = outputs_ - at;
      if (left <= 0) break;
      Floats value = fma(to_floats(sums(at)), offset, to_floats(sum[v]) * scale);
      value *= load(scales_.get() + at);
      if (add || !leads) value += load_part(to + at, left, Floats{});
      store_part(to + at, value, left);
    }
  }

  int outputs_, inputs_, groups_, panels_;
  int largest_ = 0;  // largest sum of the sizes of an output's weights
  Buffer<std::int8_t> weights_;
  Buffer<float> scales_;
  Buffer<std::int32_t> sums_;  // sum of the weights of each output
};

}  // namespace qspec
