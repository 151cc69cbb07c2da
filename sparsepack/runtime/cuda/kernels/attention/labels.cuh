// Labels: heavy channels of keys in four bits, and products with queries of eight (formats/blocks/labels.py, whose bits
// these are). R = 8 LABEL_WORDS channels: byte j of a label holds channel j in its low bits and channel j + R / 2 in
// the high ones, each number plus 8.
//
// Macro: LABEL_WORDS

#pragma once

#include "common/common.cuh"

#ifndef LABEL_WORDS
#define LABEL_WORDS 4
#endif

static constexpr int LABEL_CHANNELS = 8 * LABEL_WORDS;
static constexpr int LABEL_BYTES = 4 * LABEL_WORDS;
static constexpr float LABEL_STEPS = 7, QUERY_STEPS = 127, LARGEST_HALF = 65504;
static constexpr int LABEL_ZERO = 8;

__device__ __forceinline__ int label_number(float x, float scale) {
    return min(max(__float2int_rn(__fdiv_rn(x, scale)), -8), 7) + LABEL_ZERO;  // 0 / 0 is 0
}

// By a warp: the label of a key. channel(c): its c-th heavy channel.
template <typename Channel>
__device__ __forceinline__ void write_label(Channel channel, u8* codes, u16* scale) {
    constexpr int ROUNDS = (LABEL_BYTES + 31) / 32;
    const int lane = threadIdx.x % 32;
    float low[ROUNDS], high[ROUNDS], largest = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int j = lane + 32 * i;
        low[i] = j < LABEL_BYTES ? channel(j) : 0;
        high[i] = j < LABEL_BYTES ? channel(j + LABEL_BYTES) : 0;
        largest = fmaxf(largest, fmaxf(fabsf(low[i]), fabsf(high[i])));
    }
    const u16 bits = float_to_half(fminf(__fdiv_rn(warp_max(largest), LABEL_STEPS), LARGEST_HALF));
    const float rounded = half_to_float(bits);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int j = lane + 32 * i;
        if (j < LABEL_BYTES) codes[j] = u8(label_number(low[i], rounded) | label_number(high[i], rounded) << 4);
    }
    if (lane == 0) *scale = bits;
}

// A query of 8 bits: four channels a word, those of the low bits of a label's bytes and those of the high ones.
struct LabelQuery {
    int words[2 * LABEL_WORDS];
    int zero;  // what a label of zeros would add

    // By a warp, to shared memory. channel(c): its c-th heavy channel.
    template <typename Channel>
    __device__ __forceinline__ void write(Channel channel) {
        constexpr int ROUNDS = (LABEL_CHANNELS + 31) / 32;
        const int lane = threadIdx.x % 32;
        float x[ROUNDS], largest = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int c = lane + 32 * i;
            x[i] = c < LABEL_CHANNELS ? channel(c) : 0;
            largest = fmaxf(largest, fabsf(x[i]));
        }
        largest = warp_max(largest);
        const float inverse = largest > 0 ? __fdiv_rn(QUERY_STEPS, largest) : 0;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int c = lane + 32 * i;
            const float number = fminf(fmaxf(__fmul_rn(x[i], inverse), -QUERY_STEPS), QUERY_STEPS);
            const int n = __float2int_rn(number);
            if (c < LABEL_CHANNELS) ((signed char*)words)[c] = (signed char)n;
            sum += n;
        }
        sum = __reduce_add_sync(ALL_LANES, sum);
        if (lane == 0) zero = LABEL_ZERO * sum;
    }
};

// A token's label on its way from memory.
struct Label {
    u32 words[LABEL_WORDS];
    u16 scale;

    __device__ __forceinline__ void load(const u8* codes, const u16* scales, int token) {
        const u8* at = codes + (long long)token * LABEL_BYTES;
        scale = load_l2(scales + token);
        if constexpr (LABEL_WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < LABEL_WORDS; i += 4) {
                const uint4 v = load_l2((const uint4*)at + i / 4);
                words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
            }
        } else if constexpr (LABEL_WORDS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < LABEL_WORDS; i += 2) {
                const uint2 v = load_l2((const uint2*)at + i / 2);
                words[i] = v.x, words[i + 1] = v.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < LABEL_WORDS; ++i) words[i] = load_l2((const u32*)at + i);
        }
    }

    // The score by which the label ranks, as bfloat16.
    __device__ __forceinline__ u16 score(const LabelQuery& query) const {
        int sum = -query.zero;
#pragma unroll
        for (int i = 0; i < LABEL_WORDS; ++i) {
            sum = __dp4a((int)(words[i] & 0x0f0f0f0f), query.words[i], sum);
            sum = __dp4a((int)(words[i] >> 4 & 0x0f0f0f0f), query.words[LABEL_WORDS + i], sum);
        }
        // Adding zero makes 0 of the score -0, which would rank below 0, where the scale is zero.
        return float_to_bfloat(__fadd_rn(__fmul_rn((float)sum, half_to_float(scale)), 0));
    }
};
