// One token: the phases that decoder.h lists.
#include <string.h>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

void Decoder::step(int64_t id, bool sparse, float* logits) {
    check(&id, 1);
    pool_.run([&](int thread) { token(id, sparse, logits, thread); });
    cache_.advance(1);
    ++stepped_;
}

void Decoder::token(int64_t id, bool sparse, float* logits, int thread) {
    Scratch& own = scratch_[thread];
    float *x = own.x.data(), *normed = own.normed.data();
    embed(model_.embedding, id, x);
    for (int number = 0; number < int(model_.layers.size()); ++number) {
        const Layer& layer = model_.layers[number];

        k_.rms_norm(x, layer.attn_norm.data(), s_.hidden, s_.eps, normed);
        Input input = select(number, ATTN_IN, normed, sparse, thread);
        multiply(input);
        pool_.barrier();
        pool_.share(a_.kv_heads, [&](int kv_head, int) { attend(input, number, kv_head, sparse, thread); });
        pool_.barrier();
        input = select(number, ATTN_OUT, attn_output_.data(), sparse, thread);
        multiply(input);
        pool_.barrier();
        add_to(x, sums(input), thread);

        k_.rms_norm(x, layer.mlp_norm.data(), s_.hidden, s_.eps, normed);
        input = select(number, MLP_IN, normed, sparse, thread);
        multiply(input);
        pool_.barrier();
        if (layer.neurons) {
            add_to(x, neurons(input, normed, number, sparse, thread), thread);
            continue;
        }
        input = gate(input, number, sparse, thread);
        multiply(input);
        pool_.barrier();
        add_to(x, sums(input), thread);
    }
    k_.rms_norm(x, model_.output_norm.data(), s_.hidden, s_.eps, normed);
    share_matmul(k_, pool_, model_.output, normed, 1, logits);
}

// The query heads of one key head: from the product of attn_in to their part of `attn_output_`.
void Decoder::attend(const Input& input, int layer, int32_t kv_head, bool sparse, int thread) {
    Scratch& own = scratch_[thread];
    int32_t width = a_.head_dim, grouped = a_.gqa_ratio() * width;
    float *q = own.heads.data(), *k = q + grouped, *v = k + width;
    Sums qkv = sums(input);
    read(qkv, int64_t(kv_head) * grouped, grouped, q);
    read(qkv, a_.q_rows() + int64_t(kv_head) * width, width, k);
    read(qkv, a_.q_rows() + a_.kv_rows() + int64_t(kv_head) * width, width, v);
    cache_.append(layer, kv_head, cache_.length(), q, k, v);
    float* y = attn_output_.data() + int64_t(kv_head) * grouped;
    cache_.attend(layer, kv_head, cache_.length(), {q, y, grouped, grouped, 1, own.attention.data(), sparse});
}

// The channel at which a thread's range of the MLP's channels begins, and the thread's list of active ones in it.
int32_t Decoder::border(int thread) const {
    if (thread == pool_.threads()) return s_.intermediate;
    return int32_t(int64_t(s_.intermediate) * thread / pool_.threads()) / 16 * 16;
}
int32_t* Decoder::list(int thread) const { return listed_.data() + border(thread) + 16 * thread; }

// Puts the lists of all threads together, this one's with `count` entries, in its own scratch; returns how many there
// are.
int32_t Decoder::gather(int32_t count, int thread) {
    counts_.data()[16 * thread] = count;
    pool_.barrier();
    int32_t *indices = scratch_[thread].indices.data(), total = 0;
    for (int other = 0; other < pool_.threads(); ++other) {
        int32_t active = counts_.data()[16 * other];
        memcpy(indices + total, list(other), active * sizeof(int32_t));
        total += active;
    }
    return total;
}

// From the product of mlp_in to the input of mlp_mid. Each thread does a range of the columns and lists what is active
// in it; after a barrier each puts the lists together for itself.
Decoder::Input Decoder::gate(const Input& input, int layer, bool sparse, int thread) {
    const Site& site = model_.layers[layer].sites[MLP_MID];
    sparse = sparse && !site.threshold.empty();
    Scratch& own = scratch_[thread];
    int32_t first = border(thread), n = border(thread + 1) - first, count = 0;
    float *x = middle_.data() + first, *up = own.d.data();
    if (n) {
        Sums both = sums(input);
        read(both, first, n, x);
        read(both, int64_t(s_.intermediate) + first, n, up);
        k_.gate(s_.activation, x, up, n, x);
    }
    if (n && sparse) {
        bool per_channel = site.threshold.size() > 1;
        const float* offset = site.offset.empty() ? nullptr : site.offset.data() + first;
        const float* threshold = site.threshold.data() + (per_channel ? first : 0);
        count = k_.collect(x, offset, threshold, per_channel, n, first, x, list(thread));
    }
    int32_t total = gather(count, thread);
    if (!sparse) return whole(layer, MLP_MID, middle_.data(), thread);
    if (thread == 0) active_[layer * SITES + MLP_MID] += total;
    Active active = {own.indices.data(), total};
    return {&site, middle_.data(), active, &site.sparse_bias, partial_sums_[MLP_MID & 1].data()};
}

}  // namespace sparsepack
