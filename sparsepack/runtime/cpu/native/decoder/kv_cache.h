// Keys and values of one sequence, and attention to them: what runtime/kv_cache.py describes, natively.
//
// A decoder hands over the products of attn_in and gets the input of attn_out back. How keys and values are kept, and
// which of them a query reads, is the cache's business: sparse attention (double_sparsity_kv_cache.h) or offloaded
// attention is another class, given to the decoder in DenseKvCache's place.
#pragma once
#include "kernels/kernels.h"
#include "memory/memory.h"
#include "threads/pool.h"

#include <vector>

namespace sparsepack {

struct AttentionShape {
    int32_t heads, kv_heads, head_dim, context;
    float eps;            // of the heads' norms
    int32_t half;         // the first 2 half channels of a head turn, i with half + i
    float scale = 0;      // what products of queries and keys are multiplied by
    float cap = 0;        // a score s becomes cap tanh(s / cap); 0: it stays
    bool shared = false;  // keys and values are those of another layer, and attn_in has no rows of them

    int32_t gqa_ratio() const noexcept { return heads / kv_heads; }
    int32_t q_rows() const noexcept { return heads * head_dim; }
    int32_t kv_rows() const noexcept { return kv_heads * head_dim; }
    int32_t qkv_rows() const noexcept { return q_rows() + (shared ? 0 : 2 * kv_rows()); }
};

// Norms [head_dim] of every head before it is rotated, or empty. sinks: [heads], as kernels.h has them, or empty.
struct LayerAttention {
    int32_t window;  // 0: no limit
    std::vector<float> q_norm, k_norm;
    int32_t table = 0;  // by which it turns
    std::vector<float> sinks = {};
    int32_t kv_heads = 0, head_dim = 0;  // 0: those of the shape
    bool value_norm = false;             // each head's values are divided by their root mean square
    int32_t source = -1;                 // the earlier layer whose keys and values it reads; -1: it has its own
};

// How positions turn: [context][half].
struct RotaryTable {
    std::vector<float> cos, sin;
    int32_t half;
};

// Consecutive positions of the query heads that share a key head, and where their outputs go.
struct Queries {
    const float* q;  // position p, head h at q + p * q_stride + h * head_dim; as `append` left it
    float* y;        // likewise
    int64_t q_stride, y_stride;
    int32_t positions;
    float* scratch;  // KvCache::scratch(positions) floats
    bool sparse;     // they are decoded: the cache may read less than all that they see
};

class KvCache {
public:
    // Positions that `attend_rows` takes together: they share what is read of the cache.
    static constexpr int32_t BLOCK = 16;

    // Throws std::invalid_argument where sizes do not fit together.
    KvCache(AttentionShape shape, std::vector<LayerAttention> layers, std::vector<RotaryTable> tables,
            const Kernels& kernels);
    virtual ~KvCache() = default;

    const AttentionShape& shape() const noexcept { return shape_; }
    // That of a layer, whose heads may be of another size.
    const AttentionShape& shape(int layer) const noexcept { return shapes_[layer]; }
    int layers() const noexcept { return int(layers_.size()); }

    // Positions that are cached: the number of the next one.
    int64_t length() const noexcept { return length_; }
    void advance(int64_t positions) noexcept { length_ += positions; }
    virtual void truncate(int64_t length) { length_ = length; }
    void reset() { truncate(0); }

    // Lets the sequence be the first `length` positions of another cache's, and nothing else. Throws std::invalid_argument
    // where that is another kind of cache or has fewer.
    void copy(const KvCache& other, int64_t length);

    // Lets `count` positions from `first` on turn by these rows [count][half] when they are appended, in layers of the
    // first table. Throws std::invalid_argument where there are not so many.
    void turn(int64_t first, int64_t count, const float* cos, const float* sin);

    // Turns channel 2 i of a head with 2 i + 1 from now on, in place of half + i.
    void turn_neighbours() noexcept { neighbours_ = true; }

    // Multiplies the queries of each position [context] from now on. Throws std::invalid_argument for another length.
    void scale_queries(std::vector<float> by);

    // Any thread, for a position and key head of its own: norms and rotates the query heads q [gqa_ratio][head_dim] and
    // the key k [head_dim] in place, norms v, and keeps k and v; where these are another layer's, k and v are not looked
    // at. Counts nothing: see `advance`.
    virtual void append(int layer, int32_t kv_head, int64_t position, float* q, float* k, float* v) = 0;

    // Any thread: softmax(q k^T scale) v over the positions that each query sees, up to its own. The first
    // query's is `position`.
    virtual void attend(int layer, int32_t kv_head, int64_t position, const Queries& queries) const = 0;
    virtual int64_t scratch(int32_t positions) const = 0;

    // `append` and `attend` for the positions after the cached ones and all heads: qkv [count][qkv_rows] holds q, then
    // k, then v, or q alone. One thread appends rows first ... last - 1. To attend, y [count][q_rows], threads share out items,
    // of which so many positions have `attend_items`; `before`: positions that lie between the cached ones and these.
    void append_rows(int layer, float* qkv, int32_t first, int32_t last);
    int attend_items(int layer, int32_t count) const { return (count + BLOCK - 1) / BLOCK * shapes_[layer].kv_heads; }
    void attend_item(int item, int layer, const float* qkv, int32_t before, int32_t count, float* y, float* scratch,
                     bool sparse) const;

protected:
    // `copy` of a cache of the same kind and size, but for the length.
    virtual void copy_positions(const KvCache& other, int64_t length) = 0;

    // Norms and rotates the query heads q [gqa_ratio][head_dim] of a position, and scales them.
    void prepare_queries(int layer, float* q, int64_t position) const;

    // Norms and rotates the query or key at x, a head of a position.
    void apply_rope(int layer, float* x, const std::vector<float>& norm, int64_t position) const;

    const AttentionShape shape_;
    const std::vector<LayerAttention> layers_;
    std::vector<AttentionShape> shapes_;  // of each layer
    std::vector<float> ones_;             // as many as a head has channels
    std::vector<RotaryTable> tables_;
    std::vector<float> query_scale_;  // [context], or empty
    bool neighbours_ = false;
    const Kernels& kernels_;

private:
    int64_t length_ = 0;
};

// Every query reads every position that its layer's window shows it.
// Layout: fp16 [layer][kv_head][context][key, value][head_dim]: where some of the tokens are read, pieces are twice as
// long as they would be in planes of their own.
class DenseKvCache : public KvCache {
public:
    DenseKvCache(AttentionShape shape, std::vector<LayerAttention> layers, std::vector<RotaryTable> tables,
                 const Kernels& kernels);

    void append(int layer, int32_t kv_head, int64_t position, float* q, float* k, float* v) override;
    void attend(int layer, int32_t kv_head, int64_t position, const Queries& queries) const override;
    int64_t scratch(int32_t positions) const override;

protected:
    void copy_positions(const KvCache& other, int64_t length) override;
    AttentionWork attention(int layer, int32_t kv_head, int64_t position, const Queries& queries) const;

    // [head_dim]; of the next position `stride(layer)` further.
    uint16_t* key(int layer, int32_t kv_head, int64_t position) const {
        int64_t row = int64_t(kv_head) * shape_.context + position;
        return reinterpret_cast<uint16_t*>(memory_.data()) + starts_[layer] + row * stride(layer);
    }
    uint16_t* value(int layer, int32_t kv_head, int64_t position) const {
        return key(layer, kv_head, position) + shapes_[layer].head_dim;
    }
    int64_t stride(int layer) const noexcept { return 2 * int64_t(shapes_[layer].head_dim); }

private:
    std::vector<int64_t> starts_;  // where each layer begins in `memory_`
    Memory memory_;
};

}  // namespace sparsepack
