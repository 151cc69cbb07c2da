#include "decoder/decoder.h"

#include <algorithm>
#include <stdexcept>

namespace sparsepack {
namespace {

void expect(bool met, const std::string& what) {
    if (!met) throw std::invalid_argument(what);
}

// experts: how many have levels of their own there
void check_site(const Site& site, int64_t rows, int64_t columns, const std::string& name, size_t experts = 1) {
    size_t width = size_t(columns);
    expect(site.matrix, name + ": no matrix");
    expect(site.matrix->rows == rows && site.matrix->columns == columns, name + ": matrix of another shape");
    expect(site.bias.empty() || site.bias.size() == size_t(rows), name + ": bias of another length");
    size_t thresholds = site.threshold.size();
    expect(thresholds <= 1 || thresholds == width || (site.has_planes() && thresholds == experts * width + PLANES),
           name + ": expected one threshold, or one per column, with planes also per expert, and a step per level");
    for (size_t i = thresholds - PLANES + 1; site.has_levels() && i < thresholds; ++i)
        expect(site.threshold[i] >= site.threshold[i - 1], name + ": steps fall from level to level");
    expect(site.offset.empty() || site.offset.size() == width, name + ": offset of another length");
    expect(site.offset.empty() || thresholds, name + ": offset without threshold");
}

void check_experts(const Experts& e, const Shape& s, const std::string& name) {
    expect(e.router->type == F32 && e.router->columns == s.hidden, name + ": router of another shape or type");
    expect(e.used >= 1 && e.used <= e.count(), name + ": more experts for a token than there are");
    auto fits = [](const std::vector<float>& bias, int64_t n) { return bias.empty() || int64_t(bias.size()) == n; };
    expect(fits(e.router_bias, e.count()) && fits(e.in_bias, e.stored() * int64_t(e.in->rows)) &&
               fits(e.mid_bias, e.stored() * int64_t(e.mid->rows)),
           name + ": biases of other lengths");
    expect(!e.shared_gated || e.shared > 0, name + ": a gate of no shared experts");
    if (e.routing) {
        const Routing& how = *e.routing;
        expect(how.correction.empty() || how.correction.size() == size_t(e.count()), name + ": bias of other experts");
        expect(how.groups >= 1 && how.groups <= MOST_GROUPS && e.count() % how.groups == 0 && how.groups_used >= 1 &&
                   how.groups_used <= how.groups && e.used <= e.count() / how.groups * how.groups_used,
               name + ": groups of experts that do not fit");
    }
    expect(e.shared >= 0, name + ": fewer shared experts than none");
    expect(e.scale.empty() || e.scale.size() == size_t(e.count()), name + ": scales of other experts");
    for (const auto* norm : {&e.norm, &e.shared_norm})
        expect(norm->empty() || (e.shared > 0 && norm->size() == size_t(s.hidden)), name + ": norm of other experts");
    expect(e.norm.empty() == e.shared_norm.empty(), name + ": chosen or shared experts normed, not both");
    for (const Zigzag* of_site : {e.in, e.mid}) {
        for (int32_t i = 1; i < e.stored(); ++i) {
            const Zigzag &one = of_site[0], &other = of_site[i];
            expect(one.rows == other.rows && one.columns == other.columns && one.span == other.span &&
                       one.tile == other.tile && one.block == other.block,
                   name + ": experts of different shapes");
        }
    }
}

void check_delta_net(const DeltaNet& net, const Layer& layer, const Shape& s, const std::string& name) {
    const DeltaShape& of = net.shape;
    for (int32_t value : {of.key_heads, of.value_heads, of.key_dim, of.value_dim, of.taps})
        expect(value > 0, name + ": expected positive sizes of a delta net");
    expect(of.value_heads % of.key_heads == 0, name + ": value heads: expected a multiple of key heads");
    size_t heads = size_t(of.value_heads);
    expect(net.gates->type == F32 && net.gates->rows == 2 * of.value_heads && net.gates->columns == s.hidden,
           name + ": gates of a delta net of another shape or type");
    expect(net.conv.size() == size_t(of.taps) * size_t(of.channels()) && net.rate.size() == heads &&
               net.bias.size() == heads && net.norm.size() == size_t(of.value_dim),
           name + ": convolution, decay or norm of another length");
    expect(layer.sites[ATTN_IN].bias.empty() && !layer.gated, name + ": a delta net with a bias");
}

void check_mamba(const Mamba& of, const Layer& layer, const std::string& name) {
    for (int32_t value : {of.heads, of.head_dim, of.groups, of.state, of.taps, of.norms})
        expect(value > 0, name + ": expected positive sizes of a state-space model");
    expect(of.heads % of.groups == 0 && of.inner() % of.norms == 0, name + ": groups that do not fit");
    size_t heads = size_t(of.heads), channels = size_t(of.channels());
    expect(of.conv.size() == size_t(of.taps) * channels && of.conv_bias.size() == channels && of.rate.size() == heads &&
               of.bias.size() == heads && of.skip.size() == heads && of.norm.size() == size_t(of.inner()),
           name + ": convolution, decay or norm of another length");
    expect(layer.sites[ATTN_IN].bias.empty() && !layer.gated, name + ": a state-space model with a bias");
}

void check_latent(const Latent& of, const Layer& layer, const AttentionShape& a, const std::string& name) {
    for (int32_t value : {of.kv_rank, of.plain, of.turning, of.value})
        expect(value > 0, name + ": expected positive sizes of latents");
    expect(of.q_rank >= 0 && of.q_norm.size() == size_t(of.q_rank) && of.kv_norm.size() == size_t(of.kv_rank),
           name + ": norms of latents of another length");
    expect(a.heads == a.kv_heads && std::max(of.query(), of.value) == a.head_dim, name + ": a cache of other heads");
    expect(!layer.gated && layer.q_row_norm.empty() && !layer.delta_net, name + ": latents beside a gate or a norm");
    check_site(layer.sites[ATTN_KV_B], int64_t(a.heads) * (of.plain + of.value), of.kv_rank, name + " attn_kv_b");
    if (of.q_rank) check_site(layer.sites[ATTN_Q_B], of.queries(a.heads), of.q_rank, name + " attn_q_b");
}

void check_mixer(const Layer& layer, const Shape& s, const AttentionShape& a, const std::string& name) {
    if (layer.delta_net) check_delta_net(*layer.delta_net, layer, s, name);
    if (layer.latent) check_latent(*layer.latent, layer, a, name);
    int64_t into = a.qkv_rows() + layer.gated * a.q_rows() - layer.k_eq_v * a.kv_rows();
    int64_t mixed = a.q_rows();
    if (layer.latent) into = layer.latent->into(a.heads), mixed = int64_t(a.heads) * layer.latent->value;
    if (layer.delta_net) into = layer.delta_net->shape.rows(), mixed = layer.delta_net->shape.values();
    if (layer.short_conv) {
        const ShortConv& of = *layer.short_conv;
        expect(of.channels == s.hidden && of.taps > 0 && of.conv.size() == size_t(of.taps) * size_t(of.channels),
               name + ": short convolution of another shape");
        expect(layer.sites[ATTN_IN].bias.empty() && !layer.gated, name + ": a short convolution with a bias");
        into = of.rows(), mixed = of.channels;
    }
    if (layer.mamba) {
        check_mamba(*layer.mamba, layer, name);
        into = layer.mamba->rows(), mixed = layer.mamba->inner();
    }
    check_site(layer.sites[ATTN_IN], into, s.hidden, name + " attn_in");
    check_site(layer.sites[ATTN_OUT], s.hidden, mixed, name + " attn_out");
    bool shared = !layer.keeps_state() && a.shared;
    expect(layer.gated + layer.k_eq_v + !layer.q_row_norm.empty() + shared + (shared && layer.latent) <= 1,
           name + ": gates, keys for values, keys of another layer, or queries normed together, not two of these");
}

void check_layer(const Layer& layer, const Shape& s, const AttentionShape& a, const std::string& name) {
    expect(layer.mixes() || layer.has_mlp(), name + ": neither attention nor an MLP");
    expect(layer.mixes() ||
               !(layer.keeps_state() || layer.latent || layer.gated || layer.k_eq_v || layer.sites[ATTN_OUT].matrix),
           name + ": no matrix of attention");
    if (layer.mixes()) check_mixer(layer, s, a, name);
    if (!layer.has_mlp()) {
        expect(!layer.sites[MLP_MID].matrix && !layer.gates, name + ": no matrix of an MLP");
    } else if (layer.neurons) {
        if (layer.gates)
            expect(layer.gates->count == s.intermediate && layer.gates->bands * BAND_ROWS == s.hidden,
                   name + ": gates of another shape");
        else
            check_site(layer.sites[MLP_IN], s.intermediate, s.hidden, name + " gate");
        expect(s.activation == RELU, name + ": neurons of another activation");
        expect(layer.neurons->count == s.intermediate, name + ": another number of neurons");
        expect(neuron_hidden(layer.neurons) == s.hidden, name + ": neurons of another width");
    } else {
        if (layer.experts) check_experts(*layer.experts, s, name);
        expect(!layer.experts || layer.mlp_post_norm.empty() || !layer.experts->norm.empty(),
               name + ": experts with a norm after them alone");
        const Zigzag *in = layer.sites[MLP_IN].matrix, *mid = layer.sites[MLP_MID].matrix;
        const int64_t width = mid ? mid->columns : 0;
        expect(width > 0 && width <= s.intermediate, name + ": an MLP wider than all are");
        bool plain = in && in->rows == width;
        expect(layer.xielu.empty() || (plain && layer.xielu.size() == 4 && !layer.experts),
               name + ": xIELU with a gate, or of another length");
        expect(!plain || s.activation == RELU || !layer.xielu.empty(), name + ": another activation without a gate");
        check_site(layer.sites[MLP_IN], (plain ? 1 : 2) * width, s.hidden, name + " mlp_in");
        size_t experts = layer.experts ? size_t(layer.experts->stored()) : 1;
        check_site(layer.sites[MLP_MID], s.hidden, width, name + " mlp_mid", experts);
    }
    for (const auto* norm : {&layer.attn_norm, &layer.mlp_norm})
        expect(norm->empty() || norm->size() == size_t(s.hidden) || norm->size() == 2 * size_t(s.hidden),
               name + ": norm of another length");
    for (const auto* norm : {&layer.attn_post_norm, &layer.mlp_post_norm})
        expect(norm->empty() || norm->size() == size_t(s.hidden), name + ": norm of another length");
    for (int site : {ATTN_OUT, MLP_MID}) {
        const auto& norm = site == ATTN_OUT ? layer.attn_sub_norm : layer.mlp_sub_norm;
        expect(norm.empty() || (layer.sites[site].matrix && !layer.experts &&
                                norm.size() == size_t(layer.sites[site].matrix->columns)),
               name + ": norm of another length");
    }
    expect(layer.q_row_norm.empty() == layer.k_row_norm.empty(), name + ": queries or keys normed, not both");
    if (!layer.q_row_norm.empty())
        expect(layer.q_row_norm.size() == size_t(a.q_rows()) && layer.k_row_norm.size() == size_t(a.kv_rows()),
               name + ": norm of another length");
    if (layer.per_layer) {
        const PerLayer& of = *layer.per_layer;
        expect(of.gate->rows > 0 && of.gate->columns == s.hidden && of.projection->rows == s.hidden &&
                   of.projection->columns == of.gate->rows && of.norm.size() == size_t(s.hidden),
               name + ": matrices of an input of the block of another shape");
    }
    expect(!layer.basis || (layer.basis->rows == s.hidden && layer.basis->columns == s.hidden),
           name + ": basis of another shape");
}

void check_model(const Model& m) {
    const Shape& s = m.shape;
    for (int64_t value : {int64_t(s.hidden), int64_t(s.intermediate), s.vocabulary, int64_t(s.prefill_tokens)})
        expect(value > 0, "sizes: expected positive numbers");
    expect(!m.caches.empty(), "no cache");
    int attend = 0;
    for (const Layer& layer : m.layers) attend += layer.mixes() && !layer.keeps_state();
    expect(attend > 0, "no layer with attention");
    for (const auto& cache : m.caches) expect(cache->layers() == attend, "cache of other layers");
    expect(s.activation >= SILU && s.activation <= RELU2, "activation: unknown");
    for (const Rows* rows : {&m.embedding, &m.output})
        expect(rows->rows == s.vocabulary && rows->columns == s.hidden, "embedding or output of another shape");
    for (const Layer& layer : m.layers)
        expect(bool(layer.per_layer) == bool(m.per_layer), "inputs of some blocks, not of all");
    if (m.per_layer) {
        const PerLayerInputs& of = *m.per_layer;
        const int64_t row = int64_t(m.layers.size() * of.norm.size());
        for (const Layer& layer : m.layers)
            expect(layer.per_layer->gate->rows == int64_t(of.norm.size()), "inputs of blocks of different widths");
        expect(of.embedding.rows == s.vocabulary && of.embedding.columns == row && of.projection->rows == row &&
                   of.projection->columns == s.hidden,
               "table or projection of the inputs of blocks of another shape");
    }
    expect(m.output_norm.size() == size_t(s.hidden) || m.output_norm.size() == 2 * size_t(s.hidden),
           "output norm of another length");
    attend = 0;
    for (size_t i = 0; i < m.layers.size(); ++i) {
        bool attends = m.layers[i].mixes() && !m.layers[i].keeps_state();
        check_layer(m.layers[i], s, attends ? m.caches[0]->shape(attend++) : m.caches[0]->shape(),
                    "block " + std::to_string(i));
    }
}

// bias + W offset
std::vector<float> sparse_bias(const Site& site, const Kernels& kernels) {
    if (site.offset.empty()) return site.bias;
    const Zigzag& m = *site.matrix;
    std::vector<float> y(m.rows);
    const LevelEnds whole = {};
    for (int32_t quad = 0; quad < quads(&m); ++quad) {
        MatmulWork work = {&m,
                           quad,
                           int32_t(m.columns),
                           nullptr,
                           site.offset.data(),
                           y.data(),
                           m.columns,
                           m.rows,
                           1,
                           level_ranges(&whole, int32_t(m.columns))};
        kernels.zigzag_matmul(&work);
    }
    if (!site.bias.empty()) kernels.sum(site.bias.data(), 0, 1, nullptr, int32_t(m.rows), 1, y.data());
    return y;
}

}  // namespace

Decoder::Decoder(Model model, const Kernels& kernels, int threads)
    : model_((check_model(model), std::move(model))),
      s_(model_.shape),
      cache_(model_.caches[0].get()),
      a_(cache_->shape()),
      k_(kernels),
      pool_(threads) {
    int64_t inner = 0, own_heads = 0, delta_gates = 0, delta = 0, latents = 0, mamba_rows = 0, padded[2] = {0, 0};
    int32_t attend = 0, keep = 0;
    states_.resize(model_.caches.size());
    for (Layer& layer : model_.layers) {
        if (layer.has_mlp())
            layer.width = layer.neurons ? s_.intermediate : int32_t(layer.sites[MLP_MID].matrix->columns);
        if (!layer.mixes()) continue;
        if (layer.latent) latents = std::max(latents, layer.latent->scratch());
        layer.kept = layer.keeps_state() ? keep++ : attend++;
        if (layer.short_conv) {
            inner = std::max<int64_t>(inner, layer.short_conv->channels);
            delta = std::max(delta, ShortConv::scratch());
            for (DeltaStates& states : states_) states.layers.emplace_back(*layer.short_conv);
            continue;
        }
        if (layer.mamba) {
            inner = std::max<int64_t>(inner, layer.mamba->inner());
            mamba_rows = std::max(mamba_rows, layer.mamba->rows());
            delta = std::max(delta, layer.mamba->scratch());
            for (DeltaStates& states : states_) states.layers.emplace_back(*layer.mamba);
            continue;
        }
        if (!layer.delta_net) {
            const AttentionShape& of = cache_->shape(layer.kept);
            inner = std::max<int64_t>(inner, of.q_rows());
            own_heads = std::max(own_heads, int64_t(3 * of.gqa_ratio() + 3) * of.head_dim);
            continue;
        }
        const DeltaShape& shape = layer.delta_net->shape;
        inner = std::max<int64_t>(inner, shape.values());
        delta_gates = std::max<int64_t>(delta_gates, 2 * shape.value_heads);
        delta = std::max(delta, shape.scratch());
        for (DeltaStates& states : states_) states.layers.emplace_back(shape);
    }
    for (const Layer& layer : model_.layers) {
        bool shared = layer.mixes() && !layer.keeps_state() && cache_->shape(layer.kept).shared;
        if (!shared) own_layers_ = int(&layer - model_.layers.data()) + 1;
    }
    int64_t per_layer = model_.per_layer ? int64_t(model_.per_layer->norm.size()) : 0;
    int64_t columns = std::max<int64_t>({s_.hidden, s_.intermediate, inner, latents, per_layer});
    int64_t batch = std::max<int64_t>(int64_t(model_.caches.size()), MOST_POSITIONS), experts = 0, used = 1;
    bool sub_norms = false;
    for (const Layer& layer : model_.layers) {
        sub_norms |= !layer.attn_sub_norm.empty() || !layer.mlp_sub_norm.empty();
        if (!layer.experts) continue;
        experts = std::max<int64_t>(experts, layer.experts->stored());
        used = std::max<int64_t>(used, layer.experts->of_token());
    }
    for (Layer& layer : model_.layers) {
        for (int number = 0; number < SITES; ++number) {
            Site& site = layer.sites[number];
            if (layer.neurons && number == MLP_MID) {
                int64_t room = int64_t(neuron_slices(s_.intermediate, threads)) * s_.hidden;
                padded[number & 1] = std::max(padded[number & 1], room);
                continue;
            }
            if (layer.gates && number == MLP_IN) {
                padded[number & 1] = std::max(padded[number & 1], batch * s_.intermediate);
                continue;
            }
            if (!site.matrix) continue;  // of latents that a block has not
            site.sparse_bias = sparse_bias(site, k_);
            const Zigzag& m = *site.matrix;
            int64_t room = gemv_slices(m, int32_t(m.columns), threads) * gemv_stride(m);
            if (layer.experts && (number == MLP_IN || number == MLP_MID)) {
                int32_t used = layer.experts->of_token();
                room = std::max(room, used * gemv_slices(m, int32_t(m.columns), threads, used) * gemv_stride(m));
            }
            if (batch > 1) room = std::max(room, matmul_slices(m, int32_t(m.columns), threads) * batch * m.rows);
            padded[number & 1] = std::max(padded[number & 1], room);
            if (number == ATTN_KV_B) padded[1] = std::max(padded[1], room);  // beside queries without a latent
        }
    }
    active_.assign(model_.layers.size() * SITES, 0);
    all_ = Buffer<int32_t>(columns);
    for (int32_t i = 0; i < columns; ++i) all_.data()[i] = i;
    for (int i = 0; i < 2; ++i) partial_sums_[i] = Buffer<float>(padded[i]);
    sum_ = Buffer<float>(s_.hidden);
    changed_ = Buffer<float>(s_.hidden);
    if (per_layer) per_layer_ = Buffer<float>(model_.per_layer->embedding.columns);
    per_layer_gate_ = Buffer<float>(per_layer);
    attn_output_ = Buffer<float>(inner);
    delta_gates_ = Buffer<float>(delta_gates);
    mamba_rows_ = Buffer<float>(batch * mamba_rows);
    middle_ = Buffer<float>(used * s_.intermediate);
    if (experts) {
        routed_ = Buffer<float>(experts + 1);
        expert_lists_ = Buffer<int32_t>(used * (int64_t(s_.intermediate) + 16));
        expert_active_.resize(used);
        starts_ = Buffer<int32_t>(experts + 1);
        expert_sums_ = Buffer<float>(2 * s_.hidden);
    }
    listed_ = Buffer<int32_t>(PLANES * (columns + 16 * threads));
    active_in_any_ = Buffer<uint8_t>(batch > 1 ? columns : 0);
    counts_ = Buffer<int32_t>(16 * threads);
    scratch_.resize(threads);
    for (Scratch& own : scratch_) {
        own.chosen.resize(used), own.weights.resize(used), own.products.resize(used);
        own.x = Buffer<float>(s_.hidden);
        own.normed = Buffer<float>(s_.hidden);
        own.d = Buffer<float>(columns);
        own.inner = Buffer<float>(sub_norms ? columns : 0);
        own.made = Buffer<float>(experts ? 2 * s_.hidden : 0);
        own.indices = Buffer<int32_t>(columns + 16);
        own.lists = Buffer<int32_t>(PLANES * (columns + 16));
        if (!model_.layers.empty() && !model_.layers[0].q_row_norm.empty())
            own.rows = Buffer<float>(a_.q_rows() + a_.kv_rows());
        own.heads = Buffer<float>(own_heads);
        own.delta = Buffer<float>(delta);
        own.latents = Buffer<float>(latents);
        own.per_layer = Buffer<float>(per_layer_.size());
        own.scores.resize(experts);
        own.attention = Buffer<float>(cache_->scratch(1));
        own.neuron_input = Buffer<uint8_t>(neuron_input_bytes((s_.hidden + BAND_ROWS - 1) / BAND_ROWS));
    }
}

void Decoder::reset() {
    for (const auto& cache : model_.caches) cache->reset();
    for (DeltaStates& states : states_) states.clear();
    stepped_ = 0;
    active_.assign(active_.size(), 0);
    scales_.assign(scales_.size(), {});
}

void Decoder::copy_states(int32_t source, int32_t to) {
    for (int32_t sequence : {source, to})
        if (sequence < 0 || sequence >= int32_t(states_.size())) throw std::out_of_range("unknown sequence");
    states_[to].copy(states_[source]);
}

KvCache& Decoder::checked(int32_t sequence, const int64_t* ids, int64_t count) const {
    if (sequence < 0 || sequence >= int32_t(model_.caches.size())) throw std::out_of_range("unknown sequence");
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= s_.vocabulary) throw std::out_of_range("unknown token id");
    KvCache& cache = *model_.caches[sequence];
    if (cache.length() + count > a_.context) throw std::out_of_range("more tokens than the context has room for");
    return cache;
}

}  // namespace sparsepack
