// MLPs by neurons: who is active, and their records.
#include "decoder/decoder.h"

namespace sparsepack {
namespace {

// The activation of gates, in place: ReLU, or without gates, of the products of up, its square.
void rectify(const Neurons& n, int64_t count, float* gates) {
    for (int64_t i = 0; i < count; ++i) gates[i] = gates[i] < 0 ? 0 : n.plain ? gates[i] * gates[i] : gates[i];
}

}  // namespace

// The products of gates by rows with the rows of x, which all threads have left, or with each thread's own x where there
// is one: y [positions][neurons], for all threads.
Decoder::Sums Decoder::gates(int layer, const float* x, int32_t positions, float* y, int thread) {
    static const std::vector<float> no_bias;
    const Gates& g = *model_.layers[layer].gates;
    uint8_t* inputs = scratch_[thread].neuron_input.data();
    if (positions == 1) {
        k_.neuron_input(x, g.bands, inputs);
    } else {
        int64_t stride = neuron_input_stride(g.bands);
        inputs = wide_inputs_.data();
        for (int32_t p = thread; p < positions; p += pool_.threads())
            k_.neuron_input(x + int64_t(p) * s_.hidden, g.bands, inputs + p * stride);
        pool_.barrier();
    }
    share_gate_products(k_, pool_, g, inputs, positions, y);
    pool_.barrier();
    return {y, 0, 1, &no_bias, g.count};
}

// From the product of the gate to what the MLP adds; x is its input. Each thread does a range of the neurons and lists
// those that are active; after a barrier all of them are shared out.
Decoder::Sums Decoder::neurons(const Sums& gate, const float* x, int layer, bool sparse, int thread) {
    static const std::vector<float> no_bias;
    const float zero = 0;
    const Neurons& n = *model_.layers[layer].neurons;
    Scratch& own = scratch_[thread];
    int32_t first = border(s_.intermediate, thread), size = border(s_.intermediate, thread + 1) - first, count = 0;
    float *g = middle_.data() + first, *partial_sums = partial_sums_[MLP_MID & 1].data();
    if (size) {
        read(gate, first, size, g);
        rectify(n, size, g);
        count = k_.collect(g, nullptr, &zero, 0, size, first, g, list(s_.intermediate, thread));
    }
    if (!n.plain) k_.neuron_input(x, n.bands, own.neuron_input.data());
    int32_t total = gather(s_.intermediate, count, thread);
    Active active = {own.indices.data(), total};
    if (!sparse) active = {all_.data(), s_.intermediate};
    if (thread == 0) active_[layer * SITES + MLP_MID] += active.count;
    share_neuron_ffn(k_, pool_, n, own.neuron_input.data(), middle_.data(), active, partial_sums);
    pool_.barrier();
    return {partial_sums, s_.hidden, neuron_slices(active.count, pool_.threads()), &no_bias, s_.hidden};
}

// The same for positions that are prefilled together, or one of each of several sequences, of which this thread has first
// ... last - 1: from the products of the gate.
void Decoder::neuron_rows(int layer, int32_t first, int32_t last, int32_t positions) {
    const Neurons& n = *model_.layers[layer].neurons;
    float* gates = wide_rows_.data();
    rectify(n, int64_t(last - first) * n.count, gates + int64_t(first) * n.count);
    pool_.barrier();
    share_neuron_matmul(k_, pool_, n, wide_normed_.data(), gates, positions, wide_inner_.data());
    pool_.barrier();
    const std::vector<float>& norm = model_.layers[layer].mlp_post_norm;
    for (int64_t p = first; p < last; ++p) {
        float* y = wide_inner_.data() + p * s_.hidden;
        if (!norm.empty()) k_.rms_norm(y, norm.data(), s_.hidden, s_.eps, y);
        k_.sum(y, 0, 1, nullptr, s_.hidden, 1, wide_x_.data() + p * s_.hidden);
    }
}

}  // namespace sparsepack
