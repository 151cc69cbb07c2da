// Several sums over lanes at a time: fewer shuffles than one after the other.

#pragma once

#include "common/common.cuh"

// COUNT sums in each of so many lanes become totals, about COUNT / lanes of them in each lane: with every step, lanes
// exchange half of what they have, and keep the half that their bit says. An odd one is added up in both. STEP_LANES: half
// of the lanes.
template <int COUNT, int STEP_LANES>
__device__ __forceinline__ void fold(float* sums, int lane) {
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

// The number, of COUNT sums, of the one that a lane has as its i-th after folding.
template <int COUNT, int STEP_LANES>
__device__ __forceinline__ int number_of(int held, int lane) {
    if constexpr (STEP_LANES > 0) {
        constexpr int KEPT = (COUNT + 1) / 2;
        const int i = number_of<KEPT, STEP_LANES / 2>(held, lane);
        return (lane & STEP_LANES) && i + KEPT < COUNT ? i + KEPT : i;
    } else {
        return held;
    }
}
