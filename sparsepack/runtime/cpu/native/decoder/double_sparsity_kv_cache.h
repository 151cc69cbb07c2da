// Double Sparsity (section 4.2): decoded positions read the tokens that their labels rank best. What is computed says
// runtime/reference/double_sparsity.py, what a label is formats/blocks/labels.py.
//
//     append   key -> fp16 -> label: its heavy channels in 4 bits
//     attend   sum of the group's queries -> 8 bits -> scores of labels -> the best tokens -> attention to these
#pragma once
#include "decoder/kv_cache.h"

namespace sparsepack {

// The policy that says which tokens a decoded position reads.
struct TokenPolicy {
    std::vector<int32_t> budgets;  // [context + 1]: how many of so many that it sees
    int32_t sinks, recent;         // first ones of the sequence and last ones that are always read, within the budget
};

// Heavy channels [kv_heads][r] of a layer, ascending in each head, or empty: every query reads all that it sees.
using HeavyChannels = std::vector<int32_t>;

// Keys and values as in DenseKvCache; beside them, of layers with heavy channels,
// codes uint8 [layer][kv_head][context][padded / 2] and scales fp16 [layer][kv_head][context].
class DoubleSparsityKvCache final : public DenseKvCache {
public:
    DoubleSparsityKvCache(AttentionShape shape, std::vector<LayerAttention> layers, std::vector<RotaryTable> tables,
                          const Kernels& kernels, std::vector<HeavyChannels> channels, TokenPolicy policy);

    void append(int layer, int32_t kv_head, int64_t position, float* q, float* k, float* v) override;
    void attend(int layer, int32_t kv_head, int64_t position, const Queries& queries) const override;
    int64_t scratch(int32_t positions) const override;

private:
    void copy_positions(const KvCache& other, int64_t length) override;

    struct Labels {
        int32_t channels;       // r; 0: none
        int64_t codes, scales;  // where they begin in `label_memory_`

        int32_t padded() const noexcept { return (channels + 7) / 8 * 8; }
    };

    uint8_t* codes(int layer, int32_t kv_head) const;    // [context][padded / 2]
    uint16_t* scales(int layer, int32_t kv_head) const;  // [context]
    void attend_one(int layer, int32_t kv_head, int64_t position, const Queries& query) const;
    void label_query(int layer, int32_t kv_head, const float* q, int8_t* numbers, float* sums) const;

    const std::vector<HeavyChannels> channels_;
    const TokenPolicy policy_;
    std::vector<Labels> labels_;
    int32_t most_channels_ = 0;  // of any layer, padded
    Memory label_memory_;
};

}  // namespace sparsepack
