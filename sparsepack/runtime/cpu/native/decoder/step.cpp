// One token of one sequence: the phases that decoder.h lists.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

void Decoder::step(const int32_t* sequences, const int64_t* ids, int32_t count, bool sparse, float* logits) {
    batch_caches_.clear();
    moving_.assign(sequences, sequences + count);
    positions_.clear();
    one_text_ = count > 1 && sequences[0] == sequences[count - 1];
    if (one_text_ && count > MOST_POSITIONS) throw std::out_of_range("more positions than a step takes");
    for (int32_t i = 0; i < count; ++i) {
        const int32_t before = one_text_ ? i : 0;
        if (i && (one_text_ ? sequences[i] != sequences[0] : sequences[i] <= sequences[i - 1]))
            throw std::out_of_range("sequences not in ascending order");
        batch_caches_.push_back(&checked(sequences[i], ids + i - before, before + 1));
        positions_.push_back(batch_caches_[i]->length() + before);
    }
    if (!count) return;
    if (one_text_) check_one_text(sparse);
    for (int32_t i = 0; i < count; ++i) states_[sequences[i]].begin(batch_caches_[i]->length());
    for (int32_t i = 0; i < count; ++i) states_[sequences[i]].tokens = -1;
    if (count == 1) {
        cache_ = batch_caches_[0], sequence_ = sequences[0];
        if (clock_) clock_->begin();
        pool_.run([&](int thread) { token(*ids, sparse, logits, thread); });
        if (clock_) clock_->all_waited(OUTPUT);
    } else {
        grow_wide(count);
        pool_.run([&](int thread) { tokens(ids, count, sparse, logits, thread); });
    }
    if (sparse && scales_thresholds()) update_scales();
    for (int32_t i = 0; i < count; ++i) {
        batch_caches_[i]->advance(1);
        states_[sequences[i]].tokens = batch_caches_[i]->length();
    }
    ++stepped_;
}

// Throws std::invalid_argument where positions of a text cannot be computed beside each other as steps compute them.
void Decoder::check_one_text(bool sparse) const {
    if (sparse && scales_thresholds())
        throw std::invalid_argument("thresholds follow from the token before: expected steps");
    for (const Layer& layer : model_.layers) {
        if (layer.keeps_state() || layer.latent) throw std::invalid_argument("a state or latents: expected steps");
        for (const Site& site : layer.sites)
            if (sparse && site.matrix && (site.has_levels() || (layer.experts && !site.threshold.empty())))
                throw std::invalid_argument("levels, or columns of experts: expected steps");
    }
}

// A thread's work on a phase ends, and what it does next is of another.
void Decoder::worked(Phase phase, int thread) noexcept {
    if (clock_) clock_->worked(phase, thread);
}

// A phase ends: waits for the other threads.
void Decoder::meet(Phase phase, int thread) noexcept {
    worked(phase, thread);
    pool_.barrier();
    if (clock_) clock_->waited(phase, thread);
}

void Decoder::token(int64_t id, bool sparse, float* logits, int thread) {
    float* x = scratch_[thread].x.data();
    look_up(id, x);
    if (model_.per_layer) per_layer_inputs(&id, x, 1, thread);
    layers_from(0, sparse, logits, thread);
}

// The layers from `first` on of one position, whose hidden state each thread has, and the output matrix.
void Decoder::layers_from(int first, bool sparse, float* logits, int thread) {
    Scratch& own = scratch_[thread];
    float *x = own.x.data(), *normed = own.normed.data();
    for (int number = first; number < int(model_.layers.size()); ++number) {
        const Layer& layer = model_.layers[number];

        if (layer.basis) change_basis(*layer.basis, x);
        if (layer.mixes()) {
            norm(x, layer.attn_norm, normed);
            add_to(x, mixer(number, normed, sparse, thread), layer.attn_post_norm, thread);
        }
        if (layer.has_mlp()) {
            if (!layer.parallel) norm(x, layer.mlp_norm, normed);
            add_to(x, mlp(number, normed, sparse, thread), layer.mlp_post_norm, thread);
        }
        add_per_layer(number, x, thread);
        scale(number, 1, x);
    }
    norm(x, model_.output_norm, normed);
    worked(LISTS, thread);
    share_matmul(k_, pool_, model_.output, normed, 1, logits);
    cap_logits(logits, 1, thread);
    worked(OUTPUT, thread);
}

// What attention, or what a block has in its place, makes of its input.
Decoder::Sums Decoder::mixer(int number, float* normed, bool sparse, int thread) {
    const Layer& layer = model_.layers[number];
    Input input = select(number, ATTN_IN, normed, sparse, thread);
    worked(LISTS, thread);
    multiply(input);
    if (layer.delta_net) multiply_gates(number, normed, 1, thread);
    meet(ATTN_IN_PRODUCT, thread);
    if (layer.keeps_state()) {
        mix(sums(input), number, &sequence_, 1, attn_output_.data(), thread);
    } else if (layer.latent) {
        attend_latents(input, number, sparse, thread);
    } else {
        norm_heads(sums(input), number, thread);
        pool_.share(heads(number).kv_heads, [&](int kv_head, int) {
            attend(sums(input), *cache_, cache_->length(), number, kv_head, sparse, attn_output_.data(), thread);
        });
    }
    meet(ATTENTION, thread);
    input = select_normed(number, ATTN_OUT, attn_output_.data(), layer.attn_sub_norm, sparse, thread);
    worked(LISTS, thread);
    multiply(input);
    meet(ATTN_OUT_PRODUCT, thread);
    return sums(input);
}

// What the MLP of a block makes of its input.
Decoder::Sums Decoder::mlp(int number, float* normed, bool sparse, int thread) {
    const Layer& layer = model_.layers[number];
    if (layer.experts) {
        int64_t read[2];
        Sums sums = experts(normed, number, sparse, 0, thread, read);
        for (int site : {0, 1})
            if (thread == 0) active_[number * SITES + MLP_IN + site] += read[site];
        return sums;
    }
    if (layer.gates) {
        if (thread == 0) active_[number * SITES + MLP_IN] += s_.hidden;
        Sums sums = gates(number, normed, 1, partial_sums_[MLP_IN & 1].data(), thread);
        return neurons(sums, normed, number, sparse, thread);
    }
    Input input = select(number, MLP_IN, normed, sparse, thread);
    worked(LISTS, thread);
    multiply(input);
    meet(MLP_IN_PRODUCT, thread);
    if (layer.neurons) return neurons(sums(input), normed, number, sparse, thread);
    input = gate(input, number, sparse, thread);
    worked(LISTS, thread);
    multiply(input);
    meet(MLP_MID_PRODUCT, thread);
    return sums(input);
}

// What an MLP makes of n rows of its gate and of up, which without a gate are one.
void Decoder::activate(int layer, const float* gate, const float* up, int32_t n, float* y) const {
    const std::vector<float>& of = model_.layers[layer].xielu;
    if (of.empty()) return k_.gate(s_.activation, gate, up, n, y);
    const float above = of[0], below = of[1], beta = of[2], eps = of[3];
    for (int32_t i = 0; i < n; ++i) {
        const float x = up[i];
        y[i] = beta * x + (x > 0 ? above * x * x : (expm1f(std::min(x, eps)) - x) * below);
    }
}

// x[positions][hidden] times the scalar of a block
void Decoder::scale(int layer, int64_t positions, float* x) const {
    float scalar = model_.layers[layer].scalar;
    for (int64_t i = 0; scalar != 1 && i < positions * s_.hidden; ++i) x[i] *= scalar;
}

void Decoder::look_up(int64_t id, float* x) const {
    embed(model_.embedding, id, x);
    if (s_.embedding_scale != 1)
        for (int32_t i = 0; i < s_.hidden; ++i) x[i] *= s_.embedding_scale;
}

// Of the logits of `count` positions, which all threads have left, each caps a share.
void Decoder::cap_logits(float* logits, int64_t count, int thread) {
    if (!s_.logit_cap) return;
    pool_.barrier();
    int64_t all = count * s_.vocabulary, first = all * thread / pool_.threads();
    k_.soft_cap(logits + first, all * (thread + 1) / pool_.threads() - first, s_.logit_cap);
}

// x = basis x; x is the thread's own. What another thread has yet to copy is not overwritten: it meets this one at a
// barrier of the block before.
void Decoder::change_basis(const Rows& basis, float* x) {
    share_matmul(k_, pool_, basis, x, 1, changed_.data());
    pool_.barrier();
    memcpy(x, changed_.data(), s_.hidden * sizeof(float));
}

// Products of the gates of a gated delta net with x [positions][hidden]. Each thread has a range of the positions, or of the
// rows for one: beside another product that is shared out, no barrier between them.
void Decoder::multiply_gates(int layer, const float* x, int32_t positions, int thread) {
    const Rows& gates = *model_.layers[layer].delta_net->gates;
    int64_t threads = pool_.threads(), tiles = (gates.rows + ROW_TILE - 1) / ROW_TILE;
    int64_t items = positions > 1 ? positions : tiles, first = items * thread / threads;
    int64_t last = items * (thread + 1) / threads;
    if (first == last) return;
    if (positions > 1)
        k_.rows_matmul(&gates, 0, gates.rows, x + first * s_.hidden, s_.hidden, int32_t(last - first),
                       delta_gates_.data() + first * gates.rows, gates.rows);
    else
        k_.rows_matmul(&gates, first * ROW_TILE, std::min(gates.rows, last * ROW_TILE), x, s_.hidden, 1,
                       delta_gates_.data(), gates.rows);
}

// The heads of a gated delta net, or the channels of a short convolution, for a token of each of some sequences, shared out
// among the threads: from the products of attn_in and of `multiply_gates` to y [batch][values].
void Decoder::mix(const Sums& sums, int layer, const int32_t* sequences, int32_t batch, float* y, int thread) {
    if (model_.layers[layer].mamba) return mix_mamba(&sums, layer, sequences, batch, 1, mamba_rows_.data(), y, thread);
    if (model_.layers[layer].short_conv) {
        const ShortConv& conv = *model_.layers[layer].short_conv;
        return pool_.share(batch * conv.parts(), [&](int item, int) {
            int32_t index = item / conv.parts();
            auto rows = [&](int32_t, int64_t first, int64_t count, float* to) {
                read(batch > 1 ? sums_of(sums, index) : sums, first, count, to);
            };
            mix_channels(conv, state(sequences[index], layer), item % conv.parts(), 1, rows,
                         y + int64_t(index) * conv.channels, scratch_[thread].delta.data());
        });
    }
    const DeltaNet& net = *model_.layers[layer].delta_net;
    const DeltaShape& shape = net.shape;
    pool_.share(batch * shape.key_heads, [&](int item, int) {
        int32_t index = item / shape.key_heads;
        auto rows = [&](int32_t, int64_t first, int64_t count, float* to) {
            read(batch > 1 ? sums_of(sums, index) : sums, first, count, to);
        };
        mix_head(k_, net, state(sequences[index], layer), item % shape.key_heads, 1, rows,
                 delta_gates_.data() + int64_t(index) * 2 * shape.value_heads, s_.eps,
                 y + int64_t(index) * shape.values(), scratch_[thread].delta.data());
    });
}

// A state-space model at so many positions of each of some sequences: from rows of attn_in [batch][positions][rows], which
// the products `sums` make where they are given, to y [batch][positions][inner].
void Decoder::mix_mamba(const Sums* sums, int layer, const int32_t* sequences, int32_t batch, int32_t positions,
                        float* rows, float* y, int thread) {
    const Mamba& of = *model_.layers[layer].mamba;
    const int64_t stride = positions * of.rows(), inner = of.inner();
    if (sums) {
        const int32_t pieces = int32_t((of.rows() + Mamba::AT_ONCE - 1) / Mamba::AT_ONCE);
        pool_.share(batch * pieces, [&](int item, int) {
            int64_t first = int64_t(item % pieces) * Mamba::AT_ONCE, index = item / pieces;
            read(batch > 1 ? sums_of(*sums, int32_t(index)) : *sums, first,
                 std::min<int64_t>(Mamba::AT_ONCE, of.rows() - first), rows + index * stride + first);
        });
        pool_.barrier();
    }
    pool_.share(batch * of.parts(), [&](int item, int) {
        int32_t index = item / of.parts();
        convolve_channels(k_, of, state(sequences[index], layer), item % of.parts(), positions, rows + index * stride);
    });
    pool_.barrier();
    pool_.share(batch * of.heads, [&](int item, int) {
        int32_t index = item / of.heads;
        step_head(k_, of, state(sequences[index], layer), item % of.heads, positions, rows + index * stride,
                  y + index * positions * inner, scratch_[thread].delta.data());
    });
    pool_.barrier();
    pool_.share(batch * positions * of.norms, [&](int item, int) {
        int64_t at = item / of.norms;
        norm_outputs(k_, of, item % of.norms, rows + at * of.rows(), of.eps, y + at * inner);
    });
}

// Queries and keys of a sequence, from its product of attn_in, in the thread's own scratch where they are normed together.
void Decoder::norm_heads(const Sums& qkv, int layer, int thread) {
    const Layer& of = model_.layers[layer];
    if (of.q_row_norm.empty()) return;
    const AttentionShape& a = heads(layer);
    float *q = scratch_[thread].rows.data(), *k = q + a.q_rows();
    read(qkv, 0, a.q_rows() + a.kv_rows(), q);
    k_.rms_norm(q, of.q_row_norm.data(), a.q_rows(), s_.eps, q);
    k_.rms_norm(k, of.k_row_norm.data(), a.kv_rows(), s_.eps, k);
}

// The query heads of one key head: from a sequence's product of attn_in to their part of y [q_rows], `norm_heads` before.
void Decoder::attend(const Sums& qkv, KvCache& cache, int64_t position, int layer, int32_t kv_head, bool sparse,
                     float* y, int thread) {
    Scratch& own = scratch_[thread];
    const AttentionShape& a = heads(layer);
    int32_t width = a.head_dim, grouped = a.gqa_ratio() * width;
    float *q = own.heads.data(), *k = q + grouped, *v = k + width, *both = v + width;
    int64_t q_rows = a.q_rows();
    const Layer& of = model_.layers[layer];
    if (of.gated) {
        q_rows *= 2;
        read(qkv, int64_t(kv_head) * 2 * grouped, 2 * grouped, both);
        for (int32_t head = 0; head < a.gqa_ratio(); ++head)
            memcpy(q + head * width, both + 2 * head * width, width * sizeof(float));
        read(qkv, q_rows + int64_t(kv_head) * width, width, k);
    } else if (of.q_row_norm.empty()) {
        read(qkv, int64_t(kv_head) * grouped, grouped, q);
        if (!a.shared) read(qkv, a.q_rows() + int64_t(kv_head) * width, width, k);
    } else {
        memcpy(q, own.rows.data() + int64_t(kv_head) * grouped, grouped * sizeof(float));
        memcpy(k, own.rows.data() + a.q_rows() + int64_t(kv_head) * width, width * sizeof(float));
    }
    if (!a.shared) read(qkv, q_rows + (of.k_eq_v ? 0 : a.kv_rows()) + int64_t(kv_head) * width, width, v);
    cache.append(of.kept, kv_head, position, q, k, v);
    y += int64_t(kv_head) * grouped;
    cache.attend(of.kept, kv_head, position, {q, y, grouped, grouped, 1, own.attention.data(), sparse});
    if (of.gated) gate_heads(both + width, 2 * width, a.gqa_ratio(), width, y);
}

// y[heads][width] *= sigmoid(gates), those of a head `stride` after those of the one before
void Decoder::gate_heads(const float* gates, int64_t stride, int32_t heads, int32_t width, float* y) {
    for (int32_t head = 0; head < heads; ++head)
        for (int32_t i = 0; i < width; ++i) y[head * width + i] /= 1 + expf(-gates[head * stride + i]);
}

// The column at which a thread's range of so many columns begins, and the thread's list of active ones in it.
int32_t Decoder::border(int64_t columns, int thread) const {
    if (thread == pool_.threads()) return int32_t(columns);
    return int32_t(columns * thread / pool_.threads()) / 16 * 16;
}
int32_t* Decoder::list(int64_t columns, int thread) const {
    return listed_.data() + border(columns, thread) + 16 * thread;
}

// Puts the lists of all threads together, this one's with `count` entries, in its own scratch; returns how many there
// are.
int32_t Decoder::gather(int64_t columns, int32_t count, int thread) {
    counts_.data()[16 * thread] = count;
    meet(GATE, thread);
    int32_t *indices = scratch_[thread].indices.data(), total = 0;
    for (int other = 0; other < pool_.threads(); ++other) {
        int32_t active = counts_.data()[16 * other];
        memcpy(indices + total, list(columns, other), active * sizeof(int32_t));
        total += active;
    }
    return total;
}

int32_t* Decoder::level_list(int64_t columns, int32_t level, int thread) const {
    return list(columns, thread) + level * (columns + 16 * pool_.threads());
}

// The same of lists for each level, this thread's with counts [PLANES] entries.
Active Decoder::gather_levels(int64_t columns, const int32_t* counts, int thread) {
    memcpy(counts_.data() + 16 * thread, counts, PLANES * sizeof(int32_t));
    meet(GATE, thread);
    return join_levels(scratch_[thread].indices.data(), pool_.threads(), [&](int32_t level, int other) {
        return List{level_list(columns, level, other), counts_.data()[16 * other + level]};
    });
}

// From the product of mlp_in to the input of mlp_mid. Each thread does a range of the columns and lists what is active
// in it; after a barrier each puts the lists together for itself.
Decoder::Input Decoder::gate(const Input& input, int layer, bool sparse, int thread) {
    const Site& site = model_.layers[layer].sites[MLP_MID];
    const int32_t width = model_.layers[layer].width;
    sparse = sparse && !site.threshold.empty();
    Scratch& own = scratch_[thread];
    int32_t first = border(width, thread), n = border(width, thread + 1) - first, count = 0;
    int32_t counts[PLANES] = {};
    float *x = middle_.data() + first, *up = own.d.data();
    if (n) {
        Sums both = sums(input);
        read(both, first, n, x);
        read(both, both.rows - width + first, n, up);
        activate(layer, x, up, n, x);
    }
    if (const std::vector<float>& norm = model_.layers[layer].mlp_sub_norm; !norm.empty()) {
        meet(GATE, thread);
        return select_normed(layer, MLP_MID, middle_.data(), norm, sparse, thread);
    }
    if (n && sparse && site.has_levels()) {
        int64_t stride = level_list(width, 1, thread) - level_list(width, 0, thread);
        collect_levels(site, x, first, n, 0, x, list(width, thread), int32_t(stride), counts);
    } else if (n && sparse) {
        bool per_channel = site.threshold.size() > 1;
        const float* offset = site.offset.empty() ? nullptr : site.offset.data() + first;
        const float* threshold = thresholds(site, first, n, 0, thread);
        count = k_.collect(x, offset, threshold, per_channel, n, first, x, list(width, thread));
    }
    if (!sparse) {
        meet(GATE, thread);
        return whole(layer, MLP_MID, middle_.data(), thread);
    }
    Active active = {own.indices.data(), 0};
    if (site.has_levels())
        active = gather_levels(width, counts, thread);
    else
        active.count = gather(width, count, thread);
    if (thread == 0) {
        active_[layer * SITES + MLP_MID] += units_read(site, active);
        if (site.has_levels())
            count_unread(site, width, bytes_read(active), 0, thread);
        else
            count_skipped(site, width - active.count, 0, thread);
    }
    return {&site, middle_.data(), active, &site.sparse_bias, partial_sums_[MLP_MID & 1].data()};
}

}  // namespace sparsepack
