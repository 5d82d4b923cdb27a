// Converts a tree to the arrays that SGLang's tree verification reads.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace qspec {

struct Layout {
  bool* mask;                  // [width, width]: [i, j] is true if node j is node i or an ancestor of it
  std::int64_t* depths;        // [width]: distance from the root
  std::int64_t* next_token;    // [width]: first child, or -1 for none
  std::int64_t* next_sibling;  // [width]: next child of the same parent, or -1 for none
};

// Write the arrays of one tree. Nodes from `size` on are padding, which gets no links.
inline void lay_out_tree(const std::int32_t* parents, int size, int width, const Layout& layout) {
  std::fill(layout.next_token, layout.next_token + width, -1);
  std::fill(layout.next_sibling, layout.next_sibling + width, -1);
  const auto row_of = [&](int node) { return layout.mask + std::ptrdiff_t{node} * width; };
  for (int node = 0; node < width; ++node) {
    bool* row = row_of(node);
    if (node == 0) {
      std::fill(row, row + width, false);
      layout.depths[0] = 0;
    } else {
      const int parent = parents[node];
      std::copy(row_of(parent), row_of(parent) + width, row);
      layout.depths[node] = layout.depths[parent] + 1;
    }
    row[node] = true;
  }
  // From the last to the first, so that each node heads the list of its parent's children.
  for (int node = std::min(size, width) - 1; node > 0; --node) {
    layout.next_sibling[node] = layout.next_token[parents[node]];
    layout.next_token[parents[node]] = node;
  }
}

}  // namespace qspec
