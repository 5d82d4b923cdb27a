// The Python bindings of the tries, described in `_native.pyi`. Not thread-safe.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "growth.h"
#include "layout.h"
#include "request.h"
#include "trust.h"

namespace qspec {
namespace {

// One tree of at most `width` nodes for each trie, padded to `width`. Returns token ids, parents,
// sources and scores, each [n, width], and sizes [n]. A null trie gives the root alone. `allowed` has
// a bit for each source that may be proposed.
py::tuple propose(const std::vector<RequestTrie*>& tries, const std::vector<Token>& roots,
                  int width, double floor, unsigned allowed) {
  check_range("width", width, 1, kMostWidth);
  if (!(floor >= 0.0 && floor <= 1.0)) {
    throw py::value_error("floor is " + std::to_string(floor) + ", but must be from 0 to 1");
  }
  if (roots.size() != tries.size()) {
    throw py::value_error("there are " + std::to_string(roots.size()) + " roots, but " +
                          std::to_string(tries.size()) + " tries");
  }
  static Grower grower;
  const auto n = static_cast<py::ssize_t>(tries.size());
  py::array_t<Token> token_ids({n, py::ssize_t{width}});
  py::array_t<std::int32_t> parents({n, py::ssize_t{width}});
  py::array_t<std::uint8_t> sources({n, py::ssize_t{width}});
  py::array_t<float> scores({n, py::ssize_t{width}});
  py::array_t<std::int32_t> sizes(n);
  for (py::ssize_t row = 0; row < n; ++row) {
    const auto at = static_cast<std::size_t>(row);
    const TreeRow tree{token_ids.mutable_data(row, 0), parents.mutable_data(row, 0),
                       sources.mutable_data(row, 0), scores.mutable_data(row, 0)};
    const int size =
        tries[at] ? tries[at]->propose(grower, roots[at], floor, width, allowed, tree)
                  : root_alone(roots[at], tree);
    pad(tree, size, width);
    sizes.mutable_at(row) = size;
  }
  return py::make_tuple(token_ids, parents, sources, scores, sizes);
}

// The arrays of `TreeLayout` for [n, width] parents and [n] sizes.
py::tuple lay_out(const Array<std::int32_t>& parents, const Array<std::int32_t>& sizes) {
  check_trees(parents, sizes);
  const py::ssize_t n = parents.shape(0), width = parents.shape(1);
  py::array_t<bool> mask({n, width, width});
  py::array_t<std::int64_t> depths({n, width});
  py::array_t<std::int64_t> next_token({n, width});
  py::array_t<std::int64_t> next_sibling({n, width});
  for (py::ssize_t row = 0; row < n; ++row) {
    lay_out_tree(parents.data(row, 0), sizes.at(row), static_cast<int>(width),
                 {mask.mutable_data(row, 0, 0), depths.mutable_data(row, 0),
                  next_token.mutable_data(row, 0), next_sibling.mutable_data(row, 0)});
  }
  return py::make_tuple(mask, depths, next_token, next_sibling);
}

void check_sources(const Array<std::uint8_t>& sources, const Array<std::int32_t>& sizes) {
  if (sizes.ndim() != 1 || sources.ndim() != 2) {
    throw py::value_error("sources has " + std::to_string(sources.ndim()) + " dimensions and sizes " +
                          std::to_string(sizes.ndim()) + ", but they must be [n, width] and [n]");
  }
  check_shape("sources", sources, {sizes.shape(0), sources.shape(1)});
  for (py::ssize_t row = 0; row < sizes.shape(0); ++row) {
    check_range(item("sizes", row), sizes.at(row), 1, sources.shape(1));
    for (py::ssize_t node = 1; node < sizes.at(row); ++node) {
      if (sources.at(row, node) >= kSources) {
        check_range(item("sources", row, node), sources.at(row, node), 0, kSources - 1);
      }
    }
  }
}

// Number of nodes of each source, without roots and padding.
std::vector<int> count_by_source(const Array<std::uint8_t>& sources,
                                 const Array<std::int32_t>& sizes) {
  check_sources(sources, sizes);
  std::vector<int> counts(kSources);
  for (py::ssize_t row = 0; row < sizes.shape(0); ++row) {
    for (std::int32_t node = 1; node < sizes.at(row); ++node) ++counts[sources.at(row, node)];
  }
  return counts;
}

void check_paths(const Array<std::int32_t>& sizes, const std::vector<std::vector<int>>& paths) {
  if (paths.size() != static_cast<std::size_t>(sizes.shape(0))) {
    throw py::value_error("there are " + std::to_string(paths.size()) + " paths, but " +
                          std::to_string(sizes.shape(0)) + " trees");
  }
  for (py::ssize_t row = 0; row < sizes.shape(0); ++row) {
    const std::vector<int>& path = paths[static_cast<std::size_t>(row)];
    for (std::size_t step = 0; step < path.size(); ++step) {
      check_range(item("paths", row, static_cast<py::ssize_t>(step)), path[step], 0,
                  sizes.at(row) - 1);
    }
  }
}

// Add to `judged` and `accepted` [kSources, positions]; `paths` are the accepted nodes of each tree.
// `DraftTrees.count_by_position` describes the counts.
void count_by_position(const Array<std::int32_t>& parents, const Array<std::uint8_t>& sources,
                       const Array<std::int32_t>& sizes, const std::vector<std::vector<int>>& paths,
                       py::array_t<std::int64_t>& judged, py::array_t<std::int64_t>& accepted) {
  check_trees(parents, sizes);
  check_sources(sources, sizes);
  check_shape("sources", sources, {parents.shape(0), parents.shape(1)});
  check_paths(sizes, paths);
  const py::ssize_t n = sizes.shape(0), positions = judged.ndim() == 2 ? judged.shape(1) : 0;
  check_range("the number of positions of judged", positions, 1,
              std::numeric_limits<std::int32_t>::max());
  check_shape("judged", judged, {kSources, positions});
  check_shape("accepted", accepted, {kSources, positions});
  constexpr py::ssize_t kOffPath = -1;
  std::vector<py::ssize_t> depths;  // of the accepted nodes; the root's is 0
  for (py::ssize_t row = 0; row < n; ++row) {
    depths.assign(static_cast<std::size_t>(sizes.at(row)), kOffPath);
    depths.front() = 0;
    const std::vector<int>& path = paths[static_cast<std::size_t>(row)];
    for (std::size_t step = 0; step < path.size(); ++step) {
      depths[static_cast<std::size_t>(path[step])] = static_cast<py::ssize_t>(step) + 1;
    }
    for (std::int32_t node = 1; node < sizes.at(row); ++node) {
      const py::ssize_t above = depths[static_cast<std::size_t>(parents.at(row, node))];
      if (above == kOffPath) continue;
      const py::ssize_t position = std::min(above, positions - 1);
      ++judged.mutable_at(sources.at(row, node), position);
      const bool is_right = depths[static_cast<std::size_t>(node)] != kOffPath;
      accepted.mutable_at(sources.at(row, node), position) += is_right;
    }
  }
}

std::shared_ptr<Trust> make_trust(int max_match, bool learns) {
  check_range("max_match", max_match, 1, kMostMatch);
  return std::make_shared<Trust>(max_match, learns);
}

std::unique_ptr<RequestTrie> make_trie(py::handle usable_prompt, int last_prompt_id, int vocab_size,
                                       int max_request_tokens, int max_lookup_tokens, int max_match,
                                       int max_cursors, int max_scan, std::shared_ptr<Trust> trust,
                                       unsigned sources, int max_width) {
  check_range("vocab_size", vocab_size, 1, std::numeric_limits<int>::max());
  check_range("max_request_tokens", max_request_tokens, 1, kMostTokens);
  check_range("max_match", max_match, 1, kMostMatch);
  check_range("max_lookup_tokens", max_lookup_tokens, 2 * max_match, kMostTokens);
  check_range("max_cursors", max_cursors, 1, kMostTokens);
  check_range("max_scan", max_scan, 1, kMostTokens);
  check_range("max_width", max_width, 1, std::numeric_limits<int>::max());
  check_range("last_prompt_id", last_prompt_id, 0, vocab_size - 1);
  if (trust->max_match() != max_match) {
    throw py::value_error("max_match is " + std::to_string(max_match) + ", but trust's is " +
                          std::to_string(trust->max_match()));
  }
  const Limits limits{vocab_size, max_request_tokens, max_lookup_tokens,
                      max_match,  max_cursors,        max_scan};
  return std::make_unique<RequestTrie>(
      own_token_ids_of(usable_prompt, "usable_prompt", vocab_size, max_lookup_tokens),
      last_prompt_id, limits, std::move(trust), sources, max_width);
}

int insert(RequestTrie& trie, int source, py::handle stream_id, py::handle base_len,
           py::handle start, py::handle token_ids, py::handle second_ids, bool greedy) {
  if (draft_kind(source, greedy) == kKinds) {
    std::string allowed;
    for (int each = 0; each < kSources; ++each) {
      if (draft_kind(each, false) == kKinds) continue;
      allowed += (allowed.empty() ? "" : ", ") + std::to_string(each) + " (" + kNames[each] + ")";
    }
    throw py::value_error("source is " + std::to_string(source) + ", but a draft's is " +
                          allowed);
  }
  const std::vector<Token> tokens = token_ids_of(token_ids), seconds = token_ids_of(second_ids);
  if (!seconds.empty() && seconds.size() != tokens.size()) {
    throw py::value_error("there are " + std::to_string(seconds.size()) + " second_ids, but " +
                          std::to_string(tokens.size()) + " token_ids");
  }
  return trie.insert(static_cast<Source>(source), saturated(stream_id), saturated(base_len),
                     saturated(start), tokens, seconds, greedy);
}

}  // namespace

PYBIND11_MODULE(_native, module) {

  module.attr("STREAM_TOKENS") = kStreamTokens;
  module.attr("MOST_TOKENS") = kMostTokens;
  module.attr("MOST_MATCH") = kMostMatch;

  py::class_<Trust, std::shared_ptr<Trust>>(module, "Trust")
      .def(py::init(&make_trust), py::arg("max_match"), py::arg("learns") = true);

  py::class_<RequestTrie>(module, "Trie")
      .def(py::init(&make_trie),
           py::arg("usable_prompt"), py::arg("last_prompt_id"), py::kw_only(),
           py::arg("vocab_size"), py::arg("max_request_tokens"), py::arg("max_lookup_tokens"),
           py::arg("max_match"), py::arg("max_cursors"), py::arg("max_scan"), py::arg("trust").none(false),
           py::arg("sources"), py::arg("max_width"))
      .def_property_readonly("output_len", &RequestTrie::output_len)
      .def_property_readonly("size", &RequestTrie::size)
      .def_property_readonly("draft_size", &RequestTrie::draft_size)
      .def_property_readonly("bytes", &RequestTrie::bytes)
      .def_property_readonly("last_token", &RequestTrie::last_token)
      .def("insert_chunk", &insert)
      .def("commit",
           [](RequestTrie& trie, py::handle token_ids) {
             trie.commit(own_token_ids_of(token_ids, "token_ids", trie.vocab_size(), kMostTokens));
           })
      .def("match_length", &RequestTrie::longest_match)
      .def("evict", &RequestTrie::evict)
      .def("check_integrity", &RequestTrie::check_integrity);

  module.def("propose", &propose, py::arg("tries"), py::arg("roots"), py::arg("width"),
             py::arg("floor"), py::arg("sources") = ~0u);
  module.def("lay_out", &lay_out);
  module.def("count_by_source", &count_by_source);
  module.def("count_by_position", &count_by_position, py::arg("parents"), py::arg("sources"),
             py::arg("sizes"), py::arg("paths"), py::arg("judged").noconvert(),
             py::arg("accepted").noconvert());
}

}  // namespace qspec
