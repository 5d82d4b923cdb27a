// What Python sees of the tries; `_native.pyi` describes it. One thread at a time calls it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "growth.h"
#include "layout.h"
#include "request.h"
#include "trust.h"

namespace py = pybind11;

namespace qspec {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// The number, or the nearest that fits: what comes off a socket may be any.
std::int64_t saturated(py::handle number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (value == -1 && !overflow && PyErr_Occurred()) throw py::error_already_set();
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  return overflow < 0 ? std::numeric_limits<std::int64_t>::min() : value;
}

// Token ids of a list or another sequence; those that do not fit become negative ones.
std::vector<Token> token_ids_of(py::handle sequence) {
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "token ids are a sequence"));
  if (!items) throw py::error_already_set();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
  PyObject** item = PySequence_Fast_ITEMS(items.ptr());
  std::vector<Token> token_ids(static_cast<std::size_t>(size));
  for (Py_ssize_t at = 0; at < size; ++at) {
    const std::int64_t value = saturated(item[at]);
    const bool fits = value >= 0 && value <= std::numeric_limits<Token>::max();
    token_ids[static_cast<std::size_t>(at)] = fits ? static_cast<Token>(value) : -1;
  }
  return token_ids;
}

// One tree of at most `width` nodes for each trie, padded to `width`: token ids, parents, sources,
// scores, each [n, width], and sizes [n].
// A trie that is missing gives the root alone. `allowed` has a bit for each source that may be proposed.
py::tuple propose(const std::vector<RequestTrie*>& tries, const std::vector<Token>& roots,
                  int width, double floor, Policy policy, unsigned allowed) {
  if (width < 1) throw py::value_error("width must be at least 1");
  if (roots.size() != tries.size()) throw py::value_error("a root is needed for each trie");
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
        tries[at] ? tries[at]->propose(grower, roots[at], policy, floor, width, allowed, tree)
                  : root_alone(roots[at], tree);
    pad(tree, size, width);
    sizes.mutable_at(row) = size;
  }
  return py::make_tuple(token_ids, parents, sources, scores, sizes);
}

// The arrays of `PackedTrees` for [n, width] parents and [n] sizes.
py::tuple lay_out(const Array<std::int32_t>& parents, const Array<std::int32_t>& sizes) {
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

// How many nodes of each source there are, without roots and padding.
std::vector<int> count_by_source(const py::array_t<std::uint8_t>& sources,
                                 const py::array_t<std::int32_t>& sizes) {
  std::vector<int> counts(kSources);
  for (py::ssize_t row = 0; row < sizes.shape(0); ++row) {
    for (std::int32_t node = 1; node < sizes.at(row); ++node) ++counts.at(sources.at(row, node));
  }
  return counts;
}

// What the target said at each position: add to `judged` and `accepted` [kSources, positions].
// `paths` are the accepted nodes of each tree. See `Positions`.
void count_by_position(const Array<std::int32_t>& parents, const Array<std::uint8_t>& sources,
                       const Array<std::int32_t>& sizes, const std::vector<std::vector<int>>& paths,
                       py::array_t<std::int64_t>& judged, py::array_t<std::int64_t>& accepted) {
  const py::ssize_t n = sizes.shape(0), positions = judged.shape(1);
  constexpr py::ssize_t kOffPath = -1;
  std::vector<py::ssize_t> depths;  // of the accepted nodes; the root's is 0
  for (py::ssize_t row = 0; row < n; ++row) {
    depths.assign(static_cast<std::size_t>(sizes.at(row)), kOffPath);
    depths.front() = 0;
    const std::vector<int>& path = paths.at(static_cast<std::size_t>(row));
    for (std::size_t step = 0; step < path.size(); ++step) {
      depths.at(static_cast<std::size_t>(path[step])) = static_cast<py::ssize_t>(step) + 1;
    }
    for (std::int32_t node = 1; node < sizes.at(row); ++node) {
      const py::ssize_t above = depths.at(static_cast<std::size_t>(parents.at(row, node)));
      if (above == kOffPath) continue;
      const py::ssize_t position = std::min(above, positions - 1);
      ++judged.mutable_at(sources.at(row, node), position);
      const bool is_right = depths[static_cast<std::size_t>(node)] != kOffPath;
      accepted.mutable_at(sources.at(row, node), position) += is_right;
    }
  }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.attr("POLICIES") = py::make_tuple("estimate", "frequency", "recency");

  py::class_<Trust, std::shared_ptr<Trust>>(module, "Trust")
      .def(py::init<int, bool>(), py::arg("max_match"), py::arg("learns") = true);

  py::class_<RequestTrie>(module, "Trie")
      .def(py::init([](py::handle usable_prompt, int last_prompt_id, int vocab_size,
                       int max_request_tokens, int max_lookup_tokens, int max_match,
                       int max_cursors, int max_scan, std::shared_ptr<Trust> trust,
                       unsigned sources, int max_width) {
             if (max_width < 1) throw py::value_error("max_width must be at least 1");
             if (trust->max_match() != max_match) throw py::value_error("not this trust's length");
             const Limits limits{vocab_size, max_request_tokens, max_lookup_tokens,
                                 max_match,  max_cursors,        max_scan};
             return std::make_unique<RequestTrie>(token_ids_of(usable_prompt), last_prompt_id,
                                                  limits, std::move(trust), sources, max_width);
           }),
           py::arg("usable_prompt"), py::arg("last_prompt_id"), py::kw_only(),
           py::arg("vocab_size"), py::arg("max_request_tokens"), py::arg("max_lookup_tokens"),
           py::arg("max_match"), py::arg("max_cursors"), py::arg("max_scan"), py::arg("trust"),
           py::arg("sources"), py::arg("max_width"))
      .def_property_readonly("output_len", &RequestTrie::output_len)
      .def_property_readonly("size", &RequestTrie::size)
      .def_property_readonly("draft_size", &RequestTrie::draft_size)
      .def_property_readonly("bytes", &RequestTrie::bytes)
      .def_property_readonly("last_token", &RequestTrie::last_token)
      .def("insert",
           [](RequestTrie& trie, int source, py::handle stream_id, py::handle base_len,
              py::handle start, py::handle token_ids, bool greedy) {
             return static_cast<int>(trie.insert(static_cast<Source>(source), saturated(stream_id),
                                                 saturated(base_len), saturated(start),
                                                 token_ids_of(token_ids), greedy));
           })
      .def("commit", [](RequestTrie& trie,
                        py::handle token_ids) { trie.commit(token_ids_of(token_ids)); })
      .def("evict", &RequestTrie::evict)
      .def("check_integrity", &RequestTrie::check_integrity);

  module.def("propose", [](const std::vector<RequestTrie*>& tries, const std::vector<Token>& roots,
                           int width, double floor, int policy, unsigned sources) {
    return propose(tries, roots, width, floor, static_cast<Policy>(policy), sources);
  }, py::arg("tries"), py::arg("roots"), py::arg("width"), py::arg("floor"), py::arg("policy"),
             py::arg("sources") = ~0u);
  module.def("lay_out", &lay_out);
  module.def("count_by_source", &count_by_source);
  module.def("count_by_position", &count_by_position, py::arg("parents"), py::arg("sources"),
             py::arg("sizes"), py::arg("paths"), py::arg("judged").noconvert(),
             py::arg("accepted").noconvert());
}

}  // namespace qspec
