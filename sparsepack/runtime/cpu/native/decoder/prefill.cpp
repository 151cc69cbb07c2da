// Many tokens at once, dense, or as steps compute them (decoder/masked_rows.cpp). Products are shared out by quads and
// positions, all else by positions.
#include <string.h>

#include <algorithm>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

void Decoder::grow_wide(int64_t positions) {
    wide_x_.grow(positions * s_.hidden);
    wide_normed_.grow(positions * s_.hidden);
    for (const Layer& layer : model_.layers)
        if (layer.parallel) wide_read_.grow(positions * s_.hidden);
    int64_t rows = std::max(2 * s_.intermediate, s_.hidden), inner = attn_output_.size(), qkv = 0;
    for (const Layer& layer : model_.layers) {
        for (int site : {ATTN_IN, ATTN_KV_B})
            if (layer.sites[site].matrix) rows = std::max(rows, layer.sites[site].matrix->rows);
        if (layer.latent) {
            wide_latents_[0].grow(positions * layer.latent->q_rank);
            wide_latents_[1].grow(positions * layer.latent->kv_rank);
            wide_turning_.grow(positions * layer.latent->turning);
            wide_heads_.grow(positions * cache_->shape(layer.kept).q_rows());
        }
        if (layer.gated || layer.k_eq_v || layer.latent)
            qkv = std::max<int64_t>(qkv, cache_->shape(layer.kept).qkv_rows());
        if (layer.per_layer) inner = std::max<int64_t>(inner, layer.per_layer->gate->rows);
        if (layer.delta_net) delta_gates_.grow(positions * 2 * layer.delta_net->shape.value_heads);
    }
    wide_rows_.grow(positions * rows);
    wide_inner_.grow(positions * std::max<int64_t>({inner, s_.intermediate, s_.hidden}));
    if (qkv) wide_qkv_.grow(positions * qkv);
    if (model_.per_layer) per_layer_.grow(positions * model_.per_layer->embedding.columns);
    if (!model_.layers.empty() && model_.layers[0].gates)
        wide_inputs_.grow(positions * neuron_input_stride(model_.layers[0].gates->bands));
    if (!starts_.size()) return;
    int64_t used = int64_t(scratch_[0].chosen.size());
    routed_.grow(positions * starts_.size());
    wide_chosen_.grow(positions * used);
    wide_weights_.grow(positions * used);
    placed_.grow(positions * used);
    bool normed = false;
    for (const Layer& layer : model_.layers) normed |= layer.experts && !layer.experts->norm.empty();
    if (normed) wide_experts_.grow(2 * positions * s_.hidden);
}

void Decoder::prefill(int32_t sequence, const int64_t* ids, int64_t count, bool all, float* logits) {
    append({{sequence, count, count, all ? 0 : count - 1}}, ids, false, logits);
}

void Decoder::append(const std::vector<Continuation>& all, const int64_t* ids, bool sparse, float* logits) {
    int64_t total = 0;
    for (const Continuation& one : all) {
        checked(one.sequence, ids + total, one.count);
        total += one.count;
    }
    if (!total) return;
    const int64_t most = std::min<int64_t>(s_.prefill_tokens, total);
    sparse_rows_ = sparse;
    grow_wide(most);
    int64_t levels = 0;
    for (const Layer& layer : model_.layers)
        for (const Site& site : layer.sites)
            if (sparse && site.matrix && site.has_levels()) levels = std::max(levels, site.matrix->columns);
    wide_levels_.grow(most * levels);
    if (starts_.size()) expert_levels_.grow(most * levels);
    steps_.resize(most);
    for (Scratch& own : scratch_) {
        own.attention.grow(model_.caches[0]->scratch(KvCache::BLOCK));
        own.counted.assign(active_.size(), 0);
    }
    segments_.clear(), scored_.clear();
    int32_t rows = 0;
    auto flush = [&] {
        append_chunk(ids, rows, logits);
        ids += rows, logits += int64_t(scored_.size()) * s_.vocabulary;
        rows = 0, segments_.clear(), scored_.clear();
    };
    for (const Continuation& one : all) {
        KvCache& cache = *model_.caches[one.sequence];
        const int64_t start = cache.length();
        for (int64_t done = 0; done < one.count;) {
            const bool stepped = done >= one.dense;
            int64_t count = std::min((stepped ? one.count : one.dense) - done, most - rows);
            segments_.push_back({one.sequence, rows, int32_t(count), int32_t(start + done - cache.length()), stepped});
            for (int64_t i = std::max(done, one.unscored); i < done + count; ++i)
                scored_.push_back(int32_t(rows + i - done));
            std::fill_n(steps_.begin() + rows, count, stepped);
            rows += int32_t(count), done += count;
            if (rows == most) flush();
        }
    }
    if (rows) flush();
}

// The tokens of `segments_`.
void Decoder::append_chunk(const int64_t* ids, int32_t count, float* logits) {
    const int all = int(model_.layers.size());
    int32_t stepped = int32_t(std::count(steps_.begin(), steps_.begin() + count, 1));
    steps_some_ = stepped > 0;
    for (const Segment& of : segments_) {
        if (!of.before) states_[of.sequence].begin(model_.caches[of.sequence]->length());
        if (!of.before) states_[of.sequence].tokens = -1;
    }
    cache_ = model_.caches[segments_[0].sequence].get();
    sequence_ = segments_[0].sequence;
    // Layers that read keys and values of others leave nothing behind: they are for logits alone.
    const bool last_alone = segments_.size() == 1 && scored_.size() == 1 && scored_[0] == count - 1;
    const int layers = !steps_some_ && (scored_.empty() || last_alone) ? own_layers_ : all;
    pool_.run([&](int thread) { prefill_together(ids, count, layers, logits, thread); });
    if (layers < all && last_alone) {
        cache_->advance(count - 1);
        const std::vector<int64_t> active = active_;
        pool_.run([&](int thread) { last_position(count, logits, thread); });
        active_ = active;
        cache_->advance(1 - count);
    }
    for (const Segment& of : segments_) {
        model_.caches[of.sequence]->advance(of.count);
        states_[of.sequence].tokens = model_.caches[of.sequence]->length();
    }
    stepped_ += stepped;
    for (Scratch& own : scratch_)
        for (size_t i = 0; i < active_.size(); ++i) active_[i] += own.counted[i], own.counted[i] = 0;
}

// The layers from `own_layers_` on at the last of `count` positions, which the others have left in `wide_x_`.
void Decoder::last_position(int32_t count, float* logits, int thread) {
    memcpy(scratch_[thread].x.data(), wide_x_.data() + int64_t(count - 1) * s_.hidden, s_.hidden * sizeof(float));
    if (model_.per_layer && count > 1) {
        const int64_t row = model_.per_layer->embedding.columns;
        if (thread == 0) memcpy(per_layer_.data(), per_layer_.data() + (count - 1) * row, row * sizeof(float));
        pool_.barrier();
    }
    layers_from(own_layers_, false, logits, thread);
}

// The first `layers` layers, and where these are all the output matrix, for the rows that are scored.
void Decoder::prefill_together(const int64_t* ids, int32_t count, int layers, float* logits, int thread) {
    int32_t first = int32_t(int64_t(count) * thread / pool_.threads());
    int32_t last = int32_t(int64_t(count) * (thread + 1) / pool_.threads());
    for (int32_t p = first; p < last; ++p) look_up(ids[p], wide_x_.data() + int64_t(p) * s_.hidden);
    if (model_.per_layer) {
        pool_.barrier();
        per_layer_inputs(ids, wide_x_.data(), count, thread);
    }
    for (int number = 0; number < layers; ++number) {
        const Layer& layer = model_.layers[number];
        const int64_t own = int64_t(first) * s_.hidden;
        const size_t own_bytes = size_t(last - first) * s_.hidden * sizeof(float) * layer.parallel;

        if (layer.basis) change_basis_of_rows(*layer.basis, first, last, count);
        if (layer.mixes()) {
            norm_rows(layer.attn_norm, first, last);
            if (own_bytes) memcpy(wide_read_.data() + own, wide_normed_.data() + own, own_bytes);
            mixer_rows(number, first, last, count, thread);
        }
        if (layer.has_mlp()) {
            if (!layer.parallel) norm_rows(layer.mlp_norm, first, last);
            if (own_bytes) memcpy(wide_normed_.data() + own, wide_read_.data() + own, own_bytes);
            mlp_rows(number, first, last, count, thread);
        }
        add_per_layer_rows(number, first, last, count);
        scale(number, last - first, wide_x_.data() + int64_t(first) * s_.hidden);
    }
    if (scored_.empty() || layers < int(model_.layers.size())) return;
    const int32_t scored = int32_t(scored_.size());
    for (int64_t i = 0; i < scored; ++i)
        if (first <= scored_[i] && scored_[i] < last)
            norm(wide_x_.data() + int64_t(scored_[i]) * s_.hidden, model_.output_norm,
                 wide_normed_.data() + i * s_.hidden);
    pool_.barrier();
    share_matmul(k_, pool_, model_.output, wide_normed_.data(), scored, logits);
    cap_logits(logits, scored, thread);
}

// Attention of a block, or what it has in its place, at all positions, from `wide_normed_` to what it adds.
void Decoder::mixer_rows(int number, int32_t first, int32_t last, int32_t count, int thread) {
    const Layer& layer = model_.layers[number];
    if (layer.delta_net) {  // its gates read what the product leaves out, too
        pool_.barrier();
        multiply_gates(number, wide_normed_.data(), count, thread);
        pool_.barrier();
    }
    mask_rows(number, ATTN_IN, wide_normed_.data(), first, last, thread);
    pool_.barrier();
    matmul(layer.sites[ATTN_IN], wide_normed_.data(), count);
    pool_.barrier();
    if (layer.keeps_state()) {
        mix_rows(number, first, last, thread);
    } else if (layer.latent) {
        attend_latent_rows(number, first, last, count, thread);
    } else {
        append_rows(number, first, last);
        pool_.barrier();
        attend_rows(number, (layer.gated || layer.k_eq_v ? wide_qkv_ : wide_rows_).data(), thread);
        if (layer.gated) {
            pool_.barrier();
            gate_attended(number, first, last);
        }
    }
    pool_.barrier();
    float* inner = (layer.latent ? wide_heads_ : wide_inner_).data();
    if (!layer.attn_sub_norm.empty() || steps_some_) {
        norm_each(layer.attn_sub_norm, first, last, inner);
        mask_rows(number, ATTN_OUT, inner, first, last, thread);
        pool_.barrier();
    }
    matmul(layer.sites[ATTN_OUT], inner, count);
    pool_.barrier();
    add_rows(layer.sites[ATTN_OUT], layer.attn_post_norm, first, last);
}

// The MLP of a block at all positions, from `wide_normed_` to what it adds.
void Decoder::mlp_rows(int number, int32_t first, int32_t last, int32_t positions, int thread) {
    const Layer& layer = model_.layers[number];
    if (layer.experts) {
        pool_.barrier();
        return expert_rows(number, first, last, positions, thread);
    }
    if (layer.gates) {
        pool_.barrier();
        gates(number, wide_normed_.data(), positions, wide_rows_.data(), thread);
    } else {
        mask_rows(number, MLP_IN, wide_normed_.data(), first, last, thread);
        pool_.barrier();
        matmul(layer.sites[MLP_IN], wide_normed_.data(), positions);
        pool_.barrier();
    }
    if (layer.neurons) {
        count_neurons(number, first, last, thread);
        return neuron_rows(number, first, last, positions);
    }
    gate_rows(number, first, last);
    norm_each(layer.mlp_sub_norm, first, last, wide_inner_.data());
    mask_rows(number, MLP_MID, wide_inner_.data(), first, last, thread);
    pool_.barrier();
    matmul(layer.sites[MLP_MID], wide_inner_.data(), positions);
    pool_.barrier();
    add_rows(layer.sites[MLP_MID], layer.mlp_post_norm, first, last);
}

// wide_rows_[position][rows of the site] = x[position][columns of the site] W^T
void Decoder::matmul(const Site& site, const float* x, int32_t positions) {
    share_matmul(k_, pool_, *site.matrix, x, positions, wide_rows_.data(), levels(site));
}

// The heads of a gated delta net, or the channels of a short convolution, at all positions, from the products of attn_in to
// the inputs of attn_out.
void Decoder::mix_rows(int number, int32_t first, int32_t last, int thread) {
    const Layer& layer = model_.layers[number];
    const Site& in = layer.sites[ATTN_IN];
    const int64_t rows = in.matrix->rows;
    const int64_t width = layer.sites[ATTN_OUT].matrix->columns;
    for (int64_t p = first; p < last; ++p)
        if (!bias(in, p).empty())
            k_.sum(bias(in, p).data(), 0, 1, nullptr, int32_t(rows), 1, wide_rows_.data() + p * rows);
    if (steps_some_) pool_.barrier();
    if (layer.mamba) {
        for (const Segment& of : segments_) {
            if (of.first) pool_.barrier();
            mix_mamba(nullptr, number, &of.sequence, 1, of.count, wide_rows_.data() + of.first * rows,
                      wide_inner_.data() + of.first * width, thread);
        }
        return;
    }
    auto rows_of = [&](const Segment& of) {
        const float* from = wide_rows_.data() + of.first * rows;
        return [from, rows](int32_t position, int64_t first, int64_t count, float* to) {
            memcpy(to, from + position * rows + first, count * sizeof(float));
        };
    };
    if (layer.short_conv)
        return pool_.share(layer.short_conv->parts(), [&](int part, int) {
            for (const Segment& of : segments_)
                mix_channels(*layer.short_conv, state(of.sequence, number), part, of.count, rows_of(of),
                             wide_inner_.data() + of.first * width, scratch_[thread].delta.data());
        });
    const DeltaNet& net = *layer.delta_net;
    pool_.share(net.shape.key_heads, [&](int head, int) {
        for (const Segment& of : segments_)
            mix_head(k_, net, state(of.sequence, number), head, of.count, rows_of(of),
                     delta_gates_.data() + int64_t(of.first) * 2 * net.shape.value_heads, s_.eps,
                     wide_inner_.data() + of.first * width, scratch_[thread].delta.data());
    });
}

// Keeps keys and values of rows first ... last - 1 of qkv.
void Decoder::cache_rows(int number, float* qkv, int32_t first, int32_t last) {
    const int32_t kept = model_.layers[number].kept;
    for (const Segment& of : segments_) {
        int32_t from = std::max(first, of.first), to = std::min(last, of.first + of.count), base = of.first - of.before;
        if (from < to)
            model_.caches[of.sequence]->append_rows(kept, qkv + int64_t(base) * heads(number).qkv_rows(), from - base,
                                                    to - base);
    }
}

// wide_inner_ = attention of all rows of qkv.
void Decoder::attend_rows(int number, const float* qkv, int thread) {
    const int32_t kept = model_.layers[number].kept;
    const AttentionShape& a = heads(number);
    int items = 0;
    for (const Segment& of : segments_) items += cache_->attend_items(kept, of.count);
    pool_.share(items, [&](int item, int) {
        const Segment* of = segments_.data();
        for (; item >= cache_->attend_items(kept, of->count); ++of) item -= cache_->attend_items(kept, of->count);
        model_.caches[of->sequence]->attend_item(item, kept, qkv + int64_t(of->first) * a.qkv_rows(), of->before,
                                                 of->count, wide_inner_.data() + int64_t(of->first) * a.q_rows(),
                                                 scratch_[thread].attention.data(), of->stepped && sparse_rows_);
    });
}

// What attention gives at positions first ... last - 1, times the sigmoid of its gates.
void Decoder::gate_attended(int number, int32_t first, int32_t last) {
    int64_t stride = model_.layers[number].sites[ATTN_IN].matrix->rows;
    const AttentionShape& a = heads(number);
    for (int64_t p = first; p < last; ++p)
        gate_heads(wide_rows_.data() + p * stride + a.head_dim, 2 * a.head_dim, a.heads, a.head_dim,
                   wide_inner_.data() + p * a.q_rows());
}

// From the products of attn_in at positions first ... last - 1 to queries, and to keys and values in the cache.
void Decoder::append_rows(int number, int32_t first, int32_t last) {
    const Site& in = model_.layers[number].sites[ATTN_IN];
    int32_t rows = int32_t(in.matrix->rows);
    for (int32_t p = first; p < last; ++p)
        if (!bias(in, p).empty())
            k_.sum(bias(in, p).data(), 0, 1, nullptr, rows, 1, wide_rows_.data() + int64_t(p) * rows);
    const Layer& of = model_.layers[number];
    const AttentionShape& a = heads(number);
    for (int32_t p = first; p < last && !of.q_row_norm.empty(); ++p) {
        float *q = wide_rows_.data() + int64_t(p) * rows, *k = q + a.q_rows();
        k_.rms_norm(q, of.q_row_norm.data(), a.q_rows(), s_.eps, q);
        k_.rms_norm(k, of.k_row_norm.data(), a.kv_rows(), s_.eps, k);
    }
    if (!of.gated && !of.k_eq_v) return cache_rows(number, wide_rows_.data(), first, last);
    const size_t head = a.head_dim, q_rows = a.q_rows(), kv_rows = a.kv_rows();
    for (int64_t p = first; p < last; ++p) {
        const float* from = wide_rows_.data() + p * rows;
        float* to = wide_qkv_.data() + p * a.qkv_rows();
        if (of.k_eq_v) {
            memcpy(to, from, (q_rows + kv_rows) * sizeof(float));
            memcpy(to + q_rows + kv_rows, from + q_rows, kv_rows * sizeof(float));
            continue;
        }
        for (int32_t h = 0; h < a.heads; ++h) memcpy(to + h * head, from + 2 * h * head, head * sizeof(float));
        memcpy(to + q_rows, from + 2 * q_rows, 2 * kv_rows * sizeof(float));
    }
    cache_rows(number, wide_qkv_.data(), first, last);
}

void Decoder::gate_rows(int number, int32_t first, int32_t last) {
    const Site& in = model_.layers[number].sites[MLP_IN];
    int32_t n = model_.layers[number].width, rows = int32_t(in.matrix->rows);
    for (int32_t p = first; p < last; ++p) {
        float *gate = wide_rows_.data() + int64_t(p) * rows, *up = gate + rows - n;
        if (!bias(in, p).empty()) k_.sum(bias(in, p).data(), 0, 1, nullptr, rows, 1, gate);
        activate(number, gate, up, n, wide_inner_.data() + int64_t(p) * n);
    }
}

// x += the products of a site that leads back to it, normed where `norm` is not empty
void Decoder::add_rows(const Site& site, const std::vector<float>& norm, int32_t first, int32_t last) {
    for (int64_t p = first; p < last; ++p) {
        const float* bias = this->bias(site, p).empty() ? nullptr : this->bias(site, p).data();
        float *y = wide_rows_.data() + p * s_.hidden, *x = wide_x_.data() + p * s_.hidden;
        if (norm.empty()) {
            k_.sum(y, 0, 1, bias, s_.hidden, 1, x);
            continue;
        }
        if (bias) k_.sum(bias, 0, 1, nullptr, s_.hidden, 1, y);
        k_.rms_norm(y, norm.data(), s_.hidden, s_.eps, y);
        k_.sum(y, 0, 1, nullptr, s_.hidden, 1, x);
    }
}

// x = basis x of all positions, of which this thread has made first ... last - 1 and goes on with them.
void Decoder::change_basis_of_rows(const Rows& basis, int32_t first, int32_t last, int32_t positions) {
    pool_.barrier();
    share_matmul(k_, pool_, basis, wide_x_.data(), positions, wide_inner_.data());
    pool_.barrier();
    int64_t at = int64_t(first) * s_.hidden, count = int64_t(last - first) * s_.hidden;
    memcpy(wide_x_.data() + at, wide_inner_.data() + at, count * sizeof(float));
}

void Decoder::norm_rows(const std::vector<float>& weight, int32_t first, int32_t last) {
    for (int64_t p = first; p < last; ++p)
        norm(wide_x_.data() + p * s_.hidden, weight, wide_normed_.data() + p * s_.hidden);
}

}  // namespace sparsepack
