// Sums over rows: scores of a batch, which the lanes of a warp share, and the softmax states and weighted sums of warps
// and blocks, which are combined in order (the online softmax of FlashAttention, its split-K form Flash-Decoding).

#pragma once

#include "attention/attention_layout.cuh"
#include "common/activations.cuh"
#include "common/flag_in_data.cuh"
#include "common/fold.cuh"

// Scores are in units of log2, so that weights are powers of two. Before any, the maximum is finite: a weight against
// it is zero, never NaN. Sums are rescaled only when the maximum has grown by RESCALE_SLACK, as FlashAttention-4 does.
static constexpr float LOG2_E = 1.4426950408889634f;
static constexpr float NO_SCORE = -1e30f;
static constexpr float RESCALE_SLACK = 8;

// What a weighted sum is relative to (the largest score when it was last rescaled), and the sum of the weights:
// FlashAttention's m and l.
struct __align__(8) SoftmaxState {
    float max, row_sum;
};
struct __align__(8) Pair {
    float first, second;
};

// 2^x, to 2^-22 of it; zero below 2^-126.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A score with a soft cap, cap tanh(score / cap): both in units of log2, of `x` what 2 / ln 2 of score / cap are. To 2^-22
// of the cap.
__device__ __forceinline__ float soft_capped(float x, float cap) {
    return fmaf(-2 * cap, __fdividef(1, 1 + exp2_approx(x)), cap);
}

// Maximum or sum over the positions of a batch, of each head.
template <typename Operation>
__device__ __forceinline__ void reduce_positions(float (&x)[LANE_SCORES], Operation operation) {
    if (DEEP_IN_LANE) {
#pragma unroll
        for (int r = GQA_RATIO; r < LANE_SCORES; ++r) x[r % GQA_RATIO] = operation(x[r % GQA_RATIO], x[r]);
#pragma unroll
        for (int r = GQA_RATIO; r < LANE_SCORES; ++r) x[r] = x[r % GQA_RATIO];
    }
#pragma unroll
    for (int lanes = 16; lanes >= HEAD_LANES; lanes /= 2) {
#pragma unroll
        for (int r = 0; r < LANE_SCORES; ++r) x[r] = operation(x[r], __shfl_xor_sync(ALL_LANES, x[r], lanes));
    }
}

template <int COUNT>
__device__ __forceinline__ float largest_of(const float* x) {
    if constexpr (COUNT > 1) return fmaxf(largest_of<COUNT / 2>(x), largest_of<COUNT / 2>(x + COUNT / 2));
    return x[0];
}

// Two channels of the result over some of the rows: 16 bytes, as blocks hand them off.
struct PartialOutput {
    Pair sum;
    SoftmaxState state;

    __device__ __forceinline__ void write(void* workspace) const {
        ll_store4(workspace, make_float4(sum.first, sum.second, state.max, state.row_sum));
    }
    __device__ __forceinline__ static PartialOutput take(void* workspace) {
        const float4 v = ll_take4(workspace);
        return {{v.x, v.y}, {v.z, v.w}};
    }
    // Stores the output as the whole result.
    //
    // sinks -- of the query heads: a score for which nothing is added; null: there are none
    // gates -- where OUTPUT_GATES: those of the first query head, others 2 HEAD_DIM behind
    __device__ __forceinline__ void store(float* out, int pair, const float* sinks, const float* gates) const {
        const float of_sink = sinks ? exp2_approx(sinks[pair / HALF] * LOG2_E - state.max) : 0;
        const float scale = __fdividef(1, state.row_sum + of_sink);
        float first = sum.first * scale, second = sum.second * scale;
        if (OUTPUT_GATES) {
            const float* gate = gates + pair / HALF * 2 * HEAD_DIM + pair % HALF * 2;
            first *= sigmoid(load_l2(gate)), second *= sigmoid(load_l2(gate + 1));
        }
        const int c = pair % HALF * 2 - (LATENTS ? ROTARY_DIM : 0);
        if (VALUE_DIM < HEAD_DIM) out += pair / HALF * VALUE_DIM + c - 2 * pair;
        if (VALUE_DIM == HEAD_DIM || (c >= 0 && c < VALUE_DIM)) ll_store(out + 2 * pair, first);
        if (VALUE_DIM == HEAD_DIM || (c >= 0 && c + 1 < VALUE_DIM)) ll_store(out + 2 * pair + 1, second);
    }
};

// Combines the partial outputs of the warps that had rows. state(w) and sum(w) are those of warp w.
template <typename StateOf, typename SumOf>
__device__ __forceinline__ PartialOutput combine_warps(int working, StateOf state, SumOf sum) {
    PartialOutput whole = {{0, 0}, {NO_SCORE, 0}};
    float score[WARPS], weight[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        SoftmaxState own = whole.state;
        if (w < working) own = state(w);
        score[w] = own.max;
        weight[w] = own.row_sum;
    }
    whole.state.max = largest_of<WARPS>(score);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        Pair part = {0, 0};
        if (w < working) part = sum(w);
        const float factor = exp2_approx(score[w] - whole.state.max);
        whole.state.row_sum += factor * weight[w];
        whole.sum.first += factor * part.first;
        whole.sum.second += factor * part.second;
    }
    return whole;
}

// The partial outputs of so many lanes side by side, a power of two, become one, in each of them.
__device__ __forceinline__ PartialOutput combine_lanes(const PartialOutput& part, int lanes) {
    float score = part.state.max;
    for (int step = lanes / 2; step; step /= 2) score = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, step));
    const float factor = exp2_approx(part.state.max - score);
    float first = factor * part.sum.first, second = factor * part.sum.second, weight = factor * part.state.row_sum;
    for (int step = lanes / 2; step; step /= 2) {
        first += __shfl_xor_sync(ALL_LANES, first, step);
        second += __shfl_xor_sync(ALL_LANES, second, step);
        weight += __shfl_xor_sync(ALL_LANES, weight, step);
    }
    return {{first, second}, {score, weight}};
}
