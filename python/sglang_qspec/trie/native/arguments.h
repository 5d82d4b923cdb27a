// Checks and converts arguments from Python. Errors name the argument, its value and what is allowed.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "arena.h"

namespace qspec {

namespace py = pybind11;

// pybind11 accepts only safe casts for these arrays: an int64 array is refused for int32.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Upper limits of a request's caps; they keep node numbers within 32 bits.
constexpr int kMostTokens = 1 << 26;
constexpr int kMostMatch = 1 << 16;
constexpr int kMostWidth = 1 << 20;

inline void check_range(const std::string& name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  if (value < least || value > most) {
    throw py::value_error(name + " is " + std::to_string(value) + ", but must be from " +
                          std::to_string(least) + " to " + std::to_string(most));
  }
}

inline std::string item(const char* name, py::ssize_t row) {
  return std::string(name) + "[" + std::to_string(row) + "]";
}

inline std::string item(const char* name, py::ssize_t row, py::ssize_t column) {
  return std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(column) + "]";
}

inline void check_shape(const char* name, const py::array& array,
                        const std::vector<py::ssize_t>& shape) {
  const std::vector<py::ssize_t> actual(array.shape(), array.shape() + array.ndim());
  if (actual != shape) {
    const auto text = [](const std::vector<py::ssize_t>& sizes) {
      std::string joined;
      for (const py::ssize_t size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
      return "[" + joined + "]";
    };
    throw py::value_error(std::string(name) + " has the shape " + text(actual) + ", but must have " +
                          text(shape));
  }
}

// The number clamped to 64 bits, because numbers from a socket may have any size.
inline std::int64_t saturated(py::handle number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (value == -1 && !overflow && PyErr_Occurred()) throw py::error_already_set();
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  return overflow < 0 ? std::numeric_limits<std::int64_t>::min() : value;
}

// Token ids of a list or another sequence; ids that do not fit a Token become -1.
inline std::vector<Token> token_ids_of(py::handle sequence) {
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "token ids are a sequence"));
  if (!items) throw py::error_already_set();
  std::vector<Token> token_ids;
  token_ids.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
  // The size is read in each round because converting an item may run Python code that changes it.
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(items.ptr()); ++at) {
    const auto number =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items.ptr(), at));
    const std::int64_t value = saturated(number);
    const bool fits = value >= 0 && value <= std::numeric_limits<Token>::max();
    token_ids.push_back(fits ? static_cast<Token>(value) : -1);
  }
  return token_ids;
}

// Token ids that must be in the vocabulary: committed tokens, or the usable part of a prompt.
inline std::vector<Token> own_token_ids_of(py::handle sequence, const char* name, int vocab_size,
                                           int most) {
  std::vector<Token> token_ids = token_ids_of(sequence);
  check_range(std::string("len(") + name + ")", static_cast<std::int64_t>(token_ids.size()), 0, most);
  for (std::size_t at = 0; at < token_ids.size(); ++at) {
    if (token_ids[at] >= 0 && token_ids[at] < vocab_size) continue;
    const auto given = py::reinterpret_steal<py::object>(
        PySequence_GetItem(sequence.ptr(), static_cast<Py_ssize_t>(at)));
    if (!given) throw py::error_already_set();
    throw py::value_error(item(name, static_cast<py::ssize_t>(at)) + " is " +
                          std::string(py::str(given)) + ", but a token id is from 0 to " +
                          std::to_string(vocab_size - 1));
  }
  return token_ids;
}

// Check a batch of trees: parents int32 [n, width], each parent before its child, and sizes int32
// [n] from 1 to width.
inline void check_trees(const Array<std::int32_t>& parents, const Array<std::int32_t>& sizes) {
  if (sizes.ndim() != 1 || parents.ndim() != 2) {
    throw py::value_error("parents has " + std::to_string(parents.ndim()) + " dimensions and sizes " +
                          std::to_string(sizes.ndim()) + ", but they must be [n, width] and [n]");
  }
  const py::ssize_t n = sizes.shape(0), width = parents.shape(1);
  check_shape("parents", parents, {n, width});
  if (n > 0) check_range("parents' width", width, 1, kMostWidth);
  for (py::ssize_t row = 0; row < n; ++row) {
    if (sizes.data()[row] < 1 || sizes.data()[row] > width) {
      check_range(item("sizes", row), sizes.data()[row], 1, width);
    }
    const std::int32_t* parent = parents.data() + row * width;
    for (py::ssize_t node = 1; node < width; ++node) {
      if (parent[node] < 0 || parent[node] >= node) {
        check_range(item("parents", row, node), parent[node], 0, node - 1);
      }
    }
  }
}

}  // namespace qspec
