// Int8 products and a Llama decoder for CPUs with AVX-512 and VNNI; `_native.pyi` describes them.
// All arrays are numpy's, in C order. Whoever makes a decoder keeps them; Python holds what it got.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "decoder.h"
#include "product.h"

namespace py = pybind11;

namespace qspec {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void check(bool holds, const char* what) {
  if (!holds) throw py::value_error(what);
}

std::shared_ptr<PackedInt8> pack(const Array<std::int8_t>& q, const Array<float>& scale) {
  check(q.ndim() == 2 && q.shape(0) > 0 && q.shape(1) > 0, "q is int8 [outputs, inputs]");
  check(scale.ndim() == 1 && scale.shape(0) == q.shape(0), "scale is float32 [outputs]");
  return std::make_shared<PackedInt8>(q.data(), scale.data(), static_cast<int>(q.shape(0)),
                                      static_cast<int>(q.shape(1)));
}

Array<float> multiply(const PackedInt8& weight, const Array<float>& x, int digits, int threads) {
  check(x.ndim() == 2 && x.shape(1) == weight.inputs(), "x is float32 [rows, inputs]");
  check(digits == 1 || digits == 2, "digits is 1 or 2");
  static thread_local Digits bytes;
  Array<float> y({x.shape(0), py::ssize_t{weight.outputs()}});
  if (x.shape(0) > 0) {
    bytes.assign(x.data(), static_cast<int>(x.shape(0)), weight.inputs(), digits);
    weight.multiply(bytes, y.mutable_data(), false, threads);
  }
  return y;
}

// A decoder over KV in float32 or, as uint16, in bfloat16.
class AnyDecoder {
 public:
  AnyDecoder(const py::list& layers, const Array<float>& final_norm, const Array<float>& cos_sin,
             int heads, int kv_heads, float eps)
      : layers_(layers), final_norm_(final_norm), cos_sin_(cos_sin) {
    check(cos_sin.ndim() == 2, "cos_sin is float32 [positions, head_dim]");
    hidden_ = static_cast<int>(final_norm.size());
    const Shape shape{hidden_, heads, kv_heads, static_cast<int>(cos_sin.shape(1)), eps};
    check(!layers.empty(), "there are no layers");
    const auto keys = layers[0].cast<py::tuple>()[6].cast<py::array>();
    slots_ = keys.shape(0);
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
    check(hidden.ndim() == 2 && hidden.shape(0) == n && hidden.shape(1) == hidden_,
          "hidden is float32 [tokens, hidden]");
    check(slots.size() == n && rows.size() == n, "slots and rows are int64 [tokens]");
    check(table.ndim() == 2, "table is int32 [rows, positions]");
    check(digits == 1 || digits == 2, "digits is 1 or 2");
    check(threads > 0, "threads is at least 1");
    const py::ssize_t reach = std::min(table.shape(1), cos_sin_.shape(0));
    for (py::ssize_t t = 0; t < n; ++t) {
      check(positions.data()[t] >= 0 && positions.data()[t] < reach, "a position is out of range");
      check(rows.data()[t] >= 0 && rows.data()[t] < table.shape(0), "a row is out of range");
      check(slots.data()[t] >= 0 && slots.data()[t] < slots_, "a slot is out of range");
    }
    if (n == 0) return;
    const Tokens tokens{static_cast<int>(n), positions.data(), slots.data(),
                        rows.data(),         table.data(),     table.shape(1)};
    float* data = hidden.mutable_data();
    const py::gil_scoped_release released;
    std::visit([&](auto& decoder) { decoder->forward(data, tokens, digits, threads); }, decoder_);
  }

 private:
  template <typename KV, typename Stored>
  std::unique_ptr<Decoder<KV>> read(const Shape& shape) {
    static_assert(sizeof(KV) == sizeof(Stored));
    std::vector<Layer<KV>> layers;
    for (const py::handle item : layers_) {
      const auto parts = item.cast<py::tuple>();
      check(parts.size() == 8, "a layer is qkv, out, gate_up, down, two norms, keys and values");
      Layer<KV> layer{};
      layer.qkv = parts[0].cast<std::shared_ptr<PackedInt8>>();
      layer.out = parts[1].cast<std::shared_ptr<PackedInt8>>();
      layer.gate_up = parts[2].cast<std::shared_ptr<PackedInt8>>();
      layer.down = parts[3].cast<std::shared_ptr<PackedInt8>>();
      layer.input_norm = norm(parts[4]);
      layer.post_norm = norm(parts[5]);
      layer.keys = reinterpret_cast<KV*>(pool<Stored>(parts[6], shape));
      layer.values = reinterpret_cast<KV*>(pool<Stored>(parts[7], shape));
      layers.push_back(std::move(layer));
    }
    return std::make_unique<Decoder<KV>>(shape, std::move(layers), final_norm_.data(),
                                         cos_sin_.data());
  }

  const float* norm(const py::handle& weight) const {
    check(py::isinstance<Array<float>>(weight), "a norm is float32 [hidden]");
    const auto array = py::reinterpret_borrow<Array<float>>(weight);
    check(array.size() == hidden_, "a norm is float32 [hidden]");
    return array.data();
  }

  template <typename Stored>
  Stored* pool(const py::handle& buffer, const Shape& shape) const {
    const char* wanted = "KV is float32 or uint16 [slots, kv_heads, head_dim], all layers alike";
    check(py::isinstance<Array<Stored>>(buffer), wanted);
    auto array = py::reinterpret_borrow<Array<Stored>>(buffer);
    check(array.ndim() == 3 && array.shape(0) == slots_ && array.shape(1) == shape.kv_heads &&
              array.shape(2) == shape.head_dim,
          wanted);
    return array.mutable_data();
  }

  py::list layers_;
  Array<float> final_norm_, cos_sin_;
  int hidden_ = 0;
  py::ssize_t slots_ = 0;
  std::variant<std::unique_ptr<Decoder<float>>, std::unique_ptr<Decoder<BFloat16>>> decoder_;
};

}  // namespace
}  // namespace qspec

PYBIND11_MODULE(_native, module) {
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
}
