// What the kernels of mixers share that keep a matrix of each head in place of keys and values: gated delta nets
// (delta_net.cuh) and state-space models (mamba.cuh). Value head h has the queries and keys of key head h / RATIO.
//
//     mixed     float32 [S, channels]     | q of all key heads | k of them | v of all value heads |
//     state     float32 [2, sequences, value heads, VALUE_DIM, KEY_DIM]   S transposed: lanes have keys. After p tokens it
//                                                                        lies in half p modulo 2
//     inputs    float32 [sequences, TAPS, channels]                       causal_convolution.cuh
//
// So a step writes neither what it reads nor what a step at the same position would read: one that is forgotten, because
// its token was another or its sequence stands still, leaves nothing behind. A text begins with zeros, whatever lies there.
//
// Macros: that of causal_convolution.cuh; KEY_DIM, VALUE_DIM up to 256; RATIO: value heads of a key head

#pragma once

#include "attention/causal_convolution.cuh"
#include "common/activations.cuh"
#include "common/common.cuh"

#ifndef KEY_DIM
#define KEY_DIM 128
#define VALUE_DIM 128
#define RATIO 2
#endif

static constexpr int LANE_KEYS = (KEY_DIM + 31) / 32;      // of a lane
static constexpr int CONVOLVED = 2 * KEY_DIM + VALUE_DIM;  // numbers of a value head that pass the convolution

// Where `mixed` has what, of so many value heads.
struct MixedRows {
    int heads;
    __device__ __forceinline__ int keys() const { return heads / RATIO * KEY_DIM; }
    __device__ __forceinline__ int channels() const { return 2 * keys() + heads * VALUE_DIM; }
    // Of a value head's CONVOLVED: queries, keys, values.
    __device__ __forceinline__ int place(int head, int number) const {
        if (number < KEY_DIM) return head / RATIO * KEY_DIM + number;
        if (number < 2 * KEY_DIM) return keys() + head / RATIO * KEY_DIM + number - KEY_DIM;
        return 2 * keys() + head * VALUE_DIM + number - 2 * KEY_DIM;
    }
};

// What attn_in gives, as decoder/prefill.cu takes it: sums times factor [S] and `inverse`, and bias or null.
struct ProductRows {
    const float *sums, *factor;
    float inverse;
    const float* bias;
    int width;
    __device__ __forceinline__ float at(int row, int channel) const {
        const float x = load_l2(sums + (u64)row * width + channel) * load_l2(factor + row) * inverse;
        return bias ? x + bias[channel] : x;
    }
};

// Of so many positions those that count; counted: int32 [1], or null: all.
__device__ __forceinline__ int counted_of(int count, const int* counted) {
    return counted ? min(load_l2(counted), count) : count;
}

// What the convolution makes of a channel at a row, of which attn_in gives number `first_channel` + c; inputs: of the
// sequence, which has so many tokens before these rows.
__device__ __forceinline__ float convolved(const ProductRows& product, const float* inputs, const float* taps, int row,
                                           int tokens, int first_channel, int c, int channels) {
    float sum = 0;
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
        const int s = row - (TAPS - 1) + t, p = tokens + s;
        if (p < 0) continue;
        const float x = s >= 0 ? product.at(s, first_channel + c) : load_l2(inputs + input_place(p, c, channels));
        sum += x * taps[c * TAPS + t];
    }
    return sum;
}

// Keep what the convolution is given of a row, where it is one of the last TAPS of `count`, by thread `number` of `all`.
__device__ __forceinline__ void keep_inputs(const ProductRows& product, float* inputs, int row, int count, int tokens,
                                            int first_channel, int channels, int number, int all) {
    if (row < count - TAPS || row >= count) return;
    float* kept = inputs + input_place(tokens + row, 0, channels);
    for (int c = number; c < channels; c += all) kept[c] = product.at(row, first_channel + c);
}

// Which keys a lane has: every 32nd from the lane's number on, or where rows allow it four that neighbour each other.
static constexpr bool VECTORS = KEY_DIM % 128 == 0 && VALUE_DIM % 4 == 0;
__device__ __forceinline__ int key_of(int i) {
    const int lane = threadIdx.x % 32;
    return VECTORS ? i / 4 * 128 + lane * 4 + i % 4 : lane + 32 * i;
}
// A lane's keys of a row, zeros behind the last.
template <typename Load4, typename Load>
__device__ __forceinline__ void load_keys(float (&x)[LANE_KEYS], const float* row, Load4 load4, Load load) {
    if constexpr (VECTORS) {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i += 4) {
            const float4 v = load4((const float4*)(row + key_of(i)));
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) x[i] = key_of(i) < KEY_DIM ? load(row + key_of(i)) : 0;
    }
}
__device__ __forceinline__ void load_keys_shared(float (&x)[LANE_KEYS], const float* row) {
    load_keys(x, row, [](const float4* p) { return *p; }, [](const float* p) { return *p; });
}
__device__ __forceinline__ void load_keys_l2(float (&x)[LANE_KEYS], const float* row) {
    load_keys(x, row, [](const float4* p) { return load_l2(p); }, [](const float* p) { return load_l2(p); });
}
__device__ __forceinline__ void store_keys(float* row, const float (&x)[LANE_KEYS]) {
    if constexpr (VECTORS) {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i += 4)
            __stcg((float4*)(row + key_of(i)), make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));  // in one piece
    } else {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i)
            if (key_of(i) < KEY_DIM) row[key_of(i)] = x[i];
    }
}

// In a step a block has a head's whole state in its registers, each of its STEP_WARPS warps COLUMNS columns of it.
static constexpr int STEP_WARPS = 16, STEP_THREADS = STEP_WARPS * 32;
static constexpr int COLUMNS = (VALUE_DIM + STEP_WARPS - 1) / STEP_WARPS;
__device__ __forceinline__ int column_of(int c) { return threadIdx.x / 32 * COLUMNS + c; }

// The state of head blockIdx.x of sequence blockIdx.y, after so many tokens.
__device__ __forceinline__ float* state_at(float* state, int tokens) {
    const u64 heads = gridDim.x, own = blockIdx.y * heads + blockIdx.x;
    return state + ((tokens & 1) * gridDim.y * heads + own) * VALUE_DIM * KEY_DIM;
}
__device__ __forceinline__ void load_state(float (&s)[COLUMNS][LANE_KEYS], float* state, int position) {
    const float* before = state_at(state, position);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) s[c][i] = 0;
        if (position && column_of(c) < VALUE_DIM) load_keys_l2(s[c], before + column_of(c) * KEY_DIM);
    }
}
__device__ __forceinline__ void store_state(float* state, int position, const float (&s)[COLUMNS][LANE_KEYS]) {
    float* after = state_at(state, position + 1);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (column_of(c) < VALUE_DIM) store_keys(after + column_of(c) * KEY_DIM, s[c]);
}

__device__ __forceinline__ float silu(float x) { return activated(0, x); }

__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
