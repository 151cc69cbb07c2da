// Rows of keys and values: which of them a block takes, how they come from the cache, and how the new ones are loaded.
//
//     cache      CacheType [B, kv_heads, context, HEAD_DIM], keys and values apart
//     positions  | before the window | block 0's share | block 1's | .. | block splits - 1's | new |

#pragma once

#include "attention/attention_layout.cuh"
#include "common/flag_in_data.cuh"

// The exponent of a power of two.
__device__ __forceinline__ int log2_of(int x) { return 31 - __clz(x); }

// A block's share of the positions before the new one, or where SHARED_KV with it: first, first + 1, .. splits is a power
// of two.
struct PositionShare {
    int first, count;
    __device__ __forceinline__ PositionShare(int position, int window, int splits, int split) {
        const int oldest = window ? max(0, position + 1 - window) : 0;
        const int old = position + SHARED_KV - oldest;
        const int each = (old + splits - 1) >> log2_of(splits);
        const int begin = min(split * each, old);
        first = oldest + begin;
        count = min(each, old - begin);
    }
};

__device__ __forceinline__ void widen(u32 word, float* x) {
#if KV == 1
    x[0] = bfloat_to_float((u16)word);
    x[1] = __uint_as_float(word & 0xffff0000);
#else
    x[0] = half_to_float((u16)word);
    x[1] = half_to_float((u16)(word >> 16));
#endif
}

// CacheType channels as floats; `at` is aligned to all of them.
template <int CHANNELS>
__device__ __forceinline__ void load_cached(const u8* at, float* x) {
#if KV == 3
    if (CHANNELS == 4) {
        const float4 v = *(const float4*)at;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        const float2 v = *(const float2*)at;
        x[0] = v.x, x[1] = v.y;
    }
#else
    if (CHANNELS == 8) {
        const uint4 v = *(const uint4*)at;
        widen(v.x, x), widen(v.y, x + 2), widen(v.z, x + 4), widen(v.w, x + 6);
    } else if (CHANNELS == 4) {
        const uint2 v = *(const uint2*)at;
        widen(v.x, x), widen(v.y, x + 2);
    } else {
        widen(*(const u32*)at, x);
    }
#endif
}

// The rows of HEAD_DIM numbers that are new of a sequence: of each query head its queries, where OUTPUT_GATES then its
// gates; then keys, then values, which with K_EQ_V are the keys. Where LATENTS, keys are one row, and values the
// same; where SHARED_KV, there are neither.
struct NewRows {
    static constexpr int QUERY_ROWS = OUTPUT_GATES ? 2 : 1;
    const float* first;  // of the sequence
    int kv_heads, kv_head;

    __device__ __forceinline__ NewRows(const float* qkv, int sequence, int kv_heads, int kv_head)
        : first(qkv + (long long)sequence *
                          (QUERY_ROWS * GQA_RATIO * kv_heads + (LATENTS     ? 1
                                                                : SHARED_KV ? 0
                                                                            : (2 - K_EQ_V) * kv_heads)) *
                          HEAD_DIM),
          kv_heads(kv_heads),
          kv_head(kv_head) {}
    // Of the key head the queries 0 .. GQA_RATIO - 1, its key GQA_RATIO, its value GQA_RATIO + 1.
    __device__ __forceinline__ const float* row(int task) const {
        const int of_key_head = K_EQ_V ? min(task, GQA_RATIO) : task;
        const int number = task < GQA_RATIO ? (kv_head * GQA_RATIO + task) * QUERY_ROWS
                           : LATENTS        ? GQA_RATIO * kv_heads
                                            : ((QUERY_ROWS - 1) * GQA_RATIO + of_key_head) * kv_heads + kv_head;
        return first + (long long)number * HEAD_DIM;
    }
    // Of its queries' gates, each 2 HEAD_DIM behind the one before.
    __device__ __forceinline__ const float* gates() const { return row(0) + HEAD_DIM; }
};

// A lane's channels of a row of q, k or v, by pairs (rotary.cuh), and of the norm's weight.
struct NewRow {
    u32 words[2 * LANE_PAIRS];
    float first[LANE_PAIRS], second[LANE_PAIRS], norm_first[LANE_PAIRS], norm_second[LANE_PAIRS];

    __device__ __forceinline__ void load(const float* row, const float* norm) {
        request(row);
        if (!norm) return;
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = threadIdx.x % 32 + 32 * i;
            norm_first[i] = c < HALF ? load_l2(norm + first_channel(c)) : 0;
            norm_second[i] = c < HALF ? load_l2(norm + second_channel(c)) : 0;
        }
    }

    __device__ __forceinline__ void request(const float* row) {
#pragma unroll
        for (int i = 0; i < 2 * LANE_PAIRS; ++i) {  // the first channels, then the second
            const int c = threadIdx.x % 32 + 32 * (i % LANE_PAIRS);
            words[i] = c < HALF ? ll_load(row + (i < LANE_PAIRS ? first_channel(c) : second_channel(c))) : 0;
        }
    }

    // Waits until all words are there, where they have their flag in the data.
    __device__ __forceinline__ void receive(const float* row) {
        const auto missing = [&] {
            bool any = false;
#pragma unroll
            for (int i = 0; i < 2 * LANE_PAIRS; ++i) any |= words[i] == SENTINEL;
            return any;
        };
        while (FLAG_IN_DATA && missing()) request(row);
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i)
            first[i] = __uint_as_float(words[i]), second[i] = __uint_as_float(words[i + LANE_PAIRS]);
    }

    __device__ __forceinline__ void scale_to_norm(float eps) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) squares += first[i] * first[i] + second[i] * second[i];
        const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) first[i] *= scale * norm_first[i], second[i] *= scale * norm_second[i];
    }
};

// A lane's vectors of a cached row, on their way to a stage of the ring; zeros unless the row is `there`.
//
// key, value -- the lane's first vector
__device__ __forceinline__ void fetch_row(u8* to, const CacheType* key, const CacheType* value, bool there) {
    const int lane_vector = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i) {
        const int vector = lane_vector + i * LANES, from = i * LANES * VECTOR_CHANNELS;
        const bool real = there && vector < ROW_VECTORS;
        u8* at = to + i * LANES * 16;
        if (ALIGNED) {
            copy_async(at, key + from, real);
            copy_async(at + KEY_BYTES, value + from, real);
        } else {
#pragma unroll
            for (int c = 0; c < VECTOR_CHANNELS; ++c) {
                const bool channel = real && vector * VECTOR_CHANNELS + c < HEAD_DIM;
                ((CacheType*)at)[c] = channel ? load_l2(key + from + c) : CacheType(0);
                ((CacheType*)(at + KEY_BYTES))[c] = channel ? load_l2(value + from + c) : CacheType(0);
            }
        }
    }
}

// A lane's vectors of a batch of rows, one after the other in the cache.
//
// keys, values -- the lane's first vector
// left         -- rows from the lane's first on; those beyond are zeros
// without_new  -- the first row is left alone
__device__ __forceinline__ void fetch_rows(u8* to, const CacheType* keys, const CacheType* values, int left,
                                           bool without_new) {
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
        if (d == 0 && without_new) continue;
        const int row = d * ABREAST;
        fetch_row(to + row * ROW_BYTES, keys + row * HEAD_DIM, values + row * HEAD_DIM, row < left);
    }
}
