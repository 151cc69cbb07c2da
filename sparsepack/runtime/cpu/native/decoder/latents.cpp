// Attention by latents (models/blocks.py, Latent): between the product of attn_in and the heads lie two products more, of the
// normed latents of queries, and of keys and values. A cached head has its turning channels first, then the plain ones, and
// zeros up to head_dim.
#include <string.h>

#include "decoder/decoder.h"

namespace sparsepack {
namespace {

const std::vector<float> NO_BIAS;

}  // namespace

// The latents of a sequence, normed, and the part of keys that turns, from its product of attn_in to [q_rank][kv_rank][turning].
void Decoder::read_latents(const Sums& into, const Latent& of, float* y) const {
    read(into, into.rows - of.kv_rows(), of.kv_rows(), y + of.q_rank);
    k_.rms_norm(y + of.q_rank, of.kv_norm.data(), of.kv_rank, LATENT_EPS, y + of.q_rank);
    if (!of.q_rank) return;
    read(into, 0, of.q_rank, y);
    k_.rms_norm(y, of.q_norm.data(), of.q_rank, LATENT_EPS, y);
}

// One token: from the product of attn_in to the inputs of attn_out. Sums of neighbouring products lie in turns in
// `partial_sums_`; where attn_in gives queries themselves, these stay where they are.
void Decoder::attend_latents(const Input& input, int layer, bool sparse, int thread) {
    const Latent& of = *model_.layers[layer].latent;
    float* latents = scratch_[thread].latents.data();
    Sums q = sums(input);
    read_latents(q, of, latents);
    if (of.q_rank) {
        Input queries = select(layer, ATTN_Q_B, latents, sparse, thread);
        multiply(queries);
        q = sums(queries);
        pool_.barrier();
    }
    Input keys = select(layer, ATTN_KV_B, latents + of.q_rank, sparse, thread);
    if (!of.q_rank) keys.partial_sums = partial_sums_[ATTN_Q_B & 1].data();
    multiply(keys);
    pool_.barrier();
    const float* turning = latents + of.q_rank + of.kv_rank;
    pool_.share(a_.heads, [&](int head, int) {
        attend_latent(q, sums(keys), turning, *cache_, layer, head, sparse,
                      attn_output_.data() + int64_t(head) * of.value, thread);
    });
}

// A token of each of several sequences: the same to the inputs of attn_out in `wide_inner_`.
void Decoder::attend_latents_batch(const Sums& into, int layer, int32_t batch, bool sparse, int thread) {
    const Latent& of = *model_.layers[layer].latent;
    const int64_t q_rows = of.queries(a_.heads);
    float *own = scratch_[thread].latents.data(), *turning = wide_turning_.data();
    for (int32_t t = thread; t < batch; t += pool_.threads()) {
        read_latents(sums_of(into, t), of, own);
        if (of.q_rank)
            memcpy(wide_latents_[0].data() + int64_t(t) * of.q_rank, own, of.q_rank * sizeof(float));
        else
            read(sums_of(into, t), 0, q_rows, wide_heads_.data() + t * q_rows);
        memcpy(wide_latents_[1].data() + int64_t(t) * of.kv_rank, own + of.q_rank, of.kv_rank * sizeof(float));
        memcpy(turning + int64_t(t) * of.turning, own + of.q_rank + of.kv_rank, of.turning * sizeof(float));
    }
    pool_.barrier();
    Sums q = {wide_heads_.data(), 0, 1, &NO_BIAS, q_rows};
    if (of.q_rank) q = multiply_batch(layer, ATTN_Q_B, wide_latents_[0].data(), batch, sparse, thread);
    Sums kv = multiply_batch(layer, ATTN_KV_B, wide_latents_[1].data(), batch, sparse, thread);
    pool_.share(batch * a_.heads, [&](int item, int) {
        int32_t index = item / a_.heads, head = item % a_.heads;
        attend_latent(sums_of(q, index), sums_of(kv, index), turning + int64_t(index) * of.turning,
                      *batch_caches_[index], layer, head, sparse,
                      wide_inner_.data() + (int64_t(index) * a_.heads + head) * of.value, thread);
    });
}

// Queries, keys and values of a head as the cache takes them, [3][head_dim].
void Decoder::join_latent(const Latent& of, const float* q, const float* kv, const float* turning, float* y) const {
    const size_t size = sizeof(float);
    float *key = y + a_.head_dim, *value = key + a_.head_dim;
    memset(y, 0, 3 * a_.head_dim * size);
    memcpy(y, q + of.plain, of.turning * size);
    memcpy(y + of.turning, q, of.plain * size);
    memcpy(key, turning, of.turning * size);
    memcpy(key + of.turning, kv, of.plain * size);
    memcpy(value, kv + of.plain, of.value * size);
}

// One head of a sequence, from its products to y [value].
void Decoder::attend_latent(const Sums& q, const Sums& kv, const float* turning, KvCache& cache, int layer,
                            int32_t head, bool sparse, float* y, int thread) {
    const Latent& of = *model_.layers[layer].latent;
    const int32_t kept = model_.layers[layer].kept, width = a_.head_dim;
    Scratch& own = scratch_[thread];
    float *heads = own.heads.data(), *read_q = heads + 3 * width, *read_kv = read_q + width;
    read(q, int64_t(head) * of.query(), of.query(), read_q);
    read(kv, int64_t(head) * (of.plain + of.value), of.plain + of.value, read_kv);
    join_latent(of, read_q, read_kv, turning, heads);
    cache.append(kept, head, cache.length(), heads, heads + width, heads + 2 * width);
    cache.attend(kept, head, cache.length(), {heads, read_q, width, width, 1, own.attention.data(), sparse});
    memcpy(y, read_q, of.value * sizeof(float));
}

// Many positions: from the products of attn_in in `wide_rows_` to the inputs of attn_out in `wide_heads_`. Of positions
// first ... last - 1 this thread does what lies between two products.
void Decoder::attend_latent_rows(int number, int32_t first, int32_t last, int32_t positions, int thread) {
    const Layer& layer = model_.layers[number];
    const Latent& of = *layer.latent;
    const Site& in = layer.sites[ATTN_IN];
    const int64_t rows = in.matrix->rows, q_rows = of.queries(a_.heads), of_head = of.plain + of.value;
    float* own = scratch_[thread].latents.data();
    for (int64_t p = first; p < last; ++p) {
        const float* from = wide_rows_.data() + p * rows;
        Sums into = {from, 0, 1, &bias(in, p), rows};
        read_latents(into, of, own);
        if (of.q_rank)
            memcpy(wide_latents_[0].data() + p * of.q_rank, own, of.q_rank * sizeof(float));
        else
            read(into, 0, q_rows, wide_heads_.data() + p * q_rows);
        memcpy(wide_latents_[1].data() + p * of.kv_rank, own + of.q_rank, of.kv_rank * sizeof(float));
        memcpy(wide_turning_.data() + p * of.turning, own + of.q_rank + of.kv_rank, of.turning * sizeof(float));
    }
    if (of.q_rank) {
        const Site& site = layer.sites[ATTN_Q_B];
        mask_rows(number, ATTN_Q_B, wide_latents_[0].data(), first, last, thread);
        pool_.barrier();
        share_matmul(k_, pool_, *site.matrix, wide_latents_[0].data(), positions, wide_heads_.data(), levels(site));
        pool_.barrier();
    }
    mask_rows(number, ATTN_KV_B, wide_latents_[1].data(), first, last, thread);
    pool_.barrier();
    matmul(layer.sites[ATTN_KV_B], wide_latents_[1].data(), positions);
    pool_.barrier();
    const Site &queries = layer.sites[ATTN_Q_B], &keys = layer.sites[ATTN_KV_B];
    const int32_t width = a_.head_dim;
    float *heads = scratch_[thread].heads.data(), *read_q = heads + 3 * width, *read_kv = read_q + width;
    for (int64_t p = first; p < last; ++p) {
        float* qkv = wide_qkv_.data() + p * a_.qkv_rows();
        for (int32_t head = 0; head < a_.heads; ++head) {
            Sums q = {wide_heads_.data() + p * q_rows, 0, 1, of.q_rank ? &bias(queries, p) : &NO_BIAS, q_rows};
            Sums kv = {wide_rows_.data() + p * keys.matrix->rows, 0, 1, &bias(keys, p), keys.matrix->rows};
            read(q, int64_t(head) * of.query(), of.query(), read_q);
            read(kv, head * of_head, of_head, read_kv);
            join_latent(of, read_q, read_kv, wide_turning_.data() + p * of.turning, heads);
            for (int32_t part = 0; part < 3; ++part)
                memcpy(qkv + (int64_t(part) * a_.heads + head) * width, heads + part * width, width * sizeof(float));
        }
    }
    cache_rows(number, wide_qkv_.data(), first, last);
    pool_.barrier();
    attend_rows(number, wide_qkv_.data(), thread);
    pool_.barrier();
    for (int64_t p = first; p < last; ++p)
        for (int64_t head = 0; head < a_.heads; ++head)
            memcpy(wide_heads_.data() + (p * a_.heads + head) * of.value,
                   wide_inner_.data() + (p * a_.heads + head) * width, of.value * sizeof(float));
}

}  // namespace sparsepack
