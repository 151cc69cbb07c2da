// Inputs that each token has for each block (Gemma 4 E2B and E4B), from its embedding x and a table:
//
//     p[layer] = norm(projection x)[layer] + scale table[token][layer]
//     x += norm(projection_l (activation(gate_l x) p[l]))    in the end of block l
#include <string.h>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

// per_layer_ of tokens whose embeddings x [positions][hidden] all threads see. All threads have read x in the end, and meet
// once more before any reads what the others made.
void Decoder::per_layer_inputs(const int64_t* ids, const float* x, int32_t positions, int thread) {
    const PerLayerInputs& of = *model_.per_layer;
    const int64_t width = int64_t(of.norm.size()), row = of.embedding.columns, layers = row / width;
    float *made = per_layer_.data(), *looked_up = scratch_[thread].per_layer.data();
    share_matmul(k_, pool_, *of.projection, x, positions, made);
    pool_.barrier();
    const int64_t all = positions * layers, threads = pool_.threads();
    int64_t position = -1;
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
        if (i / layers != position) embed(of.embedding, ids[position = i / layers], looked_up);
        float* to = made + i * width;
        const float* from = looked_up + i % layers * width;
        k_.rms_norm(to, of.norm.data(), int32_t(width), of.eps, to);
        for (int64_t c = 0; c < width; ++c) to[c] += of.scale * from[c];
    }
}

// x is the thread's own.
void Decoder::add_per_layer(int number, float* x, int thread) {
    if (!model_.layers[number].per_layer) return;
    const PerLayer& of = *model_.layers[number].per_layer;
    const int32_t width = int32_t(of.gate->rows);
    float* own = scratch_[thread].d.data();
    share_matmul(k_, pool_, *of.gate, x, 1, per_layer_gate_.data());
    pool_.barrier();
    k_.gate(s_.activation, per_layer_gate_.data(), per_layer_.data() + int64_t(number) * width, width, own);
    share_matmul(k_, pool_, *of.projection, own, 1, changed_.data());
    pool_.barrier();
    k_.rms_norm(changed_.data(), of.norm.data(), s_.hidden, s_.eps, own);
    k_.sum(own, 0, 1, nullptr, s_.hidden, 1, x);
}

// The same of `wide_x_`, of which this thread has made positions first ... last - 1 and goes on with them.
void Decoder::add_per_layer_rows(int number, int32_t first, int32_t last, int32_t positions) {
    if (!model_.layers[number].per_layer) return;
    const PerLayer& of = *model_.layers[number].per_layer;
    const int64_t width = of.gate->rows, row = model_.per_layer->embedding.columns;
    float *gates = wide_inner_.data(), *added = wide_rows_.data();
    pool_.barrier();
    share_matmul(k_, pool_, *of.gate, wide_x_.data(), positions, gates);
    pool_.barrier();
    for (int64_t p = first; p < last; ++p)
        k_.gate(s_.activation, gates + p * width, per_layer_.data() + p * row + number * width, int32_t(width),
                gates + p * width);
    pool_.barrier();
    share_matmul(k_, pool_, *of.projection, gates, positions, added);
    pool_.barrier();
    for (int64_t p = first; p < last; ++p) {
        float* y = added + p * s_.hidden;
        k_.rms_norm(y, of.norm.data(), s_.hidden, s_.eps, y);
        k_.sum(y, 0, 1, nullptr, s_.hidden, 1, wide_x_.data() + p * s_.hidden);
    }
}

}  // namespace sparsepack
