// sparsepack.runtime.cpu._native.Decoder, which runtime/cpu/decoder.py fills from a packed model and drives.
#include "decoder/decoder.h"
#include "decoder/sampling.h"
#include "isa/dispatch.h"
#include "layout/repack.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

template <class T, int dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Vector = Array<const float, 1>;
using Lock = std::lock_guard<std::mutex>;
using Sequences = std::vector<int32_t>;
using Ids = std::vector<int64_t>;
using How = std::tuple<double, int64_t, double, double>;  // the fields of Sampling

std::vector<float> copied(const Vector& x) { return {x.data(), x.data() + x.size()}; }
std::vector<float> copied(const std::optional<Vector>& x) { return x ? copied(*x) : std::vector<float>(); }

// A model as Python describes it, site by site.
class Builder {
public:
    explicit Builder(const Shape& shape) { model_.shape = shape; }

    void add_layer(std::optional<Vector> attn_norm, std::optional<Vector> mlp_norm,
                   std::optional<Vector> attn_post_norm, std::optional<Vector> mlp_post_norm,
                   std::optional<Vector> q_row_norm, std::optional<Vector> k_row_norm) {
        Layer layer{};
        layer.attn_norm = copied(attn_norm);
        layer.mlp_norm = copied(mlp_norm);
        layer.attn_post_norm = copied(attn_post_norm);
        layer.mlp_post_norm = copied(mlp_post_norm);
        layer.q_row_norm = copied(q_row_norm);
        layer.k_row_norm = copied(k_row_norm);
        model_.layers.push_back(std::move(layer));
    }

    // Norms of what enters attn_out and mlp_mid of the last layer.
    void set_sub_norms(const Vector& attn, const Vector& mlp) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().attn_sub_norm = copied(attn);
        model_.layers.back().mlp_sub_norm = copied(mlp);
    }

    // Site `number` (decoder.h) of the last layer.
    void set_site(int number, std::shared_ptr<ZigzagMatrix> matrix, std::optional<Vector> bias,
                  std::optional<Vector> threshold, std::optional<Vector> offset) {
        if (number < 0 || number >= SITES || model_.layers.empty()) throw std::invalid_argument("no such site");
        model_.layers.back().sites[number] = {&matrix->view, copied(bias), copied(threshold), copied(offset), {}};
        model_.owners.push_back(std::move(matrix));
    }

    // Sets the records of the last layer, whose MLP_MID is not set; its gates are by rows, or the site MLP_IN.
    void set_neurons(std::shared_ptr<NeuronMatrix> records, std::shared_ptr<GateMatrix> gates) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        Layer& layer = model_.layers.back();
        layer.neurons = &records->view;
        layer.gates = gates ? &gates->view : nullptr;
        model_.owners.push_back(std::move(records));
        model_.owners.push_back(std::move(gates));
    }

    // Sets the experts of the last layer: sites MLP_IN and MLP_MID of each, with the thresholds that they share.
    void set_experts(std::shared_ptr<RowsMatrix> router, int32_t used, int32_t shared, bool normalised,
                     std::shared_ptr<ExpertsMatrix> in, std::optional<Vector> in_threshold,
                     std::shared_ptr<ExpertsMatrix> mid, std::optional<Vector> mid_threshold,
                     std::optional<Vector> router_bias, std::optional<Vector> in_bias, std::optional<Vector> mid_bias,
                     bool shared_gated, std::optional<Vector> scale, std::optional<Vector> norm,
                     std::optional<Vector> shared_norm) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        Experts experts = {&router->view,
                           used,
                           shared,
                           normalised,
                           in->views.data(),
                           mid->views.data(),
                           copied(router_bias),
                           copied(in_bias),
                           copied(mid_bias),
                           shared_gated,
                           std::nullopt,
                           copied(scale),
                           copied(norm),
                           copied(shared_norm)};
        size_t count = size_t(experts.stored());
        if (in->views.size() != count || mid->views.size() != count)
            throw std::invalid_argument("experts: expected a matrix for each row of the router, and the shared ones'");
        Layer& layer = model_.layers.back();
        layer.sites[MLP_IN] = {in->views.data(), {}, copied(in_threshold), {}, {}};
        layer.sites[MLP_MID] = {mid->views.data(), {}, copied(mid_threshold), {}, {}};
        layer.experts = experts;
        model_.owners.push_back(std::move(router));
        model_.owners.push_back(std::move(in));
        model_.owners.push_back(std::move(mid));
    }

    // How the router of the last layer chooses.
    void set_routing(bool sigmoid, int32_t groups, int32_t groups_used, float scale, std::optional<Vector> correction) {
        if (model_.layers.empty() || !model_.layers.back().experts) throw std::invalid_argument("no experts");
        model_.layers.back().experts->routing = Routing{sigmoid, groups, groups_used, scale, copied(correction)};
    }

    // The last layer's attention is by latents.
    void set_latent(int32_t q_rank, int32_t kv_rank, int32_t plain, int32_t turning, int32_t value,
                    std::optional<Vector> q_norm, Vector kv_norm) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().latent = Latent{q_rank, kv_rank, plain, turning, value, copied(q_norm), copied(kv_norm)};
    }

    // The last layer's MLP reads what attn_in reads.
    void set_parallel() {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().parallel = true;
    }

    // Coefficients [4] of the last layer's xIELU: alpha_p, alpha_n, beta and eps (models/activations.py).
    void set_xielu(const Vector& coefficients) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().xielu = copied(coefficients);
    }

    // The last layer's attention has an output gate.
    void set_gated() {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().gated = true;
    }

    // The last layer's values are its keys.
    void set_k_eq_v() {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().k_eq_v = true;
    }

    // What the last layer adds by an input of its own.
    void set_per_layer(std::shared_ptr<RowsMatrix> gate, std::shared_ptr<RowsMatrix> projection, Vector norm) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().per_layer = PerLayer{&gate->view, &projection->view, copied(norm)};
        model_.owners.push_back(std::move(gate));
        model_.owners.push_back(std::move(projection));
    }

    // Where these inputs come from. The table's bytes stay where they are.
    void set_per_layer_inputs(Array<const uint8_t, 2> bytes, int64_t columns, int32_t type,
                              std::shared_ptr<RowsMatrix> projection, Vector norm, float scale, float eps) {
        model_.per_layer = PerLayerInputs{table(bytes, columns, type), &projection->view, copied(norm), scale, eps};
        model_.owners.push_back(std::make_shared<Array<const uint8_t, 2>>(std::move(bytes)));
        model_.owners.push_back(std::move(projection));
    }

    // Sets what all that leaves the last layer is multiplied by.
    void set_scalar(float scalar) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().scalar = scalar;
    }

    // The last layer has a gated delta net in place of attention; conv: [taps][channels].
    void set_delta_net(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim, int32_t taps,
                       std::shared_ptr<RowsMatrix> gates, Vector conv, Vector rate, Vector bias, Vector norm) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        DeltaShape shape = {key_heads, value_heads, key_dim, value_dim, taps};
        model_.layers.back().delta_net =
            DeltaNet{shape, &gates->view, copied(conv), copied(rate), copied(bias), copied(norm)};
        model_.owners.push_back(std::move(gates));
    }

    // The last layer has a gated short convolution in place of attention; conv: [taps][channels].
    void set_short_conv(int32_t channels, int32_t taps, Vector conv) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().short_conv = ShortConv{channels, taps, copied(conv)};
    }

    // The last layer has a state-space model in place of attention; conv: [taps][channels].
    void set_mamba(int32_t heads, int32_t head_dim, int32_t groups, int32_t state, int32_t taps, int32_t norms,
                   Vector conv, Vector conv_bias, Vector rate, Vector bias, Vector skip, Vector norm, float eps) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().mamba =
            Mamba{heads,        head_dim,     groups,       state,        taps, norms, copied(conv), copied(conv_bias),
                  copied(rate), copied(bias), copied(skip), copied(norm), eps};
    }

    // Sets what the last layer begins with.
    void set_basis(std::shared_ptr<RowsMatrix> matrix) {
        if (model_.layers.empty()) throw std::invalid_argument("no layer");
        model_.layers.back().basis = &matrix->view;
        model_.owners.push_back(std::move(matrix));
    }

    // The embedding's bytes stay where they are.
    void set_embedding(Array<const uint8_t, 2> bytes, int64_t columns, int32_t type) {
        model_.embedding = table(bytes, columns, type);
        model_.owners.push_back(std::make_shared<Array<const uint8_t, 2>>(std::move(bytes)));
    }

    void set_output(std::shared_ptr<RowsMatrix> matrix, Vector norm) {
        model_.output = matrix->view;
        model_.output_norm = copied(norm);
        model_.owners.push_back(std::move(matrix));
    }

    void add_cache(std::shared_ptr<KvCache> cache) { model_.caches.push_back(std::move(cache)); }

    std::unique_ptr<Decoder> build(const std::string& instruction_set, int threads) {
        if (threads < 1) throw std::invalid_argument("threads: expected at least 1");
        const Kernels& chosen = kernels(instruction_set);
        nb::gil_scoped_release release;  // no owner dies here
        return std::make_unique<Decoder>(std::move(model_), chosen, threads);
    }

private:
    static Rows table(const Array<const uint8_t, 2>& bytes, int64_t columns, int32_t type) {
        if (!block_columns(type) || columns % block_columns(type) ||
            int64_t(bytes.shape(1)) != row_bytes(type, columns))
            throw std::invalid_argument("embedding: expected [rows, bytes per row]");
        return {bytes.data(), int64_t(bytes.shape(0)), columns, type};
    }

    Model model_;
};

// The decoder and its sampler, one call at a time; the interpreter goes on meanwhile.
class Session {
public:
    Session(Builder& builder, const std::string& instruction_set, int threads)
        : decoder_(builder.build(instruction_set, threads)),
          logits_(decoder_->model().shape.vocabulary * decoder_->model().caches.size()) {}

    void reset() {
        Lock lock(mutex_);
        decoder_->reset();
    }
    int64_t stepped() { return decoder_->stepped(); }
    std::vector<int64_t> active() {
        Lock lock(mutex_);
        return decoder_->active();
    }

    void control_thresholds(const ThresholdController& controller) {
        Lock lock(mutex_);
        decoder_->control_thresholds(controller);
    }
    void reset_scale(int32_t sequence) {
        Lock lock(mutex_);
        decoder_->reset_scale(sequence);
    }
    void copy_states(int32_t source, int32_t to) {
        Lock lock(mutex_);
        decoder_->copy_states(source, to);
    }
    std::vector<float> scales() {
        Lock lock(mutex_);
        std::vector<float> scales;
        for (const SequenceScale& sequence : decoder_->scales()) scales.push_back(sequence.scale);
        return scales;
    }

    // Times the phases of steps of one sequence from now on, from zero; or ends that.
    void time_phases(bool on) {
        Lock lock(mutex_);
        clock_ = on ? std::make_unique<PhaseClock>(decoder_->pool().threads()) : nullptr;
        decoder_->set_clock(clock_.get());
    }
    // Of each phase its name, and of each thread nanoseconds at work and waiting.
    std::vector<std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>> phase_times() {
        Lock lock(mutex_);
        std::vector<std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>> all;
        for (int phase = 0; clock_ && phase < PHASES; ++phase) {
            auto& [name, work, waiting] = all.emplace_back();
            name = PHASE_NAMES[phase];
            for (const PhaseClock::Times& thread : clock_->threads())
                work.push_back(thread.work[phase]), waiting.push_back(thread.waiting[phase]);
        }
        return all;
    }

    void step(const Sequences& sequences, const Ids& ids, bool sparse, Array<float, 2> logits) {
        check_size(logits.size(), ids.size());
        Lock lock(mutex_);
        step_all(sequences, ids, sparse, logits.data());
    }

    void prefill(int32_t sequence, Array<const int64_t, 1> ids, bool all, Array<float, 2> logits) {
        check_size(logits.size(), all ? ids.size() : 1);
        Lock lock(mutex_);
        decoder_->prefill(sequence, ids.data(), int64_t(ids.size()), all, logits.data());
    }

    // all: of each sequence its number, and how many tokens it gets, begin dense, and begin without logits.
    void teacher_forced(const std::vector<std::tuple<int32_t, int64_t, int64_t, int64_t>>& all,
                        Array<const int64_t, 1> ids, bool sparse, Array<float, 2> logits) {
        std::vector<Continuation> continuations;
        int64_t tokens = 0, scored = 0;
        for (auto [sequence, count, dense, unscored] : all) {
            if (count < 0 || dense < 0 || unscored < 0 || dense > count || unscored > count)
                throw std::invalid_argument("expected at most as many dense and unscored tokens as there are");
            for (const Continuation& other : continuations)
                if (other.sequence == sequence) throw std::invalid_argument("a sequence twice");
            continuations.push_back({sequence, count, dense, unscored});
            tokens += count, scored += count - unscored;
        }
        if (tokens != int64_t(ids.size())) throw std::invalid_argument("ids: expected those of all sequences");
        check_size(logits.size(), size_t(scored));
        Lock lock(mutex_);
        decoder_->teacher_forced(continuations, ids.data(), sparse, logits.data());
    }

    // For each sequence (temperature, top_k, top_p, draw); returns the token and its logit.
    std::vector<std::pair<int64_t, float>> decode_next(const Sequences& sequences, const Ids& ids, bool sparse,
                                                       const std::vector<How>& how) {
        if (how.size() != ids.size() || ids.size() > decoder_->model().caches.size())
            throw std::invalid_argument("expected a way of sampling for each sequence");
        Lock lock(mutex_);
        step_all(sequences, ids, sparse, logits_.data());
        std::vector<std::pair<int64_t, float>> found;
        int64_t vocabulary = decoder_->model().shape.vocabulary;
        for (size_t i = 0; i < how.size(); ++i)
            found.push_back(chosen(logits_.data() + int64_t(i) * vocabulary, vocabulary, how[i]));
        if (clock_) clock_->all_waited(SAMPLING);
        return found;
    }

    std::pair<int64_t, float> choose(Vector logits, const How& how) {
        Lock lock(mutex_);
        return chosen(logits.data(), int64_t(logits.size()), how);
    }

private:
    void check_size(size_t size, size_t positions) const {
        if (size != positions * size_t(decoder_->model().shape.vocabulary))
            throw std::invalid_argument("logits: expected [positions, vocabulary]");
    }

    void step_all(const Sequences& sequences, const Ids& ids, bool sparse, float* logits) {
        if (sequences.size() != ids.size()) throw std::invalid_argument("expected a token for each sequence");
        decoder_->step(sequences.data(), ids.data(), int32_t(ids.size()), sparse, logits);
    }

    std::pair<int64_t, float> chosen(const float* logits, int64_t n, const How& how) {
        auto [temperature, top_k, top_p, draw] = how;
        float best;
        int64_t id = sampler_.choose(logits, n, {temperature, top_k, top_p, draw}, decoder_->pool(), &best);
        return {id, best};
    }

    std::mutex mutex_;
    std::unique_ptr<PhaseClock> clock_;  // outlives the decoder, which may have it
    std::unique_ptr<Decoder> decoder_;
    Sampler sampler_;
    Buffer<float> logits_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Builder>(m, "DecoderBuilder")
        .def(
            "__init__",
            [](Builder* self, int32_t hidden, int32_t intermediate, int64_t vocabulary, int32_t prefill_tokens,
               float eps, int32_t activation, float embedding_scale, float logit_cap) {
                new (self) Builder(
                    {hidden, intermediate, vocabulary, prefill_tokens, eps, activation, embedding_scale, logit_cap});
            },
            nb::kw_only(), "hidden"_a, "intermediate"_a, "vocabulary"_a, "prefill_tokens"_a, "eps"_a, "activation"_a,
            "embedding_scale"_a, "logit_cap"_a)
        .def("add_layer", &Builder::add_layer, "attn_norm"_a.none(), "mlp_norm"_a.none(), "attn_post_norm"_a.none(),
             "mlp_post_norm"_a.none(), "q_row_norm"_a.none(), "k_row_norm"_a.none())
        .def("set_sub_norms", &Builder::set_sub_norms, "attn"_a, "mlp"_a)
        .def("set_site", &Builder::set_site, "number"_a, "matrix"_a, "bias"_a.none(), "threshold"_a.none(),
             "offset"_a.none())
        .def("set_neurons", &Builder::set_neurons, "records"_a, "gates"_a.none())
        .def("set_experts", &Builder::set_experts, nb::kw_only(), "router"_a, "used"_a, "shared"_a, "normalised"_a,
             "mlp_in"_a, "mlp_in_threshold"_a.none(), "mlp_mid"_a, "mlp_mid_threshold"_a.none(), "router_bias"_a.none(),
             "mlp_in_bias"_a.none(), "mlp_mid_bias"_a.none(), "shared_gated"_a, "scale"_a.none(), "norm"_a.none(),
             "shared_norm"_a.none())
        .def("set_routing", &Builder::set_routing, nb::kw_only(), "sigmoid"_a, "groups"_a, "groups_used"_a, "scale"_a,
             "correction"_a.none())
        .def("set_latent", &Builder::set_latent, nb::kw_only(), "q_rank"_a, "kv_rank"_a, "plain"_a, "turning"_a,
             "value"_a, "q_norm"_a.none(), "kv_norm"_a)
        .def("set_basis", &Builder::set_basis, "matrix"_a)
        .def("set_parallel", &Builder::set_parallel)
        .def("set_xielu", &Builder::set_xielu, "coefficients"_a)
        .def("set_gated", &Builder::set_gated)
        .def("set_k_eq_v", &Builder::set_k_eq_v)
        .def("set_scalar", &Builder::set_scalar, "scalar"_a)
        .def("set_per_layer", &Builder::set_per_layer, "gate"_a, "projection"_a, "norm"_a)
        .def("set_per_layer_inputs", &Builder::set_per_layer_inputs, nb::kw_only(), "bytes"_a, "columns"_a, "type"_a,
             "projection"_a, "norm"_a, "scale"_a, "eps"_a)
        .def("set_delta_net", &Builder::set_delta_net, nb::kw_only(), "key_heads"_a, "value_heads"_a, "key_dim"_a,
             "value_dim"_a, "taps"_a, "gates"_a, "conv"_a, "rate"_a, "bias"_a, "norm"_a)
        .def("set_mamba", &Builder::set_mamba, nb::kw_only(), "heads"_a, "head_dim"_a, "groups"_a, "state"_a, "taps"_a,
             "norms"_a, "conv"_a, "conv_bias"_a, "rate"_a, "bias"_a, "skip"_a, "norm"_a, "eps"_a)
        .def("set_short_conv", &Builder::set_short_conv, nb::kw_only(), "channels"_a, "taps"_a, "conv"_a)
        .def("set_embedding", &Builder::set_embedding, "bytes"_a, "columns"_a, "type"_a)
        .def("set_output", &Builder::set_output, "matrix"_a, "norm"_a)
        .def("add_cache", &Builder::add_cache, "cache"_a);
    nb::class_<Session>(m, "Decoder")
        .def(nb::init<Builder&, const std::string&, int>(), "builder"_a, "instruction_set"_a, "threads"_a)
        .def("reset", &Session::reset, Released())
        .def_prop_ro("stepped", &Session::stepped)
        .def("active", &Session::active)
        .def(
            "control_thresholds",
            [](Session& self, double target, double weights, double first, double last, double over, double least,
               double most) { self.control_thresholds({target, weights, first, last, over, least, most}); },
            nb::kw_only(), "target"_a, "weights"_a, "first"_a, "last"_a, "over"_a, "least"_a, "most"_a)
        .def("reset_scale", &Session::reset_scale, "sequence"_a)
        .def("scales", &Session::scales)
        .def("time_phases", &Session::time_phases, "on"_a)
        .def("phase_times", &Session::phase_times)
        .def("copy_states", &Session::copy_states, "source"_a, "to"_a, Released())
        .def("step", &Session::step, "sequences"_a, "ids"_a, "sparse"_a, "logits"_a, Released())
        .def("prefill", &Session::prefill, "sequence"_a, "ids"_a, "all"_a, "logits"_a, Released())
        .def("teacher_forced", &Session::teacher_forced, "all"_a, "ids"_a, "sparse"_a, "logits"_a, Released())
        .def("decode_next", &Session::decode_next, "sequences"_a, "ids"_a, "sparse"_a, "how"_a, Released())
        .def("choose", &Session::choose, "logits"_a, "how"_a, Released());
}

}  // namespace sparsepack
