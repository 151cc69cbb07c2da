// A packed model that runs token by token: what runtime/engine.py describes, natively.
//
// A token is one region of the pool. Its phases, a barrier after each:
//
//     per block:  [change of basis |] attn_in product | attention | attn_out product | mlp_in product | gate * up | mlp_mid product
//                 [| gate of an input of the block | its projection]
//     at the end: the output matrix
//
// Where an MLP is stored by neurons, its last three phases are: gate product | active neurons | their records. Where it is
// a mixture of experts, they are: router | all mlp_in products of the chosen ones | gate * up | all their mlp_mid products
// (decoder/experts.cpp).
//
// A batch, a token of each of several sequences, has the same phases (decoder/batch.cpp); a product then reads the columns that are
// active in any of the sequences, once for all of them. One sequence has the same bits whatever room there is for others.
//
// A block with a gated delta net or a state-space model has a state of each sequence in place of keys and values
// (decoder/delta_net.h).
//
// What lies between two phases and is small (norms, residual sums, listing the active columns) every thread does for
// itself, in its own scratch: that is cheaper than another barrier. Products leave partial sums (threads/products.h);
// whoever reads them adds them in order.
#pragma once
#include "decoder/delta_net.h"
#include "decoder/threshold_controller.h"
#include "decoder/kv_cache.h"
#include "decoder/phase_clock.h"
#include "kernels/kernels.h"
#include "memory/buffer.h"
#include "threads/pool.h"
#include "threads/products.h"

#include <string.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sparsepack {

// The last two are of attention by latents.
enum { ATTN_IN = 0, ATTN_OUT = 1, MLP_IN = 2, MLP_MID = 3, ATTN_KV_B = 4, ATTN_Q_B = 5, SITES = 6 };

struct Shape {
    int32_t hidden, intermediate;
    int64_t vocabulary;
    int32_t prefill_tokens;  // positions that prefill takes at once
    float eps;
    int32_t activation;     // kernels.h, Activation
    float embedding_scale;  // what rows of the embedding are multiplied by
    float logit_cap;        // a logit x becomes cap tanh(x / cap); 0: it stays
};

// A site. Bias and sparse_bias have one value per row or are empty; threshold has one value, one per column, or none:
// such a site is always dense; where the matrix has planes, after those of columns, at MLP_MID of experts [experts][columns],
// also [PLANES] steps, what each level begins above in thresholds. An offset has one value per column or none.
struct Site {
    const Zigzag* matrix;
    std::vector<float> bias, threshold, offset;
    std::vector<float> sparse_bias;  // what its sparse product lacks: bias + W offset; made by the decoder

    bool has_planes() const noexcept { return matrix->block == Q6_P; }
    bool has_levels() const noexcept { return has_planes() && threshold.size() > size_t(matrix->columns); }
    const float* steps() const noexcept { return threshold.data() + threshold.size() - PLANES; }
};

constexpr int32_t MOST_GROUPS = 1 << 10;  // of experts

// How experts are chosen where it is not by the softmax of all logits (models/blocks.py, Router).
struct Routing {
    bool sigmoid;
    int32_t groups, groups_used;
    float scale;
    std::vector<float> correction;  // [count], or empty
};

// An MLP that is a mixture of experts. Its sites have what the experts share, and the matrix of the first one. The last
// `shared` experts are of every token, with the sigmoid of the router's last row as their weight, or 1.
struct Experts {
    const Rows* router;                    // F32 [count, or one more where shared experts have a gate][hidden]
    int32_t used;                          // experts that are chosen for a token
    int32_t shared;                        // that it has beside these
    bool normalised;                       // the weights of the chosen are made to add up to one
    const Zigzag *in, *mid;                // of each expert, all of one shape
    std::vector<float> router_bias;        // [count], or empty
    std::vector<float> in_bias, mid_bias;  // [stored][rows], or empty
    bool shared_gated;
    std::optional<Routing> routing;
    std::vector<float> scale;              // [count], by which the weights of the chosen are multiplied, or empty
    std::vector<float> norm, shared_norm;  // [hidden], of what the chosen ones make, and the shared ones, or empty

    int32_t count() const { return int32_t(router->rows) - shared_gated; }  // to choose from
    int32_t stored() const { return count() + shared; }
    int32_t of_token() const { return used + shared; }
};

constexpr float LATENT_EPS = 1e-6f;  // models/blocks.py

// Where queries, keys and values come from: models/blocks.py, Latent.
struct Latent {
    int32_t q_rank, kv_rank, plain, turning, value;
    std::vector<float> q_norm, kv_norm;

    int32_t query() const noexcept { return plain + turning; }
    int64_t queries(int32_t heads) const noexcept { return int64_t(heads) * query(); }
    int32_t kv_rows() const noexcept { return kv_rank + turning; }
    int64_t into(int32_t heads) const noexcept { return (q_rank ? q_rank : queries(heads)) + kv_rows(); }
    int64_t scratch() const noexcept { return q_rank + kv_rows(); }
};

// What a block adds in the end by an input of its own that each token has: Block.per_layer of models/blocks.py.
struct PerLayer {
    const Rows* gate;         // [width][hidden]
    const Rows* projection;   // [hidden][width]
    std::vector<float> norm;  // [hidden], of what is added
};

// Where these inputs come from: of each token [layers][width] rows of a table and of a product with its embedding.
struct PerLayerInputs {
    Rows embedding;           // [vocabulary][layers width], as decoder/embedding.h reads it
    const Rows* projection;   // [layers width][hidden]
    std::vector<float> norm;  // [width], of the product, for each layer
    float scale, eps;         // of the rows of the table, and of the norm
};

// Rows of mlp_in are those of the gate, then of up; without a gate of up alone, which then stands for both.
struct Layer {
    Site sites[SITES];
    std::vector<float> attn_norm, mlp_norm;  // of what they read; empty: they read it as it is. [hidden], or of
                                             // LayerNorm, which subtracts the mean, [2 hidden] with its bias
    std::vector<float> attn_post_norm, mlp_post_norm;  // of what attention and MLP add; empty: it is not normed
    std::vector<float> attn_sub_norm, mlp_sub_norm;    // of what enters attn_out and mlp_mid; empty: likewise
    std::vector<float> q_row_norm, k_row_norm;         // of queries and keys of all heads together; empty: likewise
    const Neurons* neurons = nullptr;                  // then MLP_IN is the gate alone, and MLP_MID nothing
    const Gates* gates = nullptr;                      // by rows; then MLP_IN has no matrix
    std::optional<Experts> experts;
    const Rows* basis = nullptr;          // [hidden, hidden]: the block begins with x = basis x
    std::optional<Latent> latent;         // attention by latents
    int32_t width = 0;                    // neurons of the MLP, or of an expert; made by the decoder
    std::optional<DeltaNet> delta_net;    // in place of attention, between the same sites
    std::optional<ShortConv> short_conv;  // likewise
    std::optional<Mamba> mamba;           // likewise
    std::vector<float> xielu;             // [4], of the MLP's function without a gate; empty: it is another one
    bool parallel = false;                // the MLP reads what attn_in reads
    bool gated = false;                   // attention has an output gate: of each head rows of queries, then of gates
    bool k_eq_v = false;                  // attn_in has no rows of values, which are the keys as it gives them
    std::optional<PerLayer> per_layer;    // what the block adds last
    float scalar = 1;                     // all that leaves the block is multiplied by it
    bool keeps_state() const { return delta_net || short_conv || mamba; }
    bool mixes() const { return sites[ATTN_IN].matrix; }              // it has attention, or what is in its place
    bool has_mlp() const { return neurons || sites[MLP_IN].matrix; }  // a block has both, or one of them
    int32_t kept = -1;  // which of the layers of the cache, or of the states, is this one; made by the decoder
};

// The next tokens of a sequence. The first `dense` ones are prefilled, the others computed as steps compute them; the first
// `unscored` ones have no logits.
struct Continuation {
    int32_t sequence;
    int64_t count, dense, unscored;
};

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    Rows embedding;                                // as decoder/embedding.h reads it
    Rows output;                                   // as the kernels read it
    std::vector<float> output_norm;                // [hidden], or [2 hidden]
    std::optional<PerLayerInputs> per_layer;       // where blocks have `per_layer`
    std::vector<std::shared_ptr<KvCache>> caches;  // of each sequence, of one shape, empty; the decoder's from now on
    std::vector<std::shared_ptr<const void>> owners;  // of what the pointers above point to
};

// Positions of one sequence that a step takes at most: few.inc multiplies so many together.
constexpr int32_t MOST_POSITIONS = 8;

class Decoder {
public:
    // Throws std::invalid_argument where sizes do not fit together.
    Decoder(Model model, const Kernels& kernels, int threads);

    const Model& model() const noexcept { return model_; }
    Pool& pool() noexcept { return pool_; }
    int64_t stepped() const noexcept { return stepped_; }
    // Columns per (layer, site) that were active in any sequence, summed over the steps; of a matrix of planes bytes of a row
    // of superblocks.
    const std::vector<int64_t>& active() const noexcept { return active_; }

    // Times the phases of steps of one sequence by a clock, which outlives its use; null: no longer.
    void set_clock(PhaseClock* clock) noexcept { clock_ = clock; }

    // The scale of each sequence's thresholds; empty where they are not controlled.
    const std::vector<SequenceScale>& scales() const noexcept { return scales_; }

    void reset();

    // From now on keeps the share of weights that each sequence skips at a target. Throws std::invalid_argument without weights.
    void control_thresholds(const ThresholdController& controller);
    // Resets the scale of a sequence. Throws std::out_of_range for an unknown sequence.
    void reset_scale(int32_t sequence);

    // Lets a sequence have the states of another. Throws std::out_of_range for an unknown sequence.
    void copy_states(int32_t source, int32_t to);

    // Appends a token to each of `count` sequences, in ascending order; the others stand still. Or `count` tokens to one, whose
    // number stands there as often: each skips what it would skip alone. logits: [count][vocabulary].
    // Throws std::out_of_range for an unknown id or sequence, too many positions, or a full context, std::invalid_argument for
    // positions of a text that follow from one another, and then nothing has changed.
    void step(const int32_t* sequences, const int64_t* ids, int32_t count, bool sparse, float* logits);

    // Appends tokens to a sequence, dense. logits: [count][vocabulary] if `all`, else [vocabulary], after the last.
    void prefill(int32_t sequence, const int64_t* ids, int64_t count, bool all, float* logits);

    // Appends given tokens to some sequences, `ids` those of one after those of the other, many at once. What steps would
    // compute is computed and counted as they do, each token by its own active columns. logits: [scored tokens][vocabulary].
    // Throws as `step`, and std::invalid_argument where thresholds are controlled: those follow from the token before.
    void teacher_forced(const std::vector<Continuation>& all, const int64_t* ids, bool sparse, float* logits);

private:
    // The memory that each thread has for itself.
    struct Scratch {
        Buffer<float> x, normed, d, heads, attention, thresholds;
        Buffer<float> inner;             // what enters attn_out or mlp_mid, where that is normed
        Buffer<int32_t> indices, lists;  // lists: of each level
        Buffer<uint8_t> neuron_input;
        Buffer<float> rows;           // queries and keys, where they are normed together
        Buffer<float> delta;          // of a gated delta net
        std::vector<int32_t> chosen;  // experts of a token
        std::vector<float> weights;   // of these
        std::vector<float> scores;    // of all experts, where they are not chosen by logits
        Buffer<float> latents;        // of a token, and the part of keys that turns
        Buffer<float> per_layer;      // [layers][width]: a row of the table of these inputs
        std::vector<float> bias;      // [hidden]: what those of mlp_mid add
        Buffer<float> made;           // [2][hidden]: what experts make, where it is normed
        std::vector<Product> products;
        std::vector<int64_t> skipped;  // weights, of each sequence of a step, where thresholds are controlled
        std::vector<int64_t> counted;  // what this thread has to add to `active_`
    };
    // The input of a product: the active columns of x.
    struct Input {
        const Site* site;
        const float* x;
        Active active;
        const std::vector<float>* bias;  // what the sum of the products lacks
        float* partial_sums;             // where they go
    };

    // Columns of one level.
    struct List {
        const int32_t* columns;
        int32_t count;
    };

    // Rows of the wide buffers that are of one sequence, `before` of whose tokens are in rows before them.
    struct Segment {
        int32_t sequence, first, count, before;
        bool stepped;  // they run as steps
    };

    // A finished product: partial sums, and what they lack.
    struct Sums {
        const float* partial_sums;
        int64_t stride;
        int32_t slices;
        const std::vector<float>* bias;
        int64_t rows;
    };

    KvCache& checked(int32_t sequence, const int64_t* ids, int64_t count) const;
    // The heads of a layer with attention.
    const AttentionShape& heads(int layer) const { return cache_->shape(model_.layers[layer].kept); }
    DeltaState& state(int32_t sequence, int layer) { return states_[sequence].layers[model_.layers[layer].kept]; }
    static void gate_heads(const float* gates, int64_t stride, int32_t heads, int32_t width, float* y);
    void scale(int layer, int64_t positions, float* x) const;

    // decoder/threshold_controller.cpp
    bool scales_thresholds() const noexcept { return !scales_.empty(); }
    const float* thresholds(const Site& at, int32_t first, int32_t n, int32_t index, int thread);
    float threshold_scale(int32_t index) const;
    void count_skipped(const Site& at, int64_t columns, int32_t index, int thread);
    void count_unread(const Site& at, int64_t columns, int64_t bytes, int32_t index, int thread, int64_t times = 1);
    void update_scales();

    // decoder/products.cpp
    void norm(const float* x, const std::vector<float>& weight, float* y) const;
    void layer_norm(const float* x, const float* weight, float* y) const;
    Input whole(int layer, int site, const float* x, int thread);
    Input select(int layer, int site, const float* x, bool sparse, int thread);
    Input select_normed(int layer, int site, const float* x, const std::vector<float>& norm, bool sparse, int thread);
    void norm_each(const std::vector<float>& norm, int32_t first, int32_t last, float* x) const;
    void multiply(const Input& input);
    static int64_t units_read(const Site& at, const Active& active);
    void collect_levels(const Site& at, const float* x, int32_t first, int32_t n, int32_t index, float* d,
                        int32_t* lists, int32_t stride, int32_t* counts) const;
    Active list_levels(const Site& at, const float* x, const float* threshold, int32_t index, float* d, int32_t* to,
                       int thread);
    template <class Lists>
    static Active join_levels(int32_t* to, int parts, Lists&& lists);
    Sums sums(const Input& input) const;
    void read(const Sums& sums, int64_t first, int64_t count, float* y, bool add = false) const;
    void add_to(float* x, const Sums& sums, const std::vector<float>& norm, int thread);
    void look_up(int64_t id, float* x) const;
    void cap_logits(float* logits, int64_t count, int thread);

    // decoder/step.cpp
    void activate(int layer, const float* gate, const float* up, int32_t n, float* y) const;
    void worked(Phase phase, int thread) noexcept;
    void meet(Phase phase, int thread) noexcept;
    void token(int64_t id, bool sparse, float* logits, int thread);
    void layers_from(int first, bool sparse, float* logits, int thread);
    Sums mixer(int layer, float* normed, bool sparse, int thread);
    Sums mlp(int layer, float* normed, bool sparse, int thread);
    void change_basis(const Rows& basis, float* x);
    void multiply_gates(int layer, const float* x, int32_t positions, int thread);
    void mix(const Sums& sums, int layer, const int32_t* sequences, int32_t batch, float* y, int thread);
    void mix_mamba(const Sums* sums, int layer, const int32_t* sequences, int32_t batch, int32_t positions, float* rows,
                   float* y, int thread);
    void norm_heads(const Sums& qkv, int layer, int thread);
    void attend(const Sums& qkv, KvCache& cache, int64_t position, int layer, int32_t kv_head, bool sparse, float* y,
                int thread);
    void check_one_text(bool sparse) const;
    int32_t border(int64_t columns, int thread) const;
    int32_t* list(int64_t columns, int thread) const;
    int32_t gather(int64_t columns, int32_t count, int thread);
    int32_t* level_list(int64_t columns, int32_t level, int thread) const;
    Active gather_levels(int64_t columns, const int32_t* counts, int thread);
    Input gate(const Input& input, int layer, bool sparse, int thread);

    // decoder/batch.cpp
    void tokens(const int64_t* ids, int32_t batch, bool sparse, float* logits, int thread);
    void add_batch(const Sums& sums, const std::vector<float>& norm, int32_t batch, int thread);
    void mlp_batch(int layer, int32_t batch, bool sparse, int thread);
    Sums multiply_batch(int layer, int site, float* x, int32_t batch, bool sparse, int thread);
    static Sums sums_of(const Sums& sums, int32_t index);
    Active select_batch(const Site& at, float* x, int32_t batch, int thread);
    Active select_levels(const Site& at, float* x, int32_t batch, int thread);
    void attend_batch(const Sums& qkv, int layer, int32_t batch, bool sparse, int thread);
    void gate_batch(const Sums& both, int layer, int32_t batch, int thread);
    void neurons_batch(const Sums& gate, int layer, int32_t batch, bool sparse, int thread);

    // decoder/neurons.cpp
    Sums gates(int layer, const float* x, int32_t batch, float* y, int thread);
    Sums neurons(const Sums& gate, const float* x, int layer, bool sparse, int thread);
    void neuron_rows(int layer, int32_t first, int32_t last, int32_t positions);

    // decoder/experts.cpp
    void choose(const Experts& experts, const float* logits, int32_t* chosen, float* weights, int thread);
    static void choose_by_scores(const Experts& experts, float* scores, int32_t* chosen, float* weights);
    Sums experts(const float* x, int layer, bool sparse, int32_t index, int thread, int64_t read[2]);
    void add_bias(const Experts& experts, int32_t expert, float weight, float* y) const;
    void norm_experts(const Experts& experts, const float* of_chosen, const float* of_shared, float* scratch,
                      float* y) const;
    void add_experts(int layer, const float* of_chosen, const float* of_shared, float* scratch, float* x) const;
    void experts_batch(int layer, int32_t batch, bool sparse, int thread);
    void expert_rows(int layer, int32_t first, int32_t last, int32_t positions, int thread);

    // decoder/latents.cpp
    void read_latents(const Sums& into, const Latent& of, float* y) const;
    void attend_latents(const Input& input, int layer, bool sparse, int thread);
    void attend_latents_batch(const Sums& into, int layer, int32_t batch, bool sparse, int thread);
    void join_latent(const Latent& of, const float* q, const float* kv, const float* turning, float* y) const;
    void attend_latent(const Sums& q, const Sums& kv, const float* turning, KvCache& cache, int layer, int32_t head,
                       bool sparse, float* y, int thread);
    void attend_latent_rows(int layer, int32_t first, int32_t last, int32_t positions, int thread);

    // decoder/per_layer.cpp
    void per_layer_inputs(const int64_t* ids, const float* x, int32_t positions, int thread);
    void add_per_layer(int layer, float* x, int thread);
    void add_per_layer_rows(int layer, int32_t first, int32_t last, int32_t positions);

    // decoder/prefill.cpp
    void grow_wide(int64_t positions);
    void append(const std::vector<Continuation>& all, const int64_t* ids, bool sparse, float* logits);
    void append_chunk(const int64_t* ids, int32_t count, float* logits);
    void prefill_together(const int64_t* ids, int32_t count, int layers, float* logits, int thread);
    void last_position(int32_t count, float* logits, int thread);
    void mixer_rows(int layer, int32_t first, int32_t last, int32_t positions, int thread);
    void mlp_rows(int layer, int32_t first, int32_t last, int32_t positions, int thread);
    void matmul(const Site& site, const float* x, int32_t positions);
    void mix_rows(int layer, int32_t first, int32_t last, int thread);
    void append_rows(int layer, int32_t first, int32_t last);
    void cache_rows(int layer, float* qkv, int32_t first, int32_t last);
    void attend_rows(int layer, const float* qkv, int thread);
    void gate_attended(int layer, int32_t first, int32_t last);
    void gate_rows(int layer, int32_t first, int32_t last);
    void add_rows(const Site& site, const std::vector<float>& norm, int32_t first, int32_t last);
    void change_basis_of_rows(const Rows& basis, int32_t first, int32_t last, int32_t positions);
    void norm_rows(const std::vector<float>& weight, int32_t first, int32_t last);

    // decoder/masked_rows.cpp
    bool masks(const Site& at) const noexcept { return steps_some_ && sparse_rows_ && !at.threshold.empty(); }
    const std::vector<float>& bias(const Site& at, int64_t row) const;
    uint8_t* levels(const Site& at, int64_t row = 0);
    void mask_rows(int layer, int site, float* x, int32_t first, int32_t last, int thread, int64_t times = 1);
    void count_neurons(int layer, int32_t first, int32_t last, int thread);
    int64_t mask_row(const Site& at, const float* threshold, int64_t row, float* x, uint8_t* levels, int thread);

    Model model_;
    const Shape& s_;
    KvCache* cache_;  // of the one sequence at hand
    const AttentionShape& a_;
    const Kernels& k_;
    Pool pool_;
    PhaseClock* clock_ = nullptr;
    int64_t stepped_ = 0;
    int own_layers_ = 0;  // layers from here on read keys and values of others alone
    std::vector<int64_t> active_;
    Buffer<int32_t> all_;            // 0, 1, 2, ...
    Buffer<float> partial_sums_[2];  // of neighbouring sites in turns: one may be read while the next is written
    Buffer<float> sum_;              // of these, where they are too many for every thread to add all
    Buffer<float> changed_;          // the hidden state in another basis
    Buffer<float> per_layer_;        // [positions][layers][width]: inputs of blocks
    Buffer<float> per_layer_gate_;   // [width] of the block at hand
    std::vector<Segment> segments_;  // that are prefilled together
    std::vector<uint8_t> steps_;     // of their rows, whether it runs as a step
    std::vector<int32_t> scored_;    // those that have logits
    bool steps_some_ = false, sparse_rows_ = false;  // whether any does; whether these skip
    Buffer<uint8_t> wide_levels_;                    // [prefill_tokens][columns], of a site with levels
    Buffer<uint8_t> expert_levels_;                  // the same of the rows of an expert
    std::vector<DeltaStates> states_;                // of each sequence
    int32_t sequence_ = 0;                           // the one at hand
    Buffer<float> mamba_rows_;                       // rows of attn_in of state-space models, [sequences][rows]
    Buffer<float> delta_gates_;                      // products of gates of delta nets, [positions][2 value_heads]
    Buffer<float> wide_qkv_;         // [prefill_tokens][queries, keys, values], where attention has a gate or latents
    Buffer<float> wide_latents_[2];  // [prefill_tokens][...], of queries, and of keys and values
    Buffer<float> wide_turning_;     // [prefill_tokens][turning]
    Buffer<float> wide_heads_;       // [prefill_tokens][heads][...]: queries, then what attention by latents gives
    Buffer<float> attn_output_;
    Buffer<float> middle_;                // gate * up, of each expert that a token has
    Buffer<int32_t> listed_;              // active columns, each thread's range at a place of its own, for each level
    Buffer<int32_t> counts_;              // of those, one cache line per thread
    std::vector<KvCache*> batch_caches_;  // that a step of several appends to
    std::vector<int32_t> moving_;         // the sequences that these are
    std::vector<int64_t> positions_;      // of the tokens
    bool one_text_ = false;               // these are positions of one sequence
    Buffer<uint8_t> active_in_any_;       // of these, by column; the highest level
    std::vector<Scratch> scratch_;
    Buffer<float> routed_;          // logits of the router, [positions][its rows]
    Buffer<int32_t> expert_lists_;  // active columns of mlp_mid, of each expert that a token has
    struct alignas(64) OfExpert {
        Active active;
    };
    std::vector<OfExpert> expert_active_;  // what is read of those
    Buffer<float> expert_sums_;            // what the chosen ones make, and the shared ones, where these are normed
    Buffer<float> wide_experts_;           // [2][positions][hidden]: likewise
    Buffer<int32_t> wide_chosen_;          // [positions][experts of a token]
    Buffer<float> wide_weights_;           // likewise
    Buffer<int32_t> placed_;               // the places in these, expert by expert
    Buffer<int32_t> starts_;               // [experts + 1]: where the places of each begin
    ThresholdController controller_ = {};
    std::vector<SequenceScale> scales_;
    Buffer<float> wide_read_;  // what blocks read whose MLPs read it, too, [sequences][hidden]
    Buffer<float> wide_x_, wide_normed_, wide_rows_,
        wide_inner_;               // [prefill_tokens][...], or [sequences][...] in a step
    Buffer<uint8_t> wide_inputs_;  // likewise, of gates by rows
};

// Lists of columns, lists(level, part) for levels from 0 on, put together level by level at `to`.
template <class Lists>
Active Decoder::join_levels(int32_t* to, int parts, Lists&& lists) {
    Active active = {to, 0};
    for (int32_t level = 0; level < PLANES; ++level) {
        for (int part = 0; part < parts; ++part) {
            List list = lists(level, part);
            memcpy(to + active.count, list.columns, list.count * sizeof(int32_t));
            active.count += list.count;
        }
        if (level < PLANES - 1) active.ends.of[level] = active.count;
    }
    return active;
}

}  // namespace sparsepack
