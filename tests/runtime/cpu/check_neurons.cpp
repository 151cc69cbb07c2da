// The kernels of MLPs by neurons against the plain ones; part of check_kernels.
#include "check_kernels.h"
#include "layout/repack.h"
#include "memory/buffer.h"

#include <cstring>
#include <limits>

namespace sparsepack {
namespace {

struct Random {
    std::vector<uint8_t> records;  // as in the file
    NeuronMatrix matrix;
};

Random random_neurons(int64_t count, int32_t bands, bool plain = false) {
    static Pool pool(1);
    std::vector<uint8_t> records(count * bands * 2 * sizeof(Q4KBlock));
    for (uint8_t& byte : records) byte = (uint8_t)bits();
    for (size_t i = 0; i < records.size(); i += sizeof(Q4KBlock)) {
        uint16_t scales[2] = {half(0.01f * normal()), half(0.01f * normal())};
        std::memcpy(&records[i], scales, 4);
    }
    if (plain) records.resize(records.size() / 2);
    std::vector<uint8_t> back(records.size());
    NeuronMatrix m = repack_neurons(records.data(), count, bands, pool, plain);
    unpack_neurons(m.view, back.data(), pool);
    check(records == back, "repack", text("%d neurons of %d bands", (int)count, bands));
    return {std::move(records), std::move(m)};
}

}  // namespace

float typical_norm(const Neurons& n, const float* x, const float* gate) {
    static Pool pool(1);
    int32_t hidden = neuron_hidden(&n);
    std::vector<uint8_t> records(n.count * n.bands * 2 * sizeof(Q4KBlock));
    unpack_neurons(n, records.data(), pool);
    const int32_t before = n.plain ? 0 : hidden;  // what stands before down
    Rows rows = {records.data(), n.count, before + hidden, Q4_K};
    std::vector<float> weights(before + hidden);
    double sum = 0;
    for (int64_t neuron = 0; neuron < n.count; neuron++) {
        double up = 0, down = 0, squares = 0;  // of x: a large one is rounded whatever its weight is
        scalar_kernels.decode_row(&rows, neuron, weights.data());
        for (int32_t i = 0; i < hidden; i++) {
            up += n.plain ? 1 : std::pow(weights[i], 2);
            squares += std::pow(x[i], 2);
            down += std::pow(weights[before + i], 2);
        }
        sum += (n.plain ? 1 : up / hidden * squares) * down * gate[neuron] * gate[neuron];
    }
    return (float)std::sqrt(sum);
}

namespace {

// Every `step`th neuron is active.
void check_ffn(const Kernels& k, const Random& random, int step, float outlier) {
    const Neurons& n = random.matrix.view;
    int32_t hidden = neuron_hidden(&n);
    std::vector<float> x = normals(hidden), gate = normals(n.count), y[2];
    x[below(hidden)] *= outlier;
    std::vector<int32_t> indices;
    for (int32_t i = 0; i < n.count; i += step) indices.push_back(i);
    for (int32_t i = 0; i < n.count; i++) gate[i] = i % step ? 0 : gate[i];
    for (int s = 0; s < 2; s++) {
        const Kernels& set = s ? k : scalar_kernels;
        Buffer<uint8_t> input(neuron_input_bytes(n.bands));
        set.neuron_input(x.data(), n.bands, input.data());
        y[s].assign(hidden + 16, GUARD);
        int32_t count = (int32_t)indices.size();
        NeuronWork work = {&n, count, indices.data(), gate.data(), input.data(), y[s].data()};
        set.neuron_ffn(&work, step % 2 ? &work : nullptr);
    }
    // Rounding x counts by codes, which are up to twice as large as the weights: those lack the minima.
    check_near(y[1], y[0], k.name, text("ffn of %d neurons of %d bands, step %d", (int)n.count, n.bands, step),
               NORMWISE, 2 * NORMWISE * typical_norm(n, x.data(), gate.data()));
}

void check_nothing_active(const Kernels& k, const Neurons& n) {
    std::vector<float> x = normals(neuron_hidden(&n)), gate(n.count), y(x.size(), GUARD);
    Buffer<uint8_t> input(neuron_input_bytes(n.bands));
    k.neuron_input(x.data(), n.bands, input.data());
    NeuronWork work = {&n, 0, nullptr, gate.data(), input.data(), y.data()};
    k.neuron_ffn(&work, nullptr);
    check(y == std::vector<float>(x.size()), k.name, "ffn of no neuron");
}

// An input that is not finite must show.
void check_not_finite(const Kernels& k, const Neurons& n, float value) {
    std::vector<float> x = normals(neuron_hidden(&n)), gate(n.count, 1.0f), y(x.size());
    std::vector<int32_t> indices(n.count);
    for (int32_t i = 0; i < n.count; i++) indices[i] = i;
    x[below((int)x.size())] = value;
    Buffer<uint8_t> input(neuron_input_bytes(n.bands));
    k.neuron_input(x.data(), n.bands, input.data());
    NeuronWork work = {&n, (int32_t)n.count, indices.data(), gate.data(), input.data(), y.data()};
    k.neuron_ffn(&work, nullptr);
    for (float found : y) check(!std::isfinite(found), k.name, text("ffn with %f", value));
}

void check_positions(const Kernels& k, const Neurons& n, int positions) {
    int32_t hidden = neuron_hidden(&n);
    std::vector<float> x = normals((size_t)positions * hidden), gate = normals((size_t)positions * n.count), y[2];
    for (float& g : gate) g = g < 0.5f ? 0 : g;
    for (int s = 0; s < 2; s++) {
        y[s].assign((size_t)positions * hidden + 16, GUARD);
        NeuronsWork work = {&n, (int32_t)n.count, nullptr, x.data(), gate.data(), positions, y[s].data()};
        (s ? k : scalar_kernels).neuron_matmul(&work);
    }
    std::string what = text("%d neurons of %d bands, %d positions", (int)n.count, n.bands, positions);
    check_near(y[1], y[0], k.name, what);
    // Every third neuron, listed: as if the gates of all others were zero.
    std::vector<int32_t> indices;
    for (int32_t i = 0; i < n.count; i += 3) indices.push_back(i);
    y[1].assign(y[1].size(), GUARD);
    NeuronsWork listed = {&n, (int32_t)indices.size(), indices.data(), x.data(), gate.data(), positions, y[1].data()};
    k.neuron_matmul(&listed);
    for (size_t i = 0; i < gate.size(); i++) gate[i] = i % n.count % 3 ? 0 : gate[i];
    y[0].assign(y[0].size(), GUARD);
    NeuronsWork all = {&n, (int32_t)n.count, nullptr, x.data(), gate.data(), positions, y[0].data()};
    k.neuron_matmul(&all);
    check(y[1] == y[0], k.name, what + ", listed");
}

// All gates, and every `step`th one from the second listed on.
void check_gates(const Kernels& k, int64_t count, int32_t bands, int positions, int step) {
    static Pool pool(1);
    std::vector<uint8_t> rows(count * bands * sizeof(Q4KBlock));
    for (uint8_t& byte : rows) byte = (uint8_t)bits();
    for (size_t i = 0; i < rows.size(); i += sizeof(Q4KBlock)) {
        uint16_t scales[2] = {half(0.01f * normal()), half(0.01f * normal())};
        std::memcpy(&rows[i], scales, 4);
    }
    GateMatrix m = repack_gates(rows.data(), count, bands, pool);
    Rows stored = {rows.data(), count, bands * BAND_ROWS, Q4_K};
    std::vector<float> x = normals((size_t)positions * stored.columns), expected(count * positions), found(count);
    scalar_kernels.rows_matmul(&stored, 0, count, x.data(), stored.columns, positions, expected.data(), count);
    Buffer<uint8_t> inputs(positions * neuron_input_stride(bands));
    for (int p = 0; p < positions; p++)
        k.neuron_input(&x[p * stored.columns], bands, inputs.data() + p * neuron_input_stride(bands));
    std::vector<int32_t> indices;
    for (int32_t i = 0; i < count; i += step) indices.push_back(i);
    std::string what = text("%d gates of %d bands, %d positions", (int)count, bands, positions);
    found.assign(expected.size(), GUARD);
    GatesWork all = {&m.view, 0, (int32_t)count, nullptr, inputs.data(), positions, found.data(), count};
    k.gate_products(&all);
    // Of a product that is nearly zero the error is that of its terms.
    std::vector<float> weights(stored.columns);
    double terms = 0;
    for (int64_t neuron = 0; neuron < count; neuron++) {
        scalar_kernels.decode_row(&stored, neuron, weights.data());
        for (size_t i = 0; i < x.size(); i++) terms += std::pow(weights[i % stored.columns] * x[i], 2);
    }
    check_near(found, expected, k.name, what, NORMWISE, NORMWISE * (float)std::sqrt(terms));
    std::vector<float> listed(expected.size(), GUARD);
    int32_t some = (int32_t)indices.size() - 1;
    GatesWork work = {&m.view, 1, some, indices.data(), inputs.data(), positions, listed.data(), count};
    k.gate_products(&work);
    for (int p = 0; p < positions; p++)
        for (int32_t i = 0; i < count; i++) {
            bool in = i >= 1 && i <= some;
            check(listed[p * count + i] == (in ? found[p * count + indices[i]] : GUARD), k.name, what + ", listed");
        }
}

}  // namespace

void check_neuron_kernels(const Kernels& k) {
    for (int bands : {1, 2, 3, 4, 5, 8, 20, 64}) {
        for (int count : {1, 9, 70}) {
            Random random = random_neurons(count, bands, bands % 2 != count % 2 || bands == 3);
            const NeuronMatrix& m = random.matrix;
            for (int step : {1, 2, 3, 100}) check_ffn(k, random, step, step == 3 ? 30.0f : 1.0f);
            for (int positions : {1, 5, int(MOST_NEURON_POSITIONS)}) check_positions(k, m.view, positions);
            check_nothing_active(k, m.view);
        }
    }
    NeuronMatrix m = random_neurons(40, 2).matrix;
    for (float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
        check_not_finite(k, m.view, value);
    for (int bands : {1, 2, 3, 5, 20, 64})
        for (int count : {1, 9, 70})
            for (int positions : {1, 5}) check_gates(k, count, bands, positions, 1 + positions / 2);
}

}  // namespace sparsepack
