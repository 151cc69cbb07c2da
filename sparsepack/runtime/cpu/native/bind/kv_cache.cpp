// sparsepack.runtime.cpu._native.DenseKvCache and DoubleSparsityKvCache, which runtime/cpu/kv_cache.py makes. A cache
// of another kind is another class derived from KvCache; operations and decoder take any.
#include "decoder/kv_cache.h"
#include "decoder/double_sparsity_kv_cache.h"
#include "isa/dispatch.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
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
using Layers = std::vector<std::tuple<int32_t, Norm, Norm, int32_t, Norm, int32_t, int32_t, bool, int32_t>>;
using Tables = std::vector<std::pair<Array<2>, Array<2>>>;

template <class T>
auto copied(const T& x) {
    return std::vector<std::decay_t<decltype(*x.data())>>(x.data(), x.data() + x.size());
}

std::vector<LayerAttention> made_of(const Layers& layers) {
    std::vector<LayerAttention> made;
    auto given = [](const Norm& of) { return of ? copied(*of) : std::vector<float>(); };
    for (const auto& [window, q_norm, k_norm, table, sinks, kv_heads, head_dim, value_norm, source] : layers)
        made.push_back(
            {window, given(q_norm), given(k_norm), table, given(sinks), kv_heads, head_dim, value_norm, source});
    return made;
}

std::vector<RotaryTable> made_of(const Tables& tables) {
    std::vector<RotaryTable> made;
    for (const auto& [cos, sin] : tables) made.push_back({copied(cos), copied(sin), int32_t(cos.shape(1))});
    return made;
}

AttentionShape shape_of(int32_t heads, int32_t kv_heads, int32_t head_dim, float eps, const Tables& tables, float scale,
                        float cap) {
    if (tables.empty()) throw std::invalid_argument("tables: expected one at least");
    const Array<2>& cos = tables[0].first;
    return {heads, kv_heads, head_dim, int32_t(cos.shape(0)), eps, int32_t(cos.shape(1)), scale, cap};
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
        .def(
            "turn",
            [](KvCache& cache, int64_t first, Array<2> cos, Array<2> sin) {
                if (int32_t(cos.shape(1)) != cache.shape().half || sin.size() != cos.size())
                    throw std::invalid_argument("cos, sin: expected [positions, half]");
                cache.turn(first, int64_t(cos.shape(0)), cos.data(), sin.data());
            },
            "first"_a, "cos"_a, "sin"_a)
        .def(
            "scale_queries", [](KvCache& cache, const Array<1>& by) { cache.scale_queries(copied(by)); }, "by"_a)
        .def("turn_neighbours", &KvCache::turn_neighbours)
        .def("copy", &KvCache::copy, "other"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("reset", &KvCache::reset);
    nb::class_<DenseKvCache, KvCache>(m, "DenseKvCache")
        .def(
            "__init__",
            [](DenseKvCache* self, int32_t heads, int32_t kv_heads, int32_t head_dim, float eps, const Tables& tables,
               float scale, float cap, const Layers& layers, const std::string& instruction_set) {
                AttentionShape shape = shape_of(heads, kv_heads, head_dim, eps, tables, scale, cap);
                new (self) DenseKvCache(shape, made_of(layers), made_of(tables), kernels(instruction_set));
            },
            nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "tables"_a, "scale"_a, "cap"_a, "layers"_a,
            "instruction_set"_a);
    nb::class_<DoubleSparsityKvCache, KvCache>(m, "DoubleSparsityKvCache")
        .def(
            "__init__",
            [](DoubleSparsityKvCache* self, int32_t heads, int32_t kv_heads, int32_t head_dim, float eps,
               const Tables& tables, float scale, float cap, const Layers& layers, const std::string& instruction_set,
               const std::vector<std::optional<Array<2, int32_t>>>& channels, Array<1, int32_t> budgets, int32_t sinks,
               int32_t recent) {
                AttentionShape shape = shape_of(heads, kv_heads, head_dim, eps, tables, scale, cap);
                std::vector<HeavyChannels> heavy;
                for (const auto& of_layer : channels) {
                    if (of_layer && int64_t(of_layer->shape(0)) != kv_heads)
                        throw std::invalid_argument("channels: expected [kv_heads, r]");
                    heavy.push_back(of_layer ? copied(*of_layer) : HeavyChannels());
                }
                new (self) DoubleSparsityKvCache(shape, made_of(layers), made_of(tables), kernels(instruction_set),
                                                 std::move(heavy), {copied(budgets), sinks, recent});
            },
            nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "tables"_a, "scale"_a, "cap"_a, "layers"_a,
            "instruction_set"_a, "channels"_a, "budgets"_a, "sinks"_a, "recent"_a);
}

}  // namespace sparsepack
