// A token of each of several sequences, or several positions of one: the phases of step.cpp, with as many rows. What lies between
// two products is shared out by rows or by columns, and the weights are read once for all of them. Sequences multiply the columns
// that are active in any of them; of positions of one text each has its own alone, as if it were stepped.
#include <string.h>

#include <algorithm>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

void Decoder::tokens(const int64_t* ids, int32_t batch, bool sparse, float* logits, int thread) {
    int32_t first = batch * thread / pool_.threads(), last = batch * (thread + 1) / pool_.threads();
    float *normed = wide_normed_.data(), *inner = wide_inner_.data();
    for (int32_t t = first; t < last; ++t) look_up(ids[t], wide_x_.data() + int64_t(t) * s_.hidden);
    if (model_.per_layer) {
        pool_.barrier();
        per_layer_inputs(ids, wide_x_.data(), batch, thread);
    }
    for (int number = 0; number < int(model_.layers.size()); ++number) {
        const Layer& layer = model_.layers[number];

        if (layer.basis) change_basis_of_rows(*layer.basis, first, last, batch);
        if (layer.mixes()) {
            norm_rows(layer.attn_norm, first, last);
            const size_t own =
                size_t(last - first) * s_.hidden * layer.parallel;  // products leave active columns alone
            if (own)
                memcpy(wide_read_.data() + int64_t(first) * s_.hidden, normed + int64_t(first) * s_.hidden,
                       own * sizeof(float));
            pool_.barrier();
            if (layer.delta_net) {
                // Before the product, which leaves of its inputs the active columns alone.
                multiply_gates(number, normed, batch, thread);
                pool_.barrier();
            }
            Sums into = multiply_batch(number, ATTN_IN, normed, batch, sparse, thread);
            if (layer.latent)
                attend_latents_batch(into, number, batch, sparse, thread);
            else
                attend_batch(into, number, batch, sparse, thread);
            pool_.barrier();
            if (!layer.attn_sub_norm.empty()) {
                norm_each(layer.attn_sub_norm, first, last, inner);
                pool_.barrier();
            }
            Sums sums = multiply_batch(number, ATTN_OUT, inner, batch, sparse, thread);
            add_batch(sums, layer.attn_post_norm, batch, thread);
        }
        if (layer.has_mlp()) {
            if (!layer.parallel)
                norm_rows(layer.mlp_norm, first, last);
            else if (first < last)
                memcpy(normed + int64_t(first) * s_.hidden, wide_read_.data() + int64_t(first) * s_.hidden,
                       size_t(last - first) * s_.hidden * sizeof(float));
            pool_.barrier();
            mlp_batch(number, batch, sparse, thread);
        }
        add_per_layer_rows(number, first, last, batch);
        scale(number, last - first, wide_x_.data() + int64_t(first) * s_.hidden);
    }
    norm_rows(model_.output_norm, first, last);
    pool_.barrier();
    share_matmul(k_, pool_, model_.output, normed, batch, logits);
    cap_logits(logits, batch, thread);
}

// x += a finished product for each sequence, of which this thread adds its share, normed where `norm` is not empty.
void Decoder::add_batch(const Sums& sums, const std::vector<float>& norm, int32_t batch, int thread) {
    int32_t first = batch * thread / pool_.threads(), last = batch * (thread + 1) / pool_.threads();
    float* own = scratch_[thread].d.data();
    for (int32_t t = first; t < last; ++t) {
        float* x = wide_x_.data() + int64_t(t) * s_.hidden;
        read(sums_of(sums, t), 0, s_.hidden, norm.empty() ? x : own, norm.empty());
        if (norm.empty()) continue;
        k_.rms_norm(own, norm.data(), s_.hidden, s_.eps, own);
        k_.sum(own, 0, 1, nullptr, s_.hidden, 1, x);
    }
}

// The MLP of a block, from `wide_normed_` to what it adds to the sequences.
void Decoder::mlp_batch(int number, int32_t batch, bool sparse, int thread) {
    const Layer& layer = model_.layers[number];
    float* normed = wide_normed_.data();
    if (layer.experts) return experts_batch(number, batch, sparse, thread);
    float* of_gates = partial_sums_[MLP_IN & 1].data();
    if (layer.gates && thread == 0) active_[number * SITES + MLP_IN] += s_.hidden;
    Sums sums = layer.gates ? gates(number, normed, batch, of_gates, thread)
                            : multiply_batch(number, MLP_IN, normed, batch, sparse, thread);
    if (layer.neurons) return neurons_batch(sums, number, batch, sparse, thread);
    gate_batch(sums, number, batch, thread);
    pool_.barrier();
    if (!layer.mlp_sub_norm.empty()) {
        norm_each(layer.mlp_sub_norm, batch * thread / pool_.threads(), batch * (thread + 1) / pool_.threads(),
                  wide_inner_.data());
        pool_.barrier();
    }
    add_batch(multiply_batch(number, MLP_MID, wide_inner_.data(), batch, sparse, thread), layer.mlp_post_norm, batch,
              thread);
}

// The products of a site with the rows of x [sequences][columns], which all threads have left; of x remains what is
// multiplied. The sums are there for all threads, those of the sequences one after the other: see `sums_of`.
Decoder::Sums Decoder::multiply_batch(int layer, int site, float* x, int32_t batch, bool sparse, int thread) {
    const Site& at = model_.layers[layer].sites[site];
    const Zigzag& m = *at.matrix;
    const std::vector<float>* bias = &at.bias;
    Active active = {all_.data(), int32_t(m.columns)};
    if (sparse && !at.threshold.empty()) {
        active = at.has_levels() ? select_levels(at, x, batch, thread) : select_batch(at, x, batch, thread);
        bias = &at.sparse_bias;
        pool_.barrier();
    }
    if (thread == 0) active_[layer * SITES + site] += units_read(at, active);
    float* partial_sums = partial_sums_[site & 1].data();
    share_matmul(k_, pool_, m, x, active, batch, partial_sums);
    pool_.barrier();
    return {partial_sums, batch * m.rows, matmul_slices(m, active.count, pool_.threads()), bias, m.rows};
}

Decoder::Sums Decoder::sums_of(const Sums& sums, int32_t index) {
    return {sums.partial_sums + index * sums.rows, sums.stride, sums.slices, sums.bias, sums.rows};
}

// The columns that are active in any sequence, listed in the thread's own scratch; x keeps these alone, side by side, less
// the offset. Each thread looks at a range of the columns, and after a barrier moves the columns of some sequences.
Active Decoder::select_batch(const Site& at, float* x, int32_t batch, int thread) {
    Scratch& own = scratch_[thread];
    int64_t columns = at.matrix->columns;
    int32_t first = border(columns, thread), n = border(columns, thread + 1) - first, count = 0;
    uint8_t* in_any = active_in_any_.data() + first;
    bool per_channel = at.threshold.size() > 1;
    const float* offset = at.offset.empty() ? nullptr : at.offset.data() + first;
    if (n) memset(in_any, 0, n);
    for (int32_t t = 0; t < batch && n; ++t) {
        float* of_range = x + t * columns + first;
        const float* threshold = thresholds(at, first, n, t, thread);
        int32_t found = k_.collect(of_range, offset, threshold, per_channel, n, 0, of_range, own.indices.data());
        for (int32_t i = 0; i < found; ++i) in_any[own.indices.data()[i]] = 1;
        for (int32_t i = 0, from = 0; i <= found && one_text_; ++i) {
            const int32_t to = i < found ? own.indices.data()[i] : n;
            memset(of_range + from, 0, (to - from) * sizeof(float));
            from = to + 1;
        }
        count_skipped(at, n - found, t, thread);
    }
    int32_t* listed = list(columns, thread);
    for (int32_t i = 0; i < n; ++i)
        if (in_any[i]) listed[count++] = first + i;
    int32_t total = gather(columns, count, thread);
    const int32_t* indices = own.indices.data();
    for (int32_t t = thread; t < batch; t += pool_.threads()) {
        float* row = x + t * columns;
        for (int32_t i = 0; i < total; ++i) row[i] = row[indices[i]];  // an index is never less than i
    }
    return {indices, total};
}

// The same where columns are read at the highest level of any sequence.
Active Decoder::select_levels(const Site& at, float* x, int32_t batch, int thread) {
    Scratch& own = scratch_[thread];
    int64_t columns = at.matrix->columns;
    int32_t first = border(columns, thread), n = border(columns, thread + 1) - first, stride = int32_t(columns) + 16;
    int32_t counts[PLANES] = {}, *lists[PLANES];
    uint8_t* highest = active_in_any_.data() + first;
    if (n) memset(highest, 0, n);
    for (int32_t t = 0; t < batch && n; ++t) {
        float* of_range = x + t * columns + first;
        int64_t bytes = 0;
        collect_levels(at, of_range, first, n, t, of_range, own.lists.data(), stride, counts);
        for (int32_t level = 1; level <= PLANES; ++level) {
            const int32_t* found = own.lists.data() + (level - 1) * stride;
            for (int32_t i = 0; i < counts[level - 1]; ++i)
                highest[found[i] - first] = std::max(highest[found[i] - first], uint8_t(level));
            bytes += counts[level - 1] * level_bytes(level);
        }
        count_unread(at, n, bytes, t, thread);
    }
    for (int32_t level = 0; level < PLANES; ++level) {
        lists[level] = level_list(columns, level, thread);
        counts[level] = 0;
    }
    for (int32_t i = 0; i < n; ++i)
        if (highest[i]) lists[highest[i] - 1][counts[highest[i] - 1]++] = first + i;
    Active active = gather_levels(columns, counts, thread);
    float* moved = own.d.data();
    for (int32_t t = thread; t < batch; t += pool_.threads()) {
        float* row = x + t * columns;
        for (int32_t i = 0; i < active.count; ++i) moved[i] = row[active.indices[i]];
        memcpy(row, moved, active.count * sizeof(float));
    }
    return active;
}

// From the products of attn_in to the inputs of attn_out in `wide_inner_`.
void Decoder::attend_batch(const Sums& qkv, int layer, int32_t batch, bool sparse, int thread) {
    if (model_.layers[layer].keeps_state()) {
        mix(qkv, layer, moving_.data(), batch, wide_inner_.data(), thread);
        return;
    }
    int32_t at = -1;  // the sequence whose heads this thread has normed
    const AttentionShape& a = heads(layer);
    auto attend_head = [&](int32_t index, int32_t kv_head) {
        if (index != at) norm_heads(sums_of(qkv, index), layer, thread);
        at = index;
        float* y = wide_inner_.data() + int64_t(index) * a.q_rows();
        attend(sums_of(qkv, index), *batch_caches_[index], positions_[index], layer, kv_head, sparse, y, thread);
    };
    // A position sees those of its text before it, whose keys the same thread has appended.
    if (one_text_)
        pool_.share(a.kv_heads, [&](int kv_head, int) {
            for (int32_t index = 0; index < batch; ++index) attend_head(index, kv_head);
        });
    else
        pool_.share(batch * a.kv_heads, [&](int item, int) { attend_head(item / a.kv_heads, item % a.kv_heads); });
}

// From the products of mlp_in to the inputs of mlp_mid in `wide_inner_`; each thread does a range of the columns.
void Decoder::gate_batch(const Sums& both, int layer, int32_t batch, int thread) {
    const int32_t width = model_.layers[layer].width;
    int32_t first = border(width, thread), n = border(width, thread + 1) - first;
    float* up = scratch_[thread].d.data();
    for (int32_t t = 0; t < batch && n; ++t) {
        float* x = wide_inner_.data() + int64_t(t) * width + first;
        read(sums_of(both, t), first, n, x);
        read(sums_of(both, t), both.rows - width + first, n, up);
        activate(layer, x, up, n, x);
    }
}

// What MLPs by neurons add to the sequences. A record is read where its neuron is active in any sequence of a thread's share.
void Decoder::neurons_batch(const Sums& gate, int layer, int32_t batch, bool sparse, int thread) {
    int32_t first = batch * thread / pool_.threads(), last = batch * (thread + 1) / pool_.threads();
    int64_t count = model_.layers[layer].neurons->count;
    float* gates = wide_rows_.data();
    for (int32_t t = first; t < last; ++t) read(sums_of(gate, t), 0, count, gates + t * count);
    neuron_rows(layer, first, last, batch);
    if (thread != 0) return;
    int64_t active = sparse ? 0 : count;
    for (int64_t n = 0; n < count && sparse; ++n) {
        bool any = false;
        for (int32_t t = 0; t < batch; ++t) any |= gates[t * count + n] > 0;
        active += any;
    }
    active_[layer * SITES + MLP_MID] += active;
}

}  // namespace sparsepack
