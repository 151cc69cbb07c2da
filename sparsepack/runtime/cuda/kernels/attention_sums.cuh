// Sums over rows: scores of a batch, which the lanes of a warp share, and weighted sums of warps and blocks, which
// become one in order.

#pragma once

#include "attention_layout.cuh"
#include "words.cuh"

// Scores are in units of log2, so that weights are powers of two. Before any, the largest is finite: a weight against
// it is zero, never NaN. Sums are scaled anew only when the largest score has grown by SLACK.
static constexpr float LOG2_E = 1.4426950408889634f;
static constexpr float NO_SCORE = -1e30f;
static constexpr float SLACK = 8;

// What a weighted sum is relative to (the largest score when it was last scaled), and the sum of the weights.
struct __align__(8) Peak {
    float score, weight;
};
struct __align__(8) Pair {
    float first, second;
};

// 2^x, to 2^-22 of it; zero below 2^-126.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// COUNT sums in each of a row's lanes become totals, about COUNT / LANES of them in each lane: with every step, lanes
// exchange half of what they have, and keep the half that their bit says. An odd one is added up in both.
template <int COUNT, int STEP_LANES> __device__ __forceinline__ void fold(float* sums, int lane) {
    if constexpr (STEP_LANES > 0) {
        constexpr int KEPT = (COUNT + 1) / 2;
        const bool upper = lane & STEP_LANES;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float sent = upper ? sums[i] : sums[i + KEPT];
            sums[i] = (upper ? sums[i + KEPT] : sums[i]) + __shfl_xor_sync(ALL_LANES, sent, STEP_LANES);
        }
        if (COUNT % 2) sums[KEPT - 1] += __shfl_xor_sync(ALL_LANES, sums[KEPT - 1], STEP_LANES);
        fold<KEPT, STEP_LANES / 2>(sums, lane);
    }
}

// Which of the COUNT sums a lane has in a slot after folding.
template <int COUNT, int STEP_LANES> __device__ __forceinline__ int number_of(int slot, int lane) {
    if constexpr (STEP_LANES > 0) {
        constexpr int KEPT = (COUNT + 1) / 2;
        const int i = number_of<KEPT, STEP_LANES / 2>(slot, lane);
        return (lane & STEP_LANES) && i + KEPT < COUNT ? i + KEPT : i;
    } else {
        return slot;
    }
}

// Maximum or sum over the positions of a batch, of each head.
template <typename Operation> __device__ __forceinline__ void over_positions(float (&x)[SLOTS], Operation operation) {
    if (DEEP_IN_LANE) {
#pragma unroll
        for (int r = GROUP; r < SLOTS; ++r) x[r % GROUP] = operation(x[r % GROUP], x[r]);
#pragma unroll
        for (int r = GROUP; r < SLOTS; ++r) x[r] = x[r % GROUP];
    }
#pragma unroll
    for (int lanes = 16; lanes >= OWN; lanes /= 2) {
#pragma unroll
        for (int r = 0; r < SLOTS; ++r) x[r] = operation(x[r], __shfl_xor_sync(ALL_LANES, x[r], lanes));
    }
}

template <int COUNT> __device__ __forceinline__ float largest_of(const float* x) {
    if constexpr (COUNT > 1) return fmaxf(largest_of<COUNT / 2>(x), largest_of<COUNT / 2>(x + COUNT / 2));
    return x[0];
}

// A part of two channels of the result: 16 bytes, as blocks hand it on.
struct Part {
    Pair sum;
    Peak peak;

    __device__ __forceinline__ void write(void* slot) const {
        write_words(slot, make_float4(sum.first, sum.second, peak.score, peak.weight));
    }
    __device__ __forceinline__ static Part take(void* slot) {
        const float4 words = take_words(slot);
        return {{words.x, words.y}, {words.z, words.w}};
    }
    // As the whole result.
    __device__ __forceinline__ void store(float* out, int pair) const {
        const float scale = __fdividef(1, peak.weight);
        write_word(out + 2 * pair, sum.first * scale);
        write_word(out + 2 * pair + 1, sum.second * scale);
    }
};

// Parts of the warps that had rows become one. peak(w) and sum(w): of warp w.
template <typename PeakOf, typename SumOf>
__device__ __forceinline__ Part over_warps(int working, PeakOf peak, SumOf sum) {
    Part whole = {{0, 0}, {NO_SCORE, 0}};
    float score[WARPS], weight[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        Peak own = whole.peak;
        if (w < working) own = peak(w);
        score[w] = own.score;
        weight[w] = own.weight;
    }
    whole.peak.score = largest_of<WARPS>(score);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        Pair part = {0, 0};
        if (w < working) part = sum(w);
        const float factor = power(score[w] - whole.peak.score);
        whole.peak.weight += factor * weight[w];
        whole.sum.first += factor * part.first;
        whole.sum.second += factor * part.second;
    }
    return whole;
}

// Parts of so many lanes side by side, a power of two, become one, in each of them.
__device__ __forceinline__ Part over_lanes(const Part& part, int lanes) {
    float score = part.peak.score;
    for (int step = lanes / 2; step; step /= 2) score = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, step));
    const float factor = power(part.peak.score - score);
    float first = factor * part.sum.first, second = factor * part.sum.second, weight = factor * part.peak.weight;
    for (int step = lanes / 2; step; step /= 2) {
        first += __shfl_xor_sync(ALL_LANES, first, step);
        second += __shfl_xor_sync(ALL_LANES, second, step);
        weight += __shfl_xor_sync(ALL_LANES, weight, step);
    }
    return {{first, second}, {score, weight}};
}
