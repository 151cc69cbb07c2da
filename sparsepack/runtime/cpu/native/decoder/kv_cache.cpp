#include "decoder/kv_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace sparsepack {
namespace {

void expect(bool met, const char* what) {
    if (!met) throw std::invalid_argument(what);
}

}  // namespace

KvCache::KvCache(AttentionShape shape, std::vector<LayerAttention> layers, std::vector<RotaryTable> tables,
                 const Kernels& kernels)
    : shape_(shape), layers_(std::move(layers)), tables_(std::move(tables)), kernels_(kernels) {
    for (int32_t value : {shape_.heads, shape_.kv_heads, shape_.head_dim, shape_.context})
        expect(value > 0, "sizes: expected positive numbers");
    expect(shape_.heads % shape_.kv_heads == 0, "heads: expected a multiple of kv_heads");
    expect(shape_.head_dim % 2 == 0, "head_dim: expected an even number");
    expect(shape_.scale > 0 && shape_.cap >= 0, "scale, cap: expected a positive number, and none below 0");
    for (const RotaryTable& table : tables_) {
        size_t angles = size_t(shape_.context) * size_t(table.half);
        expect(table.half > 0, "cos, sin: expected an angle at least");
        expect(table.cos.size() == angles && table.sin.size() == angles, "cos, sin: expected [context][half]");
    }
    for (const LayerAttention& layer : layers_) {
        expect(layer.table >= 0 && size_t(layer.table) < tables_.size(), "layers: no such rotary table");
        AttentionShape shape = shape_;
        if (layer.kv_heads) shape.kv_heads = layer.kv_heads;
        if (layer.head_dim) shape.head_dim = layer.head_dim;
        shape.half = tables_[layer.table].half;
        shape.shared = layer.source >= 0;
        expect(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
               "layers: heads: expected a multiple of kv_heads");
        expect(shape.head_dim > 0 && shape.head_dim % 2 == 0 && 2 * shape.half <= shape.head_dim,
               "layers: head_dim: expected an even number, of head_dim / 2 angles at most");
        for (const auto* norm : {&layer.q_norm, &layer.k_norm})
            expect(norm->empty() || norm->size() == size_t(shape.head_dim), "norm of another length");
        expect(layer.sinks.empty() || layer.sinks.size() == size_t(shape_.heads), "sinks: expected one of each head");
        expect(layer.window >= 0, "negative window");
        if (shape.shared) {
            expect(size_t(layer.source) < shapes_.size() && !shapes_[layer.source].shared,
                   "layers: expected keys and values of an earlier layer that has its own");
            const AttentionShape& there = shapes_[layer.source];
            expect(there.kv_heads == shape.kv_heads && there.head_dim == shape.head_dim &&
                       layers_[layer.source].window == layer.window,
                   "layers: keys and values of another shape or window");
        }
        shapes_.push_back(shape);
        if (layer.value_norm) ones_.resize(std::max(ones_.size(), size_t(shape.head_dim)), 1.0f);
    }
}

void KvCache::copy(const KvCache& other, int64_t length) {
    const AttentionShape& there = other.shape_;
    auto alike = [&](const AttentionShape& one, const AttentionShape& of) {
        return one.kv_heads == of.kv_heads && one.head_dim == of.head_dim && one.shared == of.shared;
    };
    expect(typeid(*this) == typeid(other) && shape_.context == there.context &&
               std::equal(shapes_.begin(), shapes_.end(), other.shapes_.begin(), other.shapes_.end(), alike),
           "other: expected a cache of the same kind");
    expect(length >= 0 && length <= other.length_, "length: more than is cached");
    if (this != &other) {
        truncate(0);
        copy_positions(other, length);
    }
    length_ = length;
}

void KvCache::turn(int64_t first, int64_t count, const float* cos, const float* sin) {
    expect(first >= 0 && count >= 0 && first + count <= shape_.context, "positions: more than there is room for");
    std::copy_n(cos, count * shape_.half, tables_[0].cos.data() + first * shape_.half);
    std::copy_n(sin, count * shape_.half, tables_[0].sin.data() + first * shape_.half);
}

void KvCache::apply_rope(int layer, float* x, const std::vector<float>& norm, int64_t position) const {
    const RotaryTable& turns = tables_[layers_[layer].table];
    const AttentionShape& shape = shapes_[layer];
    int64_t at = position * shape.half;
    if (!norm.empty()) kernels_.rms_norm(x, norm.data(), shape.head_dim, shape.eps, x);
    const float *cos = turns.cos.data() + at, *sin = turns.sin.data() + at;
    if (!neighbours_) return kernels_.rotate(x, cos, sin, shape.half);
    for (int32_t i = 0; i < shape.half; ++i) {
        float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cos[i] - odd * sin[i];
        x[2 * i + 1] = odd * cos[i] + even * sin[i];
    }
}

void KvCache::scale_queries(std::vector<float> by) {
    expect(by.size() == size_t(shape_.context), "queries: expected a scale for each position");
    query_scale_ = std::move(by);
}

void KvCache::prepare_queries(int layer, float* q, int64_t position) const {
    int32_t width = shapes_[layer].head_dim, all = shapes_[layer].gqa_ratio() * width;
    for (int32_t i = 0; i < all; i += width) apply_rope(layer, q + i, layers_[layer].q_norm, position);
    for (int32_t i = 0; i < all && !query_scale_.empty(); ++i) q[i] *= query_scale_[position];
}

void KvCache::append_rows(int layer, float* qkv, int32_t first, int32_t last) {
    const AttentionShape& shape = shapes_[layer];
    int64_t width = shape.head_dim;
    for (int32_t p = first; p < last; ++p) {
        float *q = qkv + int64_t(p) * shape.qkv_rows(), *k = q + shape.q_rows(), *v = k + shape.kv_rows();
        if (shape.shared) k = v = nullptr;
        for (int32_t head = 0; head < shape.kv_heads; ++head) {
            float* of_head = q + head * shape.gqa_ratio() * width;
            append(layer, head, length_ + p, of_head, k ? k + head * width : k, v ? v + head * width : v);
        }
    }
}

void KvCache::attend_item(int item, int layer, const float* qkv, int32_t before, int32_t count, float* y,
                          float* scratch, bool sparse) const {
    const AttentionShape& shape = shapes_[layer];
    int32_t blocks = (count + BLOCK - 1) / BLOCK;
    int32_t block = blocks - 1 - item / shape.kv_heads;  // the last see most: first
    int32_t kv_head = item % shape.kv_heads, first = block * BLOCK, last = std::min(count, first + BLOCK);
    int64_t head = int64_t(kv_head) * shape.gqa_ratio() * shape.head_dim;
    int64_t q_stride = shape.qkv_rows(), y_stride = shape.q_rows();
    attend(layer, kv_head, length_ + before + first,
           {qkv + first * q_stride + head, y + first * y_stride + head, q_stride, y_stride, last - first, scratch,
            sparse});
}

DenseKvCache::DenseKvCache(AttentionShape shape, std::vector<LayerAttention> layers, std::vector<RotaryTable> tables,
                           const Kernels& kernels)
    : KvCache(shape, std::move(layers), std::move(tables), kernels) {
    int64_t end = 0;
    for (int layer = 0; layer < this->layers(); ++layer) {
        const bool shared = shapes_[layer].shared;
        starts_.push_back(shared ? starts_[layers_[layer].source] : end);
        if (!shared) end += shapes_[layer].kv_heads * int64_t(shape.context) * stride(layer);
    }
    memory_ = Memory(end * int64_t(sizeof(uint16_t)), Pages::SMALL);
}

void DenseKvCache::copy_positions(const KvCache& other, int64_t length) {
    const auto& there = static_cast<const DenseKvCache&>(other);
    for (int layer = 0; layer < layers(); ++layer)
        for (int32_t head = 0; !shapes_[layer].shared && head < shapes_[layer].kv_heads; ++head)
            std::copy_n(there.key(layer, head, 0), length * stride(layer), key(layer, head, 0));
}

void DenseKvCache::append(int layer, int32_t kv_head, int64_t position, float* q, float* k, float* v) {
    int32_t width = shapes_[layer].head_dim;
    prepare_queries(layer, q, position);
    if (shapes_[layer].shared) return;
    apply_rope(layer, k, layers_[layer].k_norm, position);
    if (layers_[layer].value_norm) kernels_.rms_norm(v, ones_.data(), width, shape_.eps, v);
    kernels_.to_half(k, width, key(layer, kv_head, position));
    kernels_.to_half(v, width, value(layer, kv_head, position));
}

void DenseKvCache::attend(int layer, int32_t kv_head, int64_t position, const Queries& queries) const {
    AttentionWork work = attention(layer, kv_head, position, queries);
    kernels_.attention(&work);
}

AttentionWork DenseKvCache::attention(int layer, int32_t kv_head, int64_t position, const Queries& queries) const {
    const AttentionShape& shape = shapes_[layer];
    AttentionWork work{};
    work.q = queries.q;
    work.keys = key(layer, kv_head, 0);
    work.values = value(layer, kv_head, 0);
    work.y = queries.y;
    work.scores = queries.scratch;
    work.q_stride = queries.q_stride;
    work.kv_stride = stride(layer);
    work.y_stride = queries.y_stride;
    work.heads = shape.gqa_ratio();
    work.head_dim = shape.head_dim;
    work.position = int32_t(position);
    work.positions = queries.positions;
    const std::vector<float>& sinks = layers_[layer].sinks;
    work.sinks = sinks.empty() ? nullptr : sinks.data() + int64_t(kv_head) * shape.gqa_ratio();
    work.window = layers_[layer].window;
    work.scale = shape.scale;
    work.cap = shape.cap;
    return work;
}

int64_t DenseKvCache::scratch(int32_t positions) const {
    int64_t most = 0;
    for (const AttentionShape& shape : shapes_) most = std::max<int64_t>(most, shape.gqa_ratio());
    return most * positions * shape_.context;
}

}  // namespace sparsepack
