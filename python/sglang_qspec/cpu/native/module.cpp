// Operations of decoders for CPUs with AVX2, or AVX-512 and VNNI; `_native.pyi` describes them.
// All arrays are numpy arrays in C order. A decoder keeps references to its arrays.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "arguments.h"
#include "decoder.h"
#include "dense.h"
#include "dense_vectors.h"
#include "product.h"
#include "rows.h"
#include "tiles.h"
#ifdef QSPEC_TILES
#include "dense_tiles.h"
#endif

#ifndef QSPEC_MODULE
#define QSPEC_MODULE _native
#endif

namespace py = pybind11;

namespace qspec {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int MOST_THREADS = 1024;
constexpr std::int64_t MOST_POSITIONS = std::int64_t{1} << 28;

using Sizes = std::vector<py::ssize_t>;

Sizes shape_of(const py::array& array) {
  return Sizes(array.shape(), array.shape() + array.ndim());
}

std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const py::ssize_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

void check_shape(const std::string& name, const py::array& array, const Sizes& shape) {
  check(shape_of(array) == shape, [&] {
    return name + " has the shape " + text_of(shape_of(array)) + ", but must have " + text_of(shape);
  });
}

void check_dimensions(const char* name, const py::array& array, py::ssize_t count) {
  check(array.ndim() == count, [&] {
    return std::string(name) + " has the shape " + text_of(shape_of(array)) + ", but must have " +
           std::to_string(count) + " dimensions";
  });
}

void check_work(int digits, int threads) {
  check_range("digits", digits, 1, 2);
  check_range("threads", threads, 1, MOST_THREADS);
}

std::shared_ptr<PackedInt8> pack(const Array<std::int8_t>& q, const Array<float>& scale) {
  check_dimensions("q", q, 2);
  check_range("q.shape[0] (outputs)", q.shape(0), 1, MOST_OUTPUTS);
  check_range("q.shape[1] (inputs)", q.shape(1), 1, MOST_INPUTS);
  check_shape("scale", scale, {q.shape(0)});
  return std::make_shared<PackedInt8>(q.data(), scale.data(), static_cast<int>(q.shape(0)),
                                      static_cast<int>(q.shape(1)));
}

Array<float> multiply(const PackedInt8& weight, const Array<float>& x, int digits, int threads) {
  check_dimensions("x", x, 2);
  check_range("x.shape[0] (rows)", x.shape(0), 0, MOST_ROWS_OF_X);
  check_shape("x", x, {x.shape(0), weight.inputs()});
  check_work(digits, threads);
  static thread_local Digits values;
  Array<float> y({x.shape(0), py::ssize_t{weight.outputs()}});
  if (x.shape(0) > 0) {
    values.assign(x.data(), static_cast<int>(x.shape(0)), weight.inputs(), digits,
                  weight.most_of_digit());
    weight.multiply(values, y.mutable_data(), false, threads);
  }
  return y;
}

// A decoder over KV in float32, or in bfloat16 as uint16.
class AnyDecoder {
 public:
  AnyDecoder(const py::list& layers, const Array<float>& final_norm, const Array<float>& cos_sin,
             int heads, int kv_heads, float eps)
      : layers_(layers), final_norm_(final_norm), cos_sin_(cos_sin) {
    check_dimensions("final_norm", final_norm, 1);
    check_dimensions("cos_sin", cos_sin, 2);
    check_range("cos_sin.shape[0] (positions)", cos_sin.shape(0), 1, MOST_POSITIONS);
    check_range("cos_sin.shape[1] (head_dim)", cos_sin.shape(1), 1, MOST_INPUTS);
    check_range("len(final_norm) (hidden)", final_norm.size(), 1, MOST_INPUTS);
    check(eps >= 0.0F && eps < 1.0F,
          [&] { return "eps is " + std::to_string(eps) + ", but must be from 0 to 1"; });
    check_range("len(layers)", static_cast<std::int64_t>(layers_.size()), 1, MOST_INPUTS);
    hidden_ = static_cast<int>(final_norm.size());
    const Shape shape{hidden_, heads, kv_heads, static_cast<int>(cos_sin.shape(1)), eps};
    const py::object keys = parts_of(0)[KEYS];
    if (py::isinstance<Array<float>>(keys)) {
      decoder_ = read<float, float>(shape);
    } else {
      decoder_ = read<BFloat16, std::uint16_t>(shape);
    }
  }

  void forward(Array<float>& hidden, const Array<std::int64_t>& positions,
               const Array<std::int64_t>& slots, const Array<std::int64_t>& rows,
               const Array<std::int32_t>& table, int digits, int threads) {
    const py::ssize_t n = positions.size();
    check_dimensions("positions", positions, 1);
    check_range("len(positions)", n, 0, MOST_ROWS_OF_X);
    check_shape("hidden", hidden, {n, hidden_});
    check_shape("slots", slots, {n});
    check_shape("rows", rows, {n});
    check_dimensions("table", table, 2);
    check_work(digits, threads);
    const py::ssize_t reach = std::min(table.shape(1), cos_sin_.shape(0));
    check_items("positions", positions.data(), n, 0, reach - 1);
    check_items("slots", slots.data(), n, 0, slots_ - 1);
    check_items("rows", rows.data(), n, 0, table.shape(0) - 1);
    check_table(positions.data(), rows.data(), n, table);
    if (n == 0) return;
    const Tokens tokens{static_cast<int>(n), positions.data(), slots.data(),
                        rows.data(),         table.data(),     table.shape(1)};
    float* data = hidden.mutable_data();
    const py::gil_scoped_release released;
    const std::lock_guard<std::mutex> alone(in_use_);  // the buffers serve one pass at a time
    std::visit([&](auto& decoder) { decoder->forward(data, tokens, digits, threads); }, decoder_);
  }

 private:
  static constexpr std::size_t INPUT_NORM = 4, POST_NORM = 5, KEYS = 6, VALUES = 7, PARTS = 8;

  // Attention reads the slots of all positions up to a token's own. The tokens of a KV row are adjacent.
  void check_table(const std::int64_t* positions, const std::int64_t* rows, py::ssize_t n,
                   const Array<std::int32_t>& table) const {
    for (py::ssize_t t = 0; t < n;) {
      const std::int64_t row = rows[t];
      std::int64_t last = 0;
      for (; t < n && rows[t] == row; ++t) last = std::max(last, positions[t]);
      const std::int32_t* slots = table.data() + row * table.shape(1);
      check_items("table[" + std::to_string(row) + "]", slots, last + 1, 0, slots_ - 1);
    }
  }

  py::tuple parts_of(std::size_t number) const {
    const py::object layer = layers_[number];
    const bool fits = py::isinstance<py::tuple>(layer) && py::len(layer) == PARTS;
    check(fits, [&] {
      return name_of(number) + " must be a tuple of qkv, out, gate_up, down, two norms, keys and " +
             "values";
    });
    return layer;
  }

  static std::string name_of(std::size_t number) { return "layers[" + std::to_string(number) + "]"; }

  template <typename KV, typename Stored>
  std::unique_ptr<Decoder<KV>> read(const Shape& shape) {
    static_assert(sizeof(KV) == sizeof(Stored));
    std::vector<Layer<KV>> layers;
    for (std::size_t number = 0; number < layers_.size(); ++number) {
      const py::tuple parts = parts_of(number);
      const std::string name = name_of(number) + ": ";
      Layer<KV> layer{};
      layer.qkv = weight(parts[0], name + "qkv");
      layer.out = weight(parts[1], name + "out");
      layer.gate_up = weight(parts[2], name + "gate_up");
      layer.down = weight(parts[3], name + "down");
      layer.input_norm = norm(parts[INPUT_NORM], name + "the norm before attention");
      layer.post_norm = norm(parts[POST_NORM], name + "the norm before the MLP");
      layer.keys = reinterpret_cast<KV*>(pool<Stored>(parts[KEYS], name + "keys", shape));
      layer.values = reinterpret_cast<KV*>(pool<Stored>(parts[VALUES], name + "values", shape));
      layers.push_back(std::move(layer));
    }
    return std::make_unique<Decoder<KV>>(shape, std::move(layers), final_norm_.data(),
                                         cos_sin_.data());
  }

  static std::shared_ptr<PackedInt8> weight(const py::object& part, const std::string& name) {
    check(py::isinstance<PackedInt8>(part), [&] { return name + " must be a PackedInt8"; });
    return part.cast<std::shared_ptr<PackedInt8>>();
  }

  const float* norm(const py::object& weight, const std::string& name) const {
    check(py::isinstance<Array<float>>(weight),
          [&] { return name + " must be a float32 array in C order"; });
    const auto array = py::reinterpret_borrow<Array<float>>(weight);
    check_shape(name, array, {hidden_});
    return array.data();
  }

  // All pools must have the same number of slots.
  template <typename Stored>
  Stored* pool(const py::object& buffer, const std::string& name, const Shape& shape) {
    check(py::isinstance<Array<Stored>>(buffer), [&] {
      return name + " must be a float32 or uint16 array in C order, of one type in all layers";
    });
    auto array = py::reinterpret_borrow<Array<Stored>>(buffer);
    if (slots_ < 0 && array.ndim() > 0) slots_ = array.shape(0);
    check_shape(name, array, {std::max(slots_, py::ssize_t{0}), shape.kv_heads, shape.head_dim});
    check(array.writeable(), [&] { return name + " must be writeable"; });
    return array.mutable_data();
  }

  py::tuple layers_;  // a copy, which keeps the arrays alive
  Array<float> final_norm_, cos_sin_;
  int hidden_ = 0;
  py::ssize_t slots_ = -1;  // slots of each pool; -1 before the first pool
  std::variant<std::unique_ptr<Decoder<float>>, std::unique_ptr<Decoder<BFloat16>>> decoder_;
  std::mutex in_use_;
};

// Run `work` with a null pointer of the type of the values: bfloat16 or float32.
template <typename Work>
void with_type(bool bfloat16, Work work) {
  const py::gil_scoped_release released;
  if (bfloat16) {
    work(static_cast<BFloat16*>(nullptr));
  } else {
    work(static_cast<float*>(nullptr));
  }
}

template <typename T>
T* at(std::uintptr_t address, T*) {
  return reinterpret_cast<T*>(address);
}

void rms_norm_at(std::uintptr_t from, std::uintptr_t weight, std::uintptr_t to, std::int64_t rows,
                 int width, float eps, bool bfloat16, int threads) {
  with_type(bfloat16, [&](auto* type) {
    rms_norm(at(from, type), reinterpret_cast<const float*>(weight), at(to, type), rows, width, eps,
             threads);
  });
}

void silu_and_mul_at(std::uintptr_t from, std::uintptr_t to, std::int64_t rows, int width,
                     bool bfloat16, int threads) {
  with_type(bfloat16, [&](auto* type) {
    silu_and_mul(at(from, type), at(to, type), rows, width, threads);
  });
}

void rotate_at(std::uintptr_t rows, std::int64_t count, std::int64_t stride, int heads, int dim,
               std::uintptr_t cos_sin, bool bfloat16, int threads) {
  with_type(bfloat16, [&](auto* type) {
    rotate(at(rows, type), count, stride, heads, dim, reinterpret_cast<const float*>(cos_sin),
           threads);
  });
}

void store_rows_at(std::uintptr_t rows, std::int64_t count, std::int64_t stride, std::int64_t width,
                   std::uintptr_t slots, std::uintptr_t pool, bool bfloat16) {
  with_type(bfloat16, [&](auto* type) {
    store_rows(at(rows, type), count, stride, width, reinterpret_cast<const std::int64_t*>(slots),
               at(pool, type));
  });
}

void multiply_dense_at(std::uintptr_t x, std::uintptr_t weight, std::uintptr_t bias,
                       std::uintptr_t addend, std::uintptr_t y, std::int64_t rows, int inputs,
                       int outputs, bool bfloat16, int threads) {
  check(inputs % INPUT_STEP == 0 && outputs % OUTPUT_STEP == 0, [&] {
    return "the weight is " + text_of({outputs, inputs}) + ", but must be of multiples of " +
           text_of({OUTPUT_STEP, INPUT_STEP});
  });
  with_type(bfloat16, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Dense<T> dense{at(weight, type), at(bias, type), at(addend, type), at(y, type),
                         rows,             inputs,         outputs};
#ifdef QSPEC_TILES
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (may_use_tiles()) {
        static thread_local RowTiles tiles;
        tiles.assign(at(x, type), rows, inputs);
        TileProduct(dense).multiply(tiles, threads);
        return;
      }
    }
#endif
    static thread_local FloatRows floats;
    floats.assign(at(x, type), rows, inputs);
    VectorProduct<T>(dense).multiply(floats, threads);
  });
}

// The requests of a pass, with the arrays that describe them.
class AnyRowAttention {
 public:
  AnyRowAttention(const Array<std::int32_t>& slots, const Array<std::int64_t>& lengths,
                  const Array<std::int64_t>& rows, const Array<bool>& visible, int heads,
                  int kv_heads, int dim, float scale)
      : slots_(slots), visible_(visible), attention_(heads, kv_heads, dim, scale) {
    const py::ssize_t n = lengths.size();
    check_dimensions("lengths", lengths, 1);
    check_shape("rows", rows, {n});
    check_dimensions("slots", slots, 2);
    check_dimensions("visible", visible, 3);
    const py::ssize_t widest = visible.shape(1);
    check_shape("visible", visible, {n, widest, widest});
    check_shape("slots", slots, {n, slots.shape(1)});
    check_range("dim", dim, HEAD_STEP, MOST_INPUTS);
    check(dim % HEAD_STEP == 0, [&] {
      return "dim is " + std::to_string(dim) + ", but must be a multiple of " +
             std::to_string(HEAD_STEP);
    });
    check_range("kv_heads", kv_heads, 1, MOST_INPUTS);
    check(heads % kv_heads == 0, [&] {
      return "heads is " + std::to_string(heads) + ", but must be a multiple of " +
             std::to_string(kv_heads);
    });
    check_items("lengths", lengths.data(), n, 1, slots.shape(1));
    check_items("rows", rows.data(), n, 1, widest);
    std::vector<Request> requests;
    std::int64_t first = 0;
    for (py::ssize_t r = 0; r < n; ++r) {
      check_range("rows[" + std::to_string(r) + "]", rows.data()[r], 1, lengths.data()[r]);
      const std::int32_t* own = slots_.data() + r * slots.shape(1);
      most_ = std::max(most_, *std::max_element(own, own + lengths.data()[r]));
      check_items("slots[" + std::to_string(r) + "]", own, lengths.data()[r], 0, MOST_POSITIONS);
      requests.push_back({first, static_cast<int>(rows.data()[r]),
                          static_cast<int>(lengths.data()[r]), own,
                          visible_.data() + r * widest * widest, widest});
      first += rows.data()[r];
    }
    attention_.begin(std::move(requests));
  }

  void attend(std::uintptr_t query, std::int64_t stride, std::uintptr_t keys, std::uintptr_t values,
              std::int64_t slots, std::uintptr_t out, bool bfloat16, int threads) {
    check_range("slots of the pool", slots, std::int64_t{most_} + 1,
                std::numeric_limits<std::int64_t>::max());
    check_range("threads", threads, 1, MOST_THREADS);
    with_type(bfloat16, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const Pool<const T> pool{at(keys, type), at(values, type)};
      attention_.attend<T>(at(query, type), stride, pool, at(out, type), threads);
    });
  }

 private:
  Array<std::int32_t> slots_;  // keeps the memory that the requests refer to
  Array<bool> visible_;
  std::int32_t most_ = -1;  // largest slot
  RowAttention attention_;
};

}  // namespace
}  // namespace qspec

PYBIND11_MODULE(QSPEC_MODULE, module) {
  using namespace qspec;
  py::class_<PackedInt8, std::shared_ptr<PackedInt8>>(module, "PackedInt8")
      .def(py::init(&pack), py::arg("q").noconvert(), py::arg("scale").noconvert())
      .def_property_readonly("outputs", &PackedInt8::outputs)
      .def_property_readonly("inputs", &PackedInt8::inputs)
      .def("multiply", &multiply, py::arg("x").noconvert(), py::arg("digits"), py::arg("threads"));
  py::class_<AnyDecoder>(module, "Decoder")
      .def(py::init<const py::list&, const Array<float>&, const Array<float>&, int, int, float>(),
           py::arg("layers"), py::arg("final_norm").noconvert(), py::arg("cos_sin").noconvert(),
           py::arg("heads"), py::arg("kv_heads"), py::arg("eps"))
      .def("forward", &AnyDecoder::forward, py::arg("hidden").noconvert(),
           py::arg("positions").noconvert(), py::arg("slots").noconvert(),
           py::arg("rows").noconvert(), py::arg("table").noconvert(), py::arg("digits"),
           py::arg("threads"));
  module.def("rms_norm", &rms_norm_at);
  module.def("silu_and_mul", &silu_and_mul_at);
  module.def("rotate", &rotate_at);
  module.def("store_rows", &store_rows_at);
  module.attr("EXACT_DIGITS") = EXACT_DIGITS;
  module.attr("TAKES_FLOAT32") = LANES == 8;
  module.def("may_use_tiles", &may_use_tiles);
  module.def("multiply_dense", &multiply_dense_at);
  py::class_<AnyRowAttention>(module, "RowAttention")
      .def(py::init<const Array<std::int32_t>&, const Array<std::int64_t>&,
                    const Array<std::int64_t>&, const Array<bool>&, int, int, int, float>(),
           py::arg("slots").noconvert(), py::arg("lengths").noconvert(),
           py::arg("rows").noconvert(), py::arg("visible").noconvert(), py::arg("heads"),
           py::arg("kv_heads"), py::arg("dim"), py::arg("scale"))
      .def("attend", &AnyRowAttention::attend);
}
