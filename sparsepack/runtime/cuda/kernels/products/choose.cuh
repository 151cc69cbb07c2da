// Which experts a token has, by the logits of its router, and how much of each.
//
//     logits float32 [EXPERTS]  ->  the CHOSEN largest, of equals those with the lowest numbers, the largest first
//                               ->  weights: softmax over all, or with NORMALISED 1 over these alone; times ROUTER_SCALE
//            and one more       ->  its sigmoid: the weight of each of the SHARED experts after these, which every token
//                                   has, where there are any; with SHARED_GATE 0 there is none, and the weight is 1
//
// With SIGMOID 1 an expert's score is the sigmoid of its logit; those with the largest scores and corrections together
// are chosen, their weights are the scores. With several GROUPS of experts that neighbour each other, the GROUPS_USED
// best ones stay first, by the sum of their two best, or without SIGMOID by their best.
//
// Each warp that needs to know finds out for itself: it takes less time than to hand it on.
//
// Macros: CHOSEN, 0: nobody chooses; EXPERTS, NORMALISED; SHARED, SHARED_GATE; SIGMOID, GROUPS up to 32, GROUPS_USED,
//         ROUTER_SCALE; FIRST_SLOT, LAST_SLOT: a launch is of these slots of a token, without the last; FLAG_IN_DATA 1: logits are read as soon as they are stored

#pragma once

#include "common/flag_in_data.cuh"

#ifndef SHARED
#define SHARED 0
#endif
#ifndef SHARED_GATE
#define SHARED_GATE 1
#endif
#ifndef SIGMOID
#define SIGMOID 0
#define GROUPS 1
#define GROUPS_USED 1
#define ROUTER_SCALE 1
#endif

#ifndef FIRST_SLOT
#define FIRST_SLOT 0
#define LAST_SLOT (CHOSEN + SHARED)
#endif

static constexpr int ALL_SLOTS = CHOSEN + SHARED;     // experts of a token
static constexpr int SLOTS = LAST_SLOT - FIRST_SLOT;  // of a launch
#if CHOSEN
static constexpr int LOGITS = EXPERTS + (SHARED && SHARED_GATE ? 1 : 0);  // of a token

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

static constexpr int EACH_LANE = (EXPERTS + 31) / 32;  // experts of a lane: every 32nd

// Takes the largest number that is not 0 out of `left`, and returns it; the number of its expert, or the last one's if there is
// none.
__device__ __forceinline__ u32 take_largest(u32 (&left)[EACH_LANE], u32& number) {
    const int lane = threadIdx.x % 32;
    u32 best = 0;
    number = EXPERTS - 1;
#pragma unroll
    for (int i = 0; i < EACH_LANE; ++i) best = max(best, left[i]);
    best = __reduce_max_sync(ALL_LANES, best);
#pragma unroll
    for (int i = 0; i < EACH_LANE; ++i) {
        if (left[i] == best) number = min(number, (u32)(i * 32 + lane));
    }
    number = __reduce_min_sync(ALL_LANES, number);
#pragma unroll
    for (int i = 0; i < EACH_LANE; ++i) {
        if (i * 32 + lane == number) left[i] = 0;
    }
    return best;
}

// Leaves the experts of the best groups.
__device__ __forceinline__ void choose_groups(u32 (&left)[EACH_LANE]) {
    static_assert(GROUPS <= 32, "a lane has a group's score");
    constexpr int OF_GROUP = EXPERTS / GROUPS;
    const int lane = threadIdx.x % 32;
    u32 score = 0;  // of group `lane`
#pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
        u32 own[EACH_LANE], number;
#pragma unroll
        for (int i = 0; i < EACH_LANE; ++i) own[i] = (i * 32 + lane) / OF_GROUP == group ? left[i] : 0;
        u32 best = take_largest(own, number);
        if (SIGMOID) best = ordered(number_of(best) + number_of(take_largest(own, number)));
        if (lane == group) score = best;
    }
    u32 stay = 0;
#pragma unroll 1
    for (int used = 0; used < GROUPS_USED; ++used) {
        const u32 best = __reduce_max_sync(ALL_LANES, score);
        const int group = __reduce_min_sync(ALL_LANES, (u32)(score == best ? lane : GROUPS - 1));
        stay |= 1u << group;
        if (lane == group) score = 0;
    }
#pragma unroll
    for (int i = 0; i < EACH_LANE; ++i) {
        if (i * 32 + lane < EXPERTS && !(stay >> (i * 32 + lane) / OF_GROUP & 1)) left[i] = 0;
    }
}

// The expert of a slot: the slot-th largest, behind CHOSEN the next of those that every token has. By a whole warp,
// whose lanes all get it; a number below EXPERTS + SHARED, whatever the logits are.
//
// correction -- where SIGMOID, float32 [EXPERTS] or null: it is added to scores that choose
__device__ __forceinline__ Chosen choose(const float* logits, const float* correction, int slot) {
    if (SHARED && slot >= CHOSEN) {
        if (!SHARED_GATE) return {EXPERTS + slot - CHOSEN, 1};
        float of_all[1];
        const auto last = [&](int) { return logits + EXPERTS; };
        ll_receive<FLAG_IN_DATA>(of_all, last);
        return {EXPERTS + slot - CHOSEN, 1 / (1 + expf(-of_all[0]))};
    }
    constexpr int EACH = EACH_LANE;
    const int lane = threadIdx.x % 32;
    const auto at = [&](int i) { return i * 32 + lane < EXPERTS ? logits + i * 32 + lane : nullptr; };
    float logit[EACH];
    ll_receive<FLAG_IN_DATA>(logit, at);
    u32 left[EACH];  // 0: not there, or chosen already
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (SIGMOID) logit[i] = 1 / (1 + expf(-logit[i]));
        const float added = SIGMOID && correction && at(i) ? correction[i * 32 + lane] : 0;
        left[i] = at(i) ? ordered(logit[i] + added) : 0;
    }
    if (GROUPS > 1) choose_groups(left);
    Chosen expert = {0, 0};
    float largest = 0, of_chosen = 0;
#pragma unroll 1
    for (int s = 0; s < CHOSEN; ++s) {
        u32 number;
        const u32 best = take_largest(left, number);
        if (s == 0) largest = number_of(best);
        float weight = SIGMOID ? 0 : expf(number_of(best) - largest);
#pragma unroll
        for (int i = 0; SIGMOID && i < EACH; ++i) {
            if (i == (int)number / 32) weight = __shfl_sync(ALL_LANES, logit[i], number % 32);
        }
        of_chosen += weight;
        if (s == slot) expert = {(int)number, weight};
    }
    float all = 0;
#pragma unroll
    for (int i = 0; !NORMALISED && !SIGMOID && i < EACH; ++i) all += at(i) ? expf(logit[i] - largest) : 0;
    if (NORMALISED || !SIGMOID) expert.weight /= NORMALISED ? of_chosen : warp_sum(all);
    expert.weight *= ROUTER_SCALE;
    return expert;
}
#endif
