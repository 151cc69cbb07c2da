// Times of kernels without Python between the calls, for `sparsepack tune` and the benchmarks.
#include "isa/dispatch.h"
#include "layout/repack.h"
#include "threads/products.h"
#include "threads/reads.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

int64_t now() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

// In one stream: what the processor's own prefetcher follows best.
uint64_t sum_of(const uint64_t* from, int64_t words) {
    enum { LANES = 8 };
    uint64_t sums[LANES] = {};
    for (int64_t i = 0; i < words; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += from[i + lane];
    uint64_t sum = 0;
    for (uint64_t part : sums) sum += part;
    return sum;
}

double read_bandwidth(int64_t bytes, int threads, int repeats) {
    if (bytes < 1 << 20 || threads < 1 || repeats < 1) throw std::invalid_argument("expected at least 1 MiB, 1, 1");
    Memory memory(bytes);
    Pool pool(threads);
    int64_t words = bytes / 8 / threads / 64 * 64;
    auto* data = reinterpret_cast<uint64_t*>(memory.data());
    std::vector<uint64_t> sums(threads * 8);
    pool.run([&](int thread) { std::fill(data + thread * words, data + (thread + 1) * words, 1); });
    int64_t best = INT64_MAX;
    for (int i = 0; i < repeats; i++) {
        int64_t start = now();
        pool.run([&](int thread) { sums[thread * 8] = sum_of(data + thread * words, words); });
        best = std::min(best, now() - start);
        for (int thread = 0; thread < threads; thread++)
            if (sums[thread * 8] != (uint64_t)words) throw std::runtime_error("read bandwidth: wrong sum");
    }
    return (double)words * 8 * threads / (double)best * 1e9;
}

using Inputs = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Thresholds = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Nanoseconds of products whose weights come from memory: each matrix is put out of the caches before its product.
// ahead: then products only read, as `read_pieces` does.
std::vector<int64_t> time_gemv(const std::vector<const ZigzagMatrix*>& matrices, Inputs x, Thresholds threshold,
                               int threads, int repeats, const std::string& instruction_set, std::optional<int> ahead) {
    if (matrices.empty() || x.shape(0) == 0 || threads < 1) throw std::invalid_argument("nothing to time");
    size_t columns = x.shape(1);
    for (const ZigzagMatrix* m : matrices)
        if ((size_t)m->view.columns != columns) throw std::invalid_argument("x: expected [inputs, columns]");
    bool levels = threshold.shape(0) == columns + PLANES;
    if (threshold.shape(0) != 1 && threshold.shape(0) != columns && !levels)
        throw std::invalid_argument("threshold: [1, columns or columns + levels]");
    Kernels kernels = sparsepack::kernels(instruction_set);
    if (ahead) kernels.zigzag_gemv = read_pieces(*ahead);
    nb::gil_scoped_release released;
    Pool pool(threads);
    std::vector<float> d(columns), y;
    ProductScratch scratch;
    std::vector<int32_t> indices(columns + 16), lists(levels ? PLANES * (columns + 16) : 0);
    std::vector<int64_t> times;
    for (int i = 0; i < repeats; i++) {
        const Zigzag& m = matrices[i % matrices.size()]->view;
        const Memory& memory = matrices[i % matrices.size()]->memory;
        const float* input = x.data() + i % x.shape(0) * columns;
        y.resize(m.rows);
        size_t part = memory.bytes() / threads + 1;
        pool.run([&](int thread) {
            size_t first = std::min(memory.bytes(), thread * part);
            flush_caches(memory.data() + first, std::min(part, memory.bytes() - first));
        });
        int64_t start = now();
        Active active = {indices.data(), 0};
        if (levels) {
            int32_t counts[PLANES], n = (int32_t)columns;
            kernels.collect_levels(input, nullptr, threshold.data(), threshold.data() + n, 1, n, 0, d.data(),
                                   lists.data(), n + 16, counts);
            for (int32_t level = 0; level < PLANES; level++) {
                const int32_t* list = lists.data() + level * (n + 16);
                std::copy(list, list + counts[level], indices.data() + active.count);
                active.count += counts[level];
                if (level < PLANES - 1) active.ends.of[level] = active.count;
            }
        } else {
            active.count = kernels.collect(input, nullptr, threshold.data(), threshold.shape(0) != 1, (int32_t)columns,
                                           0, d.data(), indices.data());
        }
        gemv(kernels, pool, m, input, active, scratch, y.data());
        times.push_back(now() - start);
    }
    return times;
}

std::vector<int64_t> time_neurons(const std::vector<const NeuronMatrix*>& matrices, Inputs x, Inputs gates, int threads,
                                  int repeats, const std::string& instruction_set) {
    if (matrices.empty() || gates.shape(0) == 0 || x.shape(0) != gates.shape(0) || threads < 1)
        throw std::invalid_argument("nothing to time");
    for (const NeuronMatrix* m : matrices)
        if (neuron_hidden(&m->view) != (int64_t)x.shape(1) || m->view.count != (int64_t)gates.shape(1))
            throw std::invalid_argument("x: expected [inputs, hidden]; gates: [inputs, neurons]");
    nb::gil_scoped_release released;
    const Kernels& kernels = sparsepack::kernels(instruction_set);
    Pool pool(threads);
    int32_t neurons = (int32_t)gates.shape(1);
    const float zero = 0;
    std::vector<float> g(neurons), y(x.shape(1));
    std::vector<int32_t> indices(neurons + 16);
    ProductScratch scratch;
    std::vector<int64_t> times;
    for (int i = 0; i < repeats; i++) {
        const Neurons& n = matrices[i % matrices.size()]->view;
        size_t row = i % x.shape(0);
        int64_t start = now();
        int32_t count =
            kernels.collect(gates.data() + row * neurons, nullptr, &zero, 0, neurons, 0, g.data(), indices.data());
        neuron_ffn(kernels, pool, n, x.data() + row * x.shape(1), g.data(), {indices.data(), count}, scratch, y.data());
        times.push_back(now() - start);
    }
    return times;
}

}  // namespace

void bind_timing(nb::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, "bytes"_a, "threads"_a, "repeats"_a = 5,
          nb::call_guard<nb::gil_scoped_release>());
    m.def("time_neurons", &time_neurons, "matrices"_a, "x"_a, "gates"_a, "threads"_a, "repeats"_a, "instruction_set"_a);
    m.def("time_gemv", &time_gemv, "matrices"_a, "x"_a, "threshold"_a, "threads"_a, "repeats"_a, "instruction_set"_a,
          "ahead"_a = nb::none());
}

}  // namespace sparsepack
