// sparsepack.runtime.cpu._native.DenseKvCache and DoubleSparsityKvCache, which runtime/cpu/kv_cache.py makes. A cache
// of another kind is another class derived from KvCache; operations and decoder take any.
#include "decoder/kv_cache.h"
#include "decoder/double_sparsity_kv_cache.h"
#include "isa/dispatch.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

template <int dimensions, class T = float>
using Array = nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Norm = std::optional<Array<1>>;
using Layers = std::vector<std::tuple<int32_t, Norm, Norm>>;

template <class T>
auto copied(const T& x) {
    return std::vector<std::decay_t<decltype(*x.data())>>(x.data(), x.data() + x.size());
}

std::vector<LayerAttention> made_of(const Layers& layers) {
    std::vector<LayerAttention> made;
    for (const auto& [window, q_norm, k_norm] : layers)
        made.push_back(
            {window, q_norm ? copied(*q_norm) : std::vector<float>(), k_norm ? copied(*k_norm) : std::vector<float>()});
    return made;
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
    nb::class_<KvCache>(m, "KvCache")
        .def_prop_ro("length", &KvCache::length)
        .def(
            "advance",
            [](KvCache& cache, int64_t positions) {
                if (positions < 0 || cache.length() + positions > cache.shape().context)
                    throw std::invalid_argument("positions: more than there is room for");
                cache.advance(positions);
            },
            "positions"_a)
        .def(
            "truncate",
            [](KvCache& cache, int64_t length) {
                if (length < 0 || length > cache.length()) throw std::invalid_argument("length: more than is cached");
                cache.truncate(length);
            },
            "length"_a)
        .def("copy", &KvCache::copy, "other"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("reset", &KvCache::reset);
    nb::class_<DenseKvCache, KvCache>(m, "DenseKvCache")
        .def(
            "__init__",
            [](DenseKvCache* self, int32_t heads, int32_t kv_heads, int32_t head_dim, float eps, Array<2> cos,
               Array<2> sin, const Layers& layers, const std::string& instruction_set) {
                AttentionShape shape{heads, kv_heads, head_dim, int32_t(cos.shape(0)), eps};
                new (self) DenseKvCache(shape, made_of(layers), copied(cos), copied(sin), kernels(instruction_set));
            },
            nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "cos"_a, "sin"_a, "layers"_a,
            "instruction_set"_a);
    nb::class_<DoubleSparsityKvCache, KvCache>(m, "DoubleSparsityKvCache")
        .def(
            "__init__",
            [](DoubleSparsityKvCache* self, int32_t heads, int32_t kv_heads, int32_t head_dim, float eps, Array<2> cos,
               Array<2> sin, const Layers& layers, const std::string& instruction_set,
               const std::vector<std::optional<Array<2, int32_t>>>& channels, Array<1, int32_t> budgets, int32_t sinks,
               int32_t recent) {
                AttentionShape shape{heads, kv_heads, head_dim, int32_t(cos.shape(0)), eps};
                std::vector<HeavyChannels> heavy;
                for (const auto& of_layer : channels) {
                    if (of_layer && int64_t(of_layer->shape(0)) != kv_heads)
                        throw std::invalid_argument("channels: expected [kv_heads, r]");
                    heavy.push_back(of_layer ? copied(*of_layer) : HeavyChannels());
                }
                new (self)
                    DoubleSparsityKvCache(shape, made_of(layers), copied(cos), copied(sin), kernels(instruction_set),
                                          std::move(heavy), {copied(budgets), sinks, recent});
            },
            nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "cos"_a, "sin"_a, "layers"_a,
            "instruction_set"_a, "channels"_a, "budgets"_a, "sinks"_a, "recent"_a);
}

}  // namespace sparsepack
