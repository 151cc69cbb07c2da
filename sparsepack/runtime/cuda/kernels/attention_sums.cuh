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

#if __CUDA_ARCH__ >= 900
// A mailbox is a barrier that counts the bytes that the blocks of the cluster send. They wait for each other once, so
// that all have opened theirs; a barrier at the end would need a fence of the whole GPU's memory, which takes longer
// than the bytes.
__device__ __forceinline__ void send(u32 address, float first, float second, u32 mailbox) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "f"(first), "f"(second), "r"(mailbox)
                 : "memory");
}
#endif

template <int COUNT> __device__ __forceinline__ float largest_of(const float* x) {
    if constexpr (COUNT > 1) return fmaxf(largest_of<COUNT / 2>(x), largest_of<COUNT / 2>(x + COUNT / 2));
    return x[0];
}

// A pair of the result as the sum of up to MOST parts, a power of two, in order. peak(p) and sum(p): of part p.
template <int MOST> struct Merged {
    Peak total = {NO_SCORE, 0};
    Pair mixed = {0, 0};

    template <typename PeakOf, typename SumOf>
    __device__ __forceinline__ Merged(int parts, PeakOf peak, SumOf sum) {
        float score[MOST], weight[MOST];
#pragma unroll
        for (int p = 0; p < MOST; ++p) {
            Peak own = total;
            if (p < parts) own = peak(p);
            score[p] = own.score;
            weight[p] = own.weight;
        }
        total.score = largest_of<MOST>(score);
#pragma unroll
        for (int p = 0; p < MOST; ++p) {
            Pair part = {0, 0};
            if (p < parts) part = sum(p);
            const float factor = power(score[p] - total.score);
            total.weight += factor * weight[p];
            mixed.first += factor * part.first;
            mixed.second += factor * part.second;
        }
    }
    __device__ __forceinline__ void store(float* out, int pair) const {
        const float scale = __fdividef(1, total.weight);
        write_word(out + 2 * pair, mixed.first * scale);
        write_word(out + 2 * pair + 1, mixed.second * scale);
    }
};

#if !CLUSTERS
// What the blocks of a row left in `partials`, of each its PAIRS sums and GROUP peaks: the last one to come combines it
// all, and sets the ticket back to zero. For all threads.
__device__ __forceinline__ void merge_last(const float* partials, u32* ticket, int splits, float* result) {
    __threadfence();
    __syncthreads();
    const bool last = threadIdx.x == 0 && atomicAdd(ticket, 1u) == splits - 1u;
    if (!__syncthreads_or(last)) return;
    __threadfence();
    if (threadIdx.x == 0) *ticket = 0;
    const auto at = [&](int s, int i) { return fresh((const float2*)partials + s * (GROUP * (HALF + 1)) + i); };
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const Merged<MOST_SPLITS> merged(
            splits,
            [&](int s) {
                const float2 v = at(s, PAIRS + pair / HALF);
                return Peak{v.x, v.y};
            },
            [&](int s) {
                const float2 v = at(s, pair);
                return Pair{v.x, v.y};
            });
        merged.store(result, pair);
    }
}
#endif
