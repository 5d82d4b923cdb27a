// The dense product on processors with AMX.
//
// The processor multiplies a tile of 16 outputs by 32 inputs, as the weight [outputs, inputs] has them
// in memory, by a tile of the same 32 inputs of 16 rows of x. So the weight needs no packing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dense.h"
#include "tiles.h"
#include "vectors.h"

namespace qspec {

static_assert(OUTPUT_STEP == TILE_ROWS);

// Rows of x [rows, inputs] as tiles: 16 pairs of inputs by 16 rows, with zeros for missing rows.
class RowTiles {
 public:
  void assign(const BFloat16* x, std::int64_t rows, int inputs) {
    steps_ = inputs / INPUT_STEP;
    count_ = (rows + TILE_ROWS - 1) / TILE_ROWS;
    tiles_.reserve(static_cast<std::size_t>(count_ * steps_) * TILE_BYTES);
    for (std::int64_t tile = 0; tile < count_; ++tile) {
      for (int step = 0; step < steps_; ++step) {
        Floats pairs[LANES];
        for (int r = 0; r < TILE_ROWS; ++r) {
          const std::int64_t row = tile * TILE_ROWS + r;
          pairs[r] = Floats{};
          if (row < rows) std::memcpy(&pairs[r], x + row * inputs + step * INPUT_STEP, sizeof pairs[r]);
        }
        transpose(pairs);
        auto* to = reinterpret_cast<float*>(tiles_.get() + offset(tile, step));
        for (int pair = 0; pair < LANES; ++pair) store(to + pair * LANES, pairs[pair]);
      }
    }
  }

  std::int64_t count() const { return count_; }
  int steps() const { return steps_; }
  const std::uint8_t* tile(std::int64_t tile, int step) const {
    return tiles_.get() + offset(tile, step);
  }

 private:
  std::size_t offset(std::int64_t tile, int step) const {
    return static_cast<std::size_t>(tile * steps_ + step) * TILE_BYTES;
  }

  std::int64_t count_ = 0;
  int steps_ = 0;
  Buffer<std::uint8_t> tiles_;
};

class TileProduct : public Dense<BFloat16> {
 public:
  explicit TileProduct(const Dense<BFloat16>& dense) : Dense(dense) {}

  void multiply(const RowTiles& x, int threads) const {
    const int blocks = outputs / TILE_ROWS;
    const std::int64_t group = std::max(LEAST_GROUP, GROUP_BYTES / (x.steps() * TILE_BYTES) / 2 * 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const TileLayout layout;
      Buffer<float> sums(static_cast<std::size_t>(2 * std::min(group, x.count() + 1)) * TILE_SUMS);
      for (std::int64_t first = 0; first < x.count(); first += group) {
        const std::int64_t last = std::min(x.count(), first + group);
#pragma omp for schedule(static) nowait
        for (int pair = 0; pair < (blocks + 1) / 2; ++pair) {
          if (2 * pair + 1 < blocks) {
            over_rows<2>(x, 2 * pair, first, last, sums.get());
          } else {
            over_rows<1>(x, 2 * pair, first, last, sums.get());
          }
        }
      }
    }
  }

 private:
  // All outputs of a group of rows come before the next group, so that the rows stay in the L2 cache.
  static constexpr std::int64_t GROUP_BYTES = 3 << 18;
  static constexpr std::int64_t LEAST_GROUP = 4;  // tiles; fewer would read the weight too often
  static constexpr int TILE_SUMS = TILE_ROWS * LANES;
  // Steps after which other rows come, at most, so that this part of the weight stays in the L1 cache.
  static constexpr int CHUNK = 10;

  // The outputs of BLOCKS blocks for the rows of some tiles.
  template <int BLOCKS>
  void over_rows(const RowTiles& x, int block, std::int64_t first, std::int64_t last,
                 float* sums) const {
    const int chunks = last - first > 2 ? (x.steps() + CHUNK - 1) / CHUNK : 1;
    const int chunk = (x.steps() + chunks - 1) / chunks;
    for (int from = 0; from < x.steps(); from += chunk) {
      const int to = std::min(x.steps(), from + chunk);
      for (std::int64_t tile = first; tile < last; tile += 2) {
        float* own = sums + (tile - first) * 2 * TILE_SUMS;
        if (tile + 1 < last) {
          run<BLOCKS, 2>(x, block, tile, from, to, tile == first, own);
        } else {
          run<BLOCKS, 1>(x, block, tile, from, to, tile == first, own);
        }
      }
    }
  }

  // Add the inputs of the steps `from` to `to` to `sums`, and write the outputs after the last step.
  // With `fetch`, fetch the same steps of the next blocks from memory.
  template <int BLOCKS, int TILES>
  __attribute__((target("amx-tile,amx-bf16"))) void run(const RowTiles& x, int block,
                                                        std::int64_t tile, int from, int to,
                                                        bool fetch, float* sums) const {
    const std::int64_t block_values = std::int64_t{TILE_ROWS} * inputs;
    const BFloat16* upper = weight + block * block_values;
    const BFloat16* lower = upper + block_values;
    const auto stride = static_cast<std::size_t>(inputs) * sizeof(BFloat16);
    const char* next = reinterpret_cast<const char*>(upper + BLOCKS * block_values) +
                       std::int64_t{from} * BLOCKS * TILE_BYTES;
    if (from == 0) {
      _tile_zero(0);
      if constexpr (TILES > 1) _tile_zero(1);
      if constexpr (BLOCKS > 1) _tile_zero(2);
      if constexpr (BLOCKS > 1 && TILES > 1) _tile_zero(3);
    } else {
      _tile_loadd(0, sums, 64);
      if constexpr (TILES > 1) _tile_loadd(1, sums + TILE_SUMS, 64);
      if constexpr (BLOCKS > 1) _tile_loadd(2, sums + 2 * TILE_SUMS, 64);
      if constexpr (BLOCKS > 1 && TILES > 1) _tile_loadd(3, sums + 3 * TILE_SUMS, 64);
    }
    for (int step = from; step < to; ++step) {
      if (fetch) {
        for (int line = 0; line < BLOCKS * TILE_ROWS; ++line, next += 64) {
          _mm_prefetch(next, _MM_HINT_T1);
        }
      }
      _tile_loadd(4, upper + step * INPUT_STEP, stride);
      if constexpr (BLOCKS > 1) _tile_loadd(5, lower + step * INPUT_STEP, stride);
      _tile_loadd(6, x.tile(tile, step), 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (BLOCKS > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (TILES > 1) {
        _tile_loadd(7, x.tile(tile + 1, step), 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BLOCKS > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, 64);
    if constexpr (TILES > 1) _tile_stored(1, sums + TILE_SUMS, 64);
    if constexpr (BLOCKS > 1) _tile_stored(2, sums + 2 * TILE_SUMS, 64);
    if constexpr (BLOCKS > 1 && TILES > 1) _tile_stored(3, sums + 3 * TILE_SUMS, 64);
    if (to < x.steps()) return;
    for (int b = 0; b < BLOCKS; ++b) {
      for (int t = 0; t < TILES; ++t) {
        write_tile(sums + (2 * b + t) * TILE_SUMS, block + b, tile + t);
      }
    }
  }

  // Write `sums` [16 outputs, 16 rows] of a block and a tile of rows.
  void write_tile(const float* sums, int block, std::int64_t tile) const {
    Floats row[LANES];
    for (int output = 0; output < LANES; ++output) row[output] = load(sums + output * LANES);
    transpose(row);
    const std::int64_t first = tile * TILE_ROWS, last = std::min(rows, first + TILE_ROWS);
    const std::int64_t column = std::int64_t{block} * TILE_ROWS;
    for (std::int64_t r = first; r < last; ++r) write(r, column, row[r - first]);
  }
};

}  // namespace qspec
