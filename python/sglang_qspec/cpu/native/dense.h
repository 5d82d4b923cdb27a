// Products of rows and weights of one type, bfloat16 or float, that are in memory as the model has them.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace qspec {

constexpr int OUTPUT_STEP = 16;  // the outputs are a multiple of this
constexpr int INPUT_STEP = 32;   // the inputs are a multiple of this

// y [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T + bias + addend, rounded once.
// Each product of an output and a row is summed in the same order, however many rows a pass has.
template <typename T>
struct Dense {
  const T* weight;
  const T* bias;    // [outputs], or null
  const T* addend;  // [rows, outputs], or null; may be y
  T* y;
  std::int64_t rows;
  int inputs, outputs;

  // Write LANES sums of row `row` and the outputs from `column` on.
  void write(std::int64_t row, std::int64_t column, Floats sums) const {
    const std::int64_t at = row * outputs + column;
    if (bias != nullptr) sums += load(bias + column);
    if (addend != nullptr) sums += load(addend + at);
    store(y + at, sums);
  }
};

}  // namespace qspec
