// Checks arguments from Python: errors name the argument, its value and what is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace qspec {

// Raise a ValueError in Python with the text of `describe`, which is called only on failure.
template <typename Describe>
void check(bool holds, Describe describe) {
  if (!holds) throw std::invalid_argument(describe());
}

inline void check_range(const std::string& name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  check(value >= least && value <= most, [&] {
    return name + " is " + std::to_string(value) + ", but must be from " + std::to_string(least) +
           " to " + std::to_string(most);
  });
}

// Check that all `items` of an argument are in a range; the error names the first one outside.
template <typename Item>
void check_items(const std::string& name, const Item* items, std::int64_t count, std::int64_t least,
                 std::int64_t most) {
  Item low = 0, high = 0;  // branchless, so that the compiler vectorises the loop
  if (count > 0) low = high = items[0];
  for (std::int64_t at = 0; at < count; ++at) {
    low = std::min(low, items[at]);
    high = std::max(high, items[at]);
  }
  if (count == 0 || (low >= least && high <= most)) return;
  for (std::int64_t at = 0; at < count; ++at) {
    check_range(name + "[" + std::to_string(at) + "]", items[at], least, most);
  }
}

}  // namespace qspec
