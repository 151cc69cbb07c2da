// A packed model that runs token by token: what runtime/engine.py describes, natively.
//
// A token is one region of the pool. Its phases, a barrier after each:
//
//     per block:  attn_in product | attention | attn_out product | mlp_in product | gate * up | mlp_mid product
//     at the end: the output matrix
//
// Where an MLP is stored by neurons, its last three phases are: gate product | active neurons | their records.
//
// What lies between two phases and is small (norms, residual sums, listing the active columns) every thread does for
// itself, in its own scratch: that is cheaper than another barrier. Products leave partial sums (threads/products.h);
// whoever reads them adds them in order.
#pragma once
#include "decoder/kv_cache.h"
#include "kernels/kernels.h"
#include "memory/buffer.h"
#include "threads/pool.h"
#include "threads/products.h"

#include <memory>
#include <string>
#include <vector>

namespace sparsepack {

enum { ATTN_IN = 0, ATTN_OUT = 1, MLP_IN = 2, MLP_MID = 3, SITES = 4 };

struct Shape {
    int32_t hidden, intermediate;
    int64_t vocabulary;
    int32_t prefill_tokens;  // positions that prefill takes at once
    float eps;
    int32_t activation;  // kernels.h, Activation
};

// A site. Bias and sparse_bias have one value per row or are empty; threshold has one value, one per column, or none:
// such a site is always dense. An offset has one value per column or none.
struct Site {
    const Zigzag* matrix;
    std::vector<float> bias, threshold, offset;
    std::vector<float> sparse_bias;  // what its sparse product lacks: bias + W offset; made by the decoder
};

struct Layer {
    Site sites[SITES];
    std::vector<float> attn_norm, mlp_norm;
    const Neurons* neurons = nullptr;  // then MLP_IN is the gate alone, and MLP_MID nothing
};

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    Rows embedding;                                   // as decoder/embedding.h reads it
    Rows output;                                      // as the kernels read it
    std::vector<float> output_norm;                   // [hidden]
    std::shared_ptr<KvCache> cache;                   // empty; the decoder's from now on
    std::vector<std::shared_ptr<const void>> owners;  // of what the pointers above point to
};

class Decoder {
public:
    // Throws std::invalid_argument where sizes do not fit together.
    Decoder(Model model, const Kernels& kernels, int threads);

    const Model& model() const noexcept { return model_; }
    Pool& pool() noexcept { return pool_; }
    int64_t stepped() const noexcept { return stepped_; }
    // Active columns per (layer, site), summed over the stepped positions.
    const std::vector<int64_t>& active() const noexcept { return active_; }

    void reset();

    // Appends one token. logits: [vocabulary]. Throws std::out_of_range for an unknown id or a full context.
    void step(int64_t id, bool sparse, float* logits);

    // Appends tokens, dense. logits: [count][vocabulary] if `all`, else [vocabulary], after the last.
    void prefill(const int64_t* ids, int64_t count, bool all, float* logits);

private:
    // The memory that each thread has for itself.
    struct Scratch {
        Buffer<float> x, normed, d, heads, attention;
        Buffer<int32_t> indices;
        Buffer<uint8_t> neuron_input;
    };
    // The input of a product: the active columns of x.
    struct Input {
        const Site* site;
        const float* x;
        Active active;
        const std::vector<float>* bias;  // what the sum of the products lacks
        float* partial_sums;             // where they go
    };

    // A finished product: partial sums, and what they lack.
    struct Sums {
        const float* partial_sums;
        int64_t stride;
        int32_t slices;
        const std::vector<float>* bias;
        int64_t rows;
    };

    void check(const int64_t* ids, int64_t count) const;

    // decoder/products.cpp
    Input whole(int layer, int site, const float* x, int thread);
    Input select(int layer, int site, const float* x, bool sparse, int thread);
    void multiply(const Input& input);
    Sums sums(const Input& input) const;
    void read(const Sums& sums, int64_t first, int64_t count, float* y, bool add = false) const;
    void add_to(float* x, const Sums& sums, int thread);

    // decoder/step.cpp
    void token(int64_t id, bool sparse, float* logits, int thread);
    void attend(const Input& input, int layer, int32_t kv_head, bool sparse, int thread);
    int32_t border(int thread) const;
    int32_t* list(int thread) const;
    int32_t gather(int32_t count, int thread);
    Input gate(const Input& input, int layer, bool sparse, int thread);

    // decoder/neurons.cpp
    Sums neurons(const Input& gate, const float* x, int layer, bool sparse, int thread);
    void neuron_rows(int layer, int32_t first, int32_t last, int32_t positions);

    // decoder/prefill.cpp
    void prefill_together(const int64_t* ids, int32_t count, float* logits, bool all, int thread);
    void matmul(const Site& site, const float* x, int32_t positions);
    void append_rows(int layer, int32_t first, int32_t last);
    void gate_rows(int layer, int32_t first, int32_t last);
    void add_rows(const Site& site, int32_t first, int32_t last);
    void norm_rows(const std::vector<float>& weight, int32_t first, int32_t last);

    Model model_;
    const Shape& s_;
    KvCache& cache_;
    const AttentionShape& a_;
    const Kernels& k_;
    Pool pool_;
    int64_t stepped_ = 0;
    std::vector<int64_t> active_;
    Buffer<int32_t> all_;            // 0, 1, 2, ...
    Buffer<float> partial_sums_[2];  // of neighbouring sites in turns: one may be read while the next is written
    Buffer<float> sum_;              // of these, where they are too many for every thread to add all
    Buffer<float> attn_output_;
    Buffer<float> middle_;    // gate * up
    Buffer<int32_t> listed_;  // its active columns, each thread's range at a place of its own
    Buffer<int32_t> counts_;  // of those, one cache line per thread
    std::vector<Scratch> scratch_;
    Buffer<float> wide_x_, wide_normed_, wide_rows_, wide_inner_;  // prefill: [prefill_tokens][...]
};

}  // namespace sparsepack
