// Activations rounded to digits, and their products with int8 weights, exact in 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tiles.h"
#include "vectors.h"

namespace qspec {

// One instruction multiplies GROUP inputs, which fill 32 bits, by the weights of LANES outputs.
#ifdef __AVX512VNNI__

using Digit = std::uint8_t;
constexpr int GROUP = 4;
constexpr int EXACT_DIGITS = 2;  // digits that are more exact than bfloat16

// Weights [LANES, GROUP] of LANES outputs.
inline Ints load_weights(const std::int8_t* from) {
  return reinterpret_cast<Ints>(_mm512_load_si512(from));
}

// Add the products of GROUP digits, the same in all lanes, to the sums of LANES outputs.
inline Ints add_products(Ints sums, Ints digits, Ints weights) {
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                    reinterpret_cast<__m512i>(digits),
                                                    reinterpret_cast<__m512i>(weights)));
}

#else

// AVX2 would cut sums of two products of bytes to 16 bits. A digit of 16 bits has room for more steps.
using Digit = std::int16_t;
constexpr int GROUP = 2;
constexpr int EXACT_DIGITS = 1;

// Weights [LANES, GROUP] of LANES outputs, as 16 bits each.
inline Ints load_weights(const std::int8_t* from) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi16(bytes));
}

// Add the products of GROUP digits, the same in all lanes, to the sums of LANES outputs.
inline Ints add_products(Ints sums, Ints digits, Ints weights) {
  return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(digits),
                                                         reinterpret_cast<__m256i>(weights)));
}

#endif

static_assert(GROUP * sizeof(Digit) == sizeof(std::int32_t));

constexpr int MOST_OF_BYTE = 255;

// Rows (tokens) of activations. A row has one digit per value, or two of 8 bits: the second digit
// holds the rounding error of the first. Except for rounding,
// x[k] = offset + sum over digits of scale[d] * (digit[d][k] - zero).
class Digits {
 public:
  int rows = 0;
  int digits = 1;
  int width = 0;  // digits of a row: the number of inputs, rounded up to a multiple of GROUP

  const Digit* row(int number) const {
    return values_.get() + static_cast<std::size_t>(number) * static_cast<std::size_t>(width);
  }
  float scale(int number) const { return scales_.get()[number]; }
  float offset(int row) const { return offsets_.get()[row]; }
  int zero() const { return digits == 1 ? 0 : MIDDLE; }

  // Convert x [rows, inputs]; each row has a scale of its own. One digit is at most `most`.
  void assign(const float* x, int rows_in, int inputs, int digits_in, int most) {
    rows = rows_in;
    digits = digits_in;
    width = (inputs + GROUP - 1) / GROUP * GROUP;
    const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(digits);
    // A tile reads whole groups of rows; what it reads beyond the last row does not count.
    values_.reserve((count + TILE_ROWS) * static_cast<std::size_t>(width) + 64);
    scales_.reserve(count);
    offsets_.reserve(static_cast<std::size_t>(rows));
    for (int row = 0; row < rows; ++row, x += inputs) {
      digits == 1 ? one_digit(row, x, inputs, most) : two_digits(row, x, inputs);
    }
  }

 private:
  static constexpr float TINY = 1e-30F;
  static constexpr float LARGEST = 127.0F;
  static constexpr int MIDDLE = 128;

  Digit* out(int number) {
    return values_.get() + static_cast<std::size_t>(number) * static_cast<std::size_t>(width);
  }

  // Store the first `count` values, cut to the range from 0 to `most`.
  static void put(Digit* to, Ints values, int count, int most) {
    values = values < 0 ? Ints{} : values;
    values = values > most ? Ints{} + most : values;
    const auto digits = __builtin_convertvector(values, Vector<Digit>);
    if (count >= LANES) {
      std::memcpy(to, &digits, sizeof digits);
    } else {
      std::memcpy(to, &digits, static_cast<std::size_t>(count) * sizeof(Digit));
    }
  }

  // A row for `inputs` digits, with zeros behind them.
  Digit* blank(int number, int inputs) {
    Digit* row = out(number);
    std::fill(row + inputs, row + width, Digit{0});
    return row;
  }

  // One digit: `most` steps from the smallest to the largest value.
  void one_digit(int row, const float* x, int inputs, int most) {
    Floats low = broadcast(x[0]), high = low;
    for (int k = 0; k < inputs; k += LANES) {
      const Floats v = load_part(x + k, inputs - k, low);
      low = smaller(low, v);
      high = larger(high, v);
    }
    const float least = smallest(low);
    const float step = std::max((largest(high) - least) / static_cast<float>(most), TINY);
    scales_.get()[row] = step;
    offsets_.get()[row] = least;
    Digit* to = blank(row, inputs);
    for (int k = 0; k < inputs; k += LANES) {
      const Floats v = load_part(x + k, inputs - k, Floats{});
      put(to + k, to_ints((v - least) * (1.0F / step)), inputs - k, most);
    }
  }

  // Two digits: one from -127 to 127, and 254 times its rounding error. Both are stored plus MIDDLE.
  void two_digits(int row, const float* x, int inputs) {
    Floats low = Floats{}, high = Floats{};
    for (int k = 0; k < inputs; k += LANES) {
      const Floats v = load_part(x + k, inputs - k, Floats{});
      low = smaller(low, v);
      high = larger(high, v);
    }
    const float step = std::max(largest(larger(high, -low)) / LARGEST, TINY);
    const float finer = 2.0F * LARGEST;
    scales_.get()[2 * row] = step;
    scales_.get()[2 * row + 1] = step / finer;
    offsets_.get()[row] = 0.0F;
    Digit *upper = blank(2 * row, inputs), *lower = blank(2 * row + 1, inputs);
    for (int k = 0; k < inputs; k += LANES) {
      const Floats v = load_part(x + k, inputs - k, Floats{}) * (1.0F / step);
      const Ints digit = to_ints(v);
      put(upper + k, digit + MIDDLE, inputs - k, MOST_OF_BYTE);
      put(lower + k, to_ints((v - to_floats(digit)) * finer) + MIDDLE, inputs - k, MOST_OF_BYTE);
    }
  }

  Buffer<Digit> values_;
  Buffer<float> scales_;
  Buffer<float> offsets_;
};

}  // namespace qspec
