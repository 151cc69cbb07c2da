#include "decoder/double_sparsity_kv_cache.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace sparsepack {
namespace {

void expect(bool met, const char* what) {
    if (!met) throw std::invalid_argument(what);
}

}  // namespace

DoubleSparsityKvCache::DoubleSparsityKvCache(AttentionShape shape, std::vector<LayerAttention> layers,
                                             std::vector<RotaryTable> tables, const Kernels& kernels,
                                             std::vector<HeavyChannels> channels, TokenPolicy policy)
    : DenseKvCache(shape, std::move(layers), std::move(tables), kernels),
      channels_(std::move(channels)),
      policy_(std::move(policy)) {
    expect(channels_.size() == layers_.size(), "channels: expected those of every layer");
    for (const AttentionShape& of : shapes_)
        expect(of.kv_heads == shape.kv_heads && of.head_dim == shape.head_dim && !of.shared,
               "layers: heads of another size, or keys and values of another layer");
    expect(policy_.budgets.size() == size_t(shape.context) + 1, "budgets: expected [context + 1]");
    expect(policy_.sinks >= 0 && policy_.recent >= 1, "sinks, recent: expected 0 and 1 at least");
    for (int64_t seen = 0; seen <= shape.context; ++seen) {
        int64_t least = std::min(seen, int64_t(policy_.sinks) + policy_.recent), budget = policy_.budgets[seen];
        expect(budget >= least && budget <= seen, "budgets: expected sinks and recent ones at least, and at most all");
    }
    int64_t end = 0, heads = shape.kv_heads;
    auto room = [&](int64_t bytes) {
        int64_t begin = end;
        end += (bytes + 63) / 64 * 64;
        return begin;
    };
    for (const HeavyChannels& of_layer : channels_) {
        expect(of_layer.size() % heads == 0, "channels: expected as many of every key head");
        for (int32_t channel : of_layer)
            expect(channel >= 0 && channel < shape.head_dim, "channels: expected 0 to head_dim - 1");
        Labels labels{int32_t(of_layer.size() / heads), 0, 0};
        labels.codes = room(heads * shape.context * (labels.padded() / 2));
        if (labels.channels) labels.scales = room(heads * shape.context * int64_t(sizeof(uint16_t)));
        labels_.push_back(labels);
        most_channels_ = std::max(most_channels_, labels.padded());
    }
    label_memory_ = Memory(end, Pages::SMALL);
}

uint8_t* DoubleSparsityKvCache::codes(int layer, int32_t kv_head) const {
    const Labels& labels = labels_[layer];
    return label_memory_.data() + labels.codes + int64_t(kv_head) * shape_.context * (labels.padded() / 2);
}

uint16_t* DoubleSparsityKvCache::scales(int layer, int32_t kv_head) const {
    return reinterpret_cast<uint16_t*>(label_memory_.data() + labels_[layer].scales) +
           int64_t(kv_head) * shape_.context;
}

void DoubleSparsityKvCache::copy_positions(const KvCache& other, int64_t length) {
    const auto& there = static_cast<const DoubleSparsityKvCache&>(other);
    expect(channels_ == there.channels_, "other: expected a cache with the same heavy channels");
    DenseKvCache::copy_positions(other, length);
    for (int layer = 0; layer < layers(); ++layer)
        for (int32_t head = 0; labels_[layer].channels && head < shape_.kv_heads; ++head) {
            std::copy_n(there.codes(layer, head), length * (labels_[layer].padded() / 2), codes(layer, head));
            std::copy_n(there.scales(layer, head), length, scales(layer, head));
        }
}

void DoubleSparsityKvCache::append(int layer, int32_t kv_head, int64_t position, float* q, float* k, float* v) {
    DenseKvCache::append(layer, kv_head, position, q, k, v);
    const Labels& labels = labels_[layer];
    if (!labels.channels) return;
    const int32_t* channels = channels_[layer].data() + int64_t(kv_head) * labels.channels;
    kernels_.label_key(key(layer, kv_head, position), channels, labels.channels,
                       codes(layer, kv_head) + position * (labels.padded() / 2), scales(layer, kv_head) + position);
}

void DoubleSparsityKvCache::attend(int layer, int32_t kv_head, int64_t position, const Queries& queries) const {
    if (!queries.sparse || !labels_[layer].channels) return DenseKvCache::attend(layer, kv_head, position, queries);
    Queries query = queries;
    query.positions = 1;
    for (int32_t p = 0; p < queries.positions; ++p, query.q += query.q_stride, query.y += query.y_stride)
        attend_one(layer, kv_head, position + p, query);
}

void DoubleSparsityKvCache::attend_one(int layer, int32_t kv_head, int64_t position, const Queries& query) const {
    int32_t end = int32_t(position) + 1, window = layers_[layer].window;
    int32_t begin = window && end > window ? end - window : 0, budget = policy_.budgets[end - begin];
    if (budget == end - begin) return DenseKvCache::attend(layer, kv_head, position, query);

    // Between sinks and recent ones lie those that are ranked.
    int32_t first = std::max(begin, policy_.sinks), last = end - policy_.recent;
    int32_t sinks = first - begin, wanted = budget - sinks - policy_.recent;
    auto* tokens = reinterpret_cast<int32_t*>(query.scratch + DenseKvCache::scratch(1));
    auto* scores = reinterpret_cast<int16_t*>(tokens + shape_.context);
    auto* sums = reinterpret_cast<float*>(scores + (shape_.context + 1) / 2 * 2);
    auto* numbers = reinterpret_cast<int8_t*>(sums + most_channels_);
    for (int32_t n = 0; n < sinks; ++n) tokens[n] = begin + n;
    if (wanted > 0) {
        int32_t padded = labels_[layer].padded();
        label_query(layer, kv_head, query.q, numbers, sums);
        kernels_.label_scores(numbers, padded, codes(layer, kv_head) + int64_t(first) * (padded / 2),
                              scales(layer, kv_head) + first, last - first, scores);
        kernels_.select_tokens(scores, last - first, wanted, first, tokens + sinks);
    }
    for (int32_t n = 0; n < policy_.recent; ++n) tokens[sinks + wanted + n] = last + n;

    AttentionWork work = attention(layer, kv_head, position, query);
    work.tokens = tokens;
    work.listed = budget;
    kernels_.attention(&work);
}

// The heavy channels of the sum of a group's queries, in head order, times what makes the largest of them 127.
void DoubleSparsityKvCache::label_query(int layer, int32_t kv_head, const float* q, int8_t* numbers,
                                        float* sums) const {
    const Labels& labels = labels_[layer];
    const int32_t* channels = channels_[layer].data() + int64_t(kv_head) * labels.channels;
    float largest = 0;
    for (int32_t c = 0; c < labels.channels; ++c) {
        sums[c] = q[channels[c]];
        for (int32_t head = 1; head < shape_.gqa_ratio(); ++head) sums[c] += q[head * shape_.head_dim + channels[c]];
        largest = std::max(largest, std::fabs(sums[c]));
    }
    float inverse = largest > 0 ? 127 / largest : 0;
    for (int32_t c = 0; c < labels.padded(); ++c) {
        float number = c < labels.channels ? sums[c] * inverse : 0;
        numbers[c] = std::isnan(number) ? 0 : int8_t(std::rint(std::min(127.0f, std::max(-127.0f, number))));
    }
}

int64_t DoubleSparsityKvCache::scratch(int32_t positions) const {
    // A position needs room for the tokens that it reads, their scores, and a query as floats and as bytes.
    int64_t tokens = shape_.context, scores = (tokens + 1) / 2, query = most_channels_ + most_channels_ / 4;
    return DenseKvCache::scratch(positions) + tokens + scores + query;
}

}  // namespace sparsepack
