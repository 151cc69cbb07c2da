// Which experts a token has, by the logits of its router, and how much of each.
//
//     logits float32 [EXPERTS]  ->  the CHOSEN largest, of equals those with the lowest numbers, the largest first
//                               ->  weights: softmax over all, or with NORMALISED 1 over these alone
//            and one more       ->  its sigmoid: the weight of each of the SHARED experts after these, which every token
//                                   has, where there are any
//
// Each warp that needs to know finds out for itself: it takes less time than to hand it on.
//
// Macros: CHOSEN, 0: nobody chooses; EXPERTS, NORMALISED; SHARED; FLAG_IN_DATA 1: logits are read as soon as they are
//         stored

#pragma once

#include "common/flag_in_data.cuh"

#ifndef SHARED
#define SHARED 0
#endif

static constexpr int SLOTS = CHOSEN + SHARED;  // experts of a token
#if CHOSEN
static constexpr int LOGITS = EXPERTS + (SHARED ? 1 : 0);  // of a token

struct Chosen {
    int number;
    float weight;
};

// As integers in the order of the numbers, and back.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float number_of(u32 ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffff : ~ordered);
}

// The expert of a slot: the slot-th largest, behind CHOSEN the next of those that every token has. By a whole warp,
// whose lanes all get it; a number below EXPERTS + SHARED, whatever the logits are.
__device__ __forceinline__ Chosen choose(const float* logits, int slot) {
    if (SHARED && slot >= CHOSEN) {
        float of_all[1];
        const auto last = [&](int) { return logits + EXPERTS; };
        if (FLAG_IN_DATA) {
            ll_wait(of_all, last);
        } else {
            of_all[0] = load_l2(last(0));
        }
        return {EXPERTS + slot - CHOSEN, 1 / (1 + expf(-of_all[0]))};
    }
    constexpr int EACH = (EXPERTS + 31) / 32;
    const int lane = threadIdx.x % 32;
    const auto at = [&](int i) { return i * 32 + lane < EXPERTS ? logits + i * 32 + lane : nullptr; };
    float logit[EACH];
    if (FLAG_IN_DATA) {
        ll_wait(logit, at);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i) logit[i] = at(i) ? load_l2(at(i)) : 0;
    }
    u32 left[EACH];  // 0: not there, or chosen already
#pragma unroll
    for (int i = 0; i < EACH; ++i) left[i] = at(i) ? ordered(logit[i]) : 0;
    Chosen expert = {0, 0};
    float largest = 0, of_chosen = 0;
#pragma unroll 1
    for (int s = 0; s < CHOSEN; ++s) {
        u32 best = 0, number = EXPERTS - 1;
#pragma unroll
        for (int i = 0; i < EACH; ++i) best = max(best, left[i]);
        best = __reduce_max_sync(ALL_LANES, best);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (left[i] == best) number = min(number, (u32)(i * 32 + lane));
        }
        number = __reduce_min_sync(ALL_LANES, number);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (i * 32 + lane == number) left[i] = 0;
        }
        if (s == 0) largest = number_of(best);
        const float weight = expf(number_of(best) - largest);
        of_chosen += weight;
        if (s == slot) expert = {(int)number, weight};
    }
    float all = 0;
#pragma unroll
    for (int i = 0; !NORMALISED && i < EACH; ++i) all += at(i) ? expf(logit[i] - largest) : 0;
    expert.weight /= NORMALISED ? of_chosen : warp_sum(all);
    return expert;
}
#endif
