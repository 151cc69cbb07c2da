// Many tokens at once, dense. Products are shared out by quads and positions, all else by positions.
#include <string.h>

#include <algorithm>

#include "decoder/decoder.h"
#include "decoder/embedding.h"

namespace sparsepack {

void Decoder::grow_wide(int64_t positions) {
    wide_x_.grow(positions * s_.hidden);
    wide_normed_.grow(positions * s_.hidden);
    for (const Layer& layer : model_.layers)
        if (layer.parallel) wide_read_.grow(std::min<int64_t>(positions, model_.caches.size()) * s_.hidden);
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
    cache_ = &checked(sequence, ids, count);
    grow_wide(std::min<int64_t>(s_.prefill_tokens, std::max<int64_t>(count, 1)));
    for (Scratch& own : scratch_) own.attention.grow(cache_->scratch(KvCache::BLOCK));
    DeltaStates& states = states_[sequence];
    states.begin(cache_->length());
    sequence_ = sequence;
    for (int64_t first = 0; first < count; first += s_.prefill_tokens) {
        int32_t size = int32_t(std::min<int64_t>(s_.prefill_tokens, count - first));
        float* y = all ? logits + first * s_.vocabulary : first + size == count ? logits : nullptr;
        states.tokens = -1;
        // Layers that read keys and values of others leave nothing behind: they are for logits alone.
        const int layers = all ? int(model_.layers.size()) : own_layers_;
        pool_.run([&](int thread) { prefill_together(ids + first, size, layers, y, all, thread); });
        cache_->advance(size - 1);
        if (y && layers < int(model_.layers.size())) {
            const std::vector<int64_t> active = active_;
            pool_.run([&](int thread) { last_position(size, y, thread); });
            active_ = active;
        }
        cache_->advance(1);
        states.tokens = cache_->length();
    }
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

// The first `layers` layers, and where these are all the output matrix. logits: null if they are not wanted.
void Decoder::prefill_together(const int64_t* ids, int32_t count, int layers, float* logits, bool all, int thread) {
    int32_t first = int32_t(int64_t(count) * thread / pool_.threads());
    int32_t last = int32_t(int64_t(count) * (thread + 1) / pool_.threads());
    for (int32_t p = first; p < last; ++p) look_up(ids[p], wide_x_.data() + int64_t(p) * s_.hidden);
    if (model_.per_layer) {
        pool_.barrier();
        per_layer_inputs(ids, wide_x_.data(), count, thread);
    }
    for (int number = 0; number < layers; ++number) {
        const Layer& layer = model_.layers[number];

        if (layer.basis) change_basis_of_rows(*layer.basis, first, last, count);
        if (layer.mixes()) {
            norm_rows(layer.attn_norm, first, last);
            pool_.barrier();
            mixer_rows(number, first, last, count, thread);
        }
        if (layer.has_mlp()) {
            if (!layer.parallel) norm_rows(layer.mlp_norm, first, last);
            pool_.barrier();
            mlp_rows(number, first, last, count, thread);
        }
        add_per_layer_rows(number, first, last, count);
        scale(number, last - first, wide_x_.data() + int64_t(first) * s_.hidden);
    }
    if (!logits || layers < int(model_.layers.size())) return;
    norm_rows(model_.output_norm, first, last);
    pool_.barrier();
    int32_t wanted = all ? count : 1;
    share_matmul(k_, pool_, model_.output, wide_normed_.data() + int64_t(count - wanted) * s_.hidden, wanted, logits);
    cap_logits(logits, wanted, thread);
}

// Attention of a block, or what it has in its place, at all positions, from `wide_normed_` to what it adds.
void Decoder::mixer_rows(int number, int32_t first, int32_t last, int32_t count, int thread) {
    const Layer& layer = model_.layers[number];
    matmul(layer.sites[ATTN_IN], wide_normed_.data(), count);
    if (layer.keeps_state()) {
        if (layer.delta_net) multiply_gates(number, wide_normed_.data(), count, thread);
        pool_.barrier();
        mix_rows(number, count, thread);
    } else if (layer.latent) {
        pool_.barrier();
        attend_latent_rows(number, first, last, count, thread);
    } else {
        pool_.barrier();
        append_rows(number, first, last);
        pool_.barrier();
        const float* qkv = (layer.gated || layer.k_eq_v ? wide_qkv_ : wide_rows_).data();
        cache_->attend_rows(pool_, layer.kept, qkv, count, wide_inner_.data(), scratch_[thread].attention.data());
        if (layer.gated) {
            pool_.barrier();
            gate_attended(number, first, last);
        }
    }
    pool_.barrier();
    if (!layer.attn_sub_norm.empty()) {
        norm_each(layer.attn_sub_norm, first, last, (layer.latent ? wide_heads_ : wide_inner_).data());
        pool_.barrier();
    }
    matmul(layer.sites[ATTN_OUT], (layer.latent ? wide_heads_ : wide_inner_).data(), count);
    pool_.barrier();
    add_rows(layer.sites[ATTN_OUT], layer.attn_post_norm, first, last);
}

// The MLP of a block at all positions, from `wide_normed_` to what it adds.
void Decoder::mlp_rows(int number, int32_t first, int32_t last, int32_t positions, int thread) {
    const Layer& layer = model_.layers[number];
    if (layer.experts) return expert_rows(number, first, last, positions, thread);
    if (layer.gates) {
        gates(number, wide_normed_.data(), positions, wide_rows_.data(), thread);
    } else {
        matmul(layer.sites[MLP_IN], wide_normed_.data(), positions);
        pool_.barrier();
    }
    if (layer.neurons) return neuron_rows(number, first, last, positions);
    gate_rows(number, first, last);
    norm_each(layer.mlp_sub_norm, first, last, wide_inner_.data());
    pool_.barrier();
    matmul(layer.sites[MLP_MID], wide_inner_.data(), positions);
    pool_.barrier();
    add_rows(layer.sites[MLP_MID], layer.mlp_post_norm, first, last);
}

// wide_rows_[position][rows of the site] = x[position][columns of the site] W^T
void Decoder::matmul(const Site& site, const float* x, int32_t positions) {
    share_matmul(k_, pool_, *site.matrix, x, positions, wide_rows_.data());
}

// The heads of a gated delta net, or the channels of a short convolution, at all positions, from the products of attn_in to
// the inputs of attn_out.
void Decoder::mix_rows(int number, int32_t positions, int thread) {
    if (model_.layers[number].mamba)
        return mix_mamba(nullptr, number, &sequence_, 1, positions, wide_rows_.data(), wide_inner_.data(), thread);
    if (model_.layers[number].short_conv) {
        const ShortConv& conv = *model_.layers[number].short_conv;
        auto rows = [&](int32_t position, int64_t first, int64_t count, float* to) {
            memcpy(to, wide_rows_.data() + int64_t(position) * conv.rows() + first, count * sizeof(float));
        };
        return pool_.share(conv.parts(), [&](int part, int) {
            mix_channels(conv, state(sequence_, number), part, positions, rows, wide_inner_.data(),
                         scratch_[thread].delta.data());
        });
    }
    const DeltaNet& net = *model_.layers[number].delta_net;
    auto rows = [&](int32_t position, int64_t first, int64_t count, float* to) {
        memcpy(to, wide_rows_.data() + int64_t(position) * net.shape.rows() + first, count * sizeof(float));
    };
    pool_.share(net.shape.key_heads, [&](int head, int) {
        mix_head(k_, net, state(sequence_, number), head, positions, rows, delta_gates_.data(), s_.eps,
                 wide_inner_.data(), scratch_[thread].delta.data());
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
    const std::vector<float>& bias = model_.layers[number].sites[ATTN_IN].bias;
    int32_t rows = int32_t(model_.layers[number].sites[ATTN_IN].matrix->rows);
    for (int32_t p = first; p < last && !bias.empty(); ++p)
        k_.sum(bias.data(), 0, 1, nullptr, rows, 1, wide_rows_.data() + int64_t(p) * rows);
    const Layer& of = model_.layers[number];
    const AttentionShape& a = heads(number);
    for (int32_t p = first; p < last && !of.q_row_norm.empty(); ++p) {
        float *q = wide_rows_.data() + int64_t(p) * rows, *k = q + a.q_rows();
        k_.rms_norm(q, of.q_row_norm.data(), a.q_rows(), s_.eps, q);
        k_.rms_norm(k, of.k_row_norm.data(), a.kv_rows(), s_.eps, k);
    }
    if (!of.gated && !of.k_eq_v) return cache_->append_rows(of.kept, wide_rows_.data(), first, last);
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
    cache_->append_rows(of.kept, wide_qkv_.data(), first, last);
}

void Decoder::gate_rows(int number, int32_t first, int32_t last) {
    const Site& in = model_.layers[number].sites[MLP_IN];
    int32_t n = model_.layers[number].width, rows = int32_t(in.matrix->rows);
    for (int32_t p = first; p < last; ++p) {
        float *gate = wide_rows_.data() + int64_t(p) * rows, *up = gate + rows - n;
        if (!in.bias.empty()) k_.sum(in.bias.data(), 0, 1, nullptr, rows, 1, gate);
        activate(number, gate, up, n, wide_inner_.data() + int64_t(p) * n);
    }
}

// x += the products of a site that leads back to it, normed where `norm` is not empty
void Decoder::add_rows(const Site& site, const std::vector<float>& norm, int32_t first, int32_t last) {
    const float* bias = site.bias.empty() ? nullptr : site.bias.data();
    for (int64_t p = first; p < last; ++p) {
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
