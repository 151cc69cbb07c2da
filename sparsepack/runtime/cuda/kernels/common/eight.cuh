// Eight values of F32, F16 or BF16 that a thread reads or writes at a time.
//
// Macro: INPUT 0 .. 2 for F32, F16, BF16

#pragma once

#include "common/common.cuh"

// Eight inputs as they lie in memory.
struct Eight {
    static constexpr int WORDS = INPUT == 0 ? 8 : 4;
    u32 word[WORDS];

    __device__ __forceinline__ float operator[](int i) const {
        if (INPUT == 0) return __uint_as_float(word[i % WORDS]);
        const u16 half = (u16)(word[i / 2] >> 16 * (i % 2));
        return INPUT == 1 ? half_to_float(half) : bfloat_to_float(half);
    }
    // From a column on; zeros beyond the last.
    __device__ __forceinline__ void load(const u8* row, int column, int columns, bool aligned) {
        constexpr int ELEMENT = INPUT == 0 ? 4 : 2;
        if (aligned && column + 8 <= columns) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 four = load_l2((const uint4*)(row + column * ELEMENT) + i / 4);
                word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (column + i < columns) {
                    if (INPUT == 0)
                        word[i % WORDS] = load_l2((const u32*)row + column + i);
                    else
                        word[i / 2] |= (u32)load_l2((const u16*)row + column + i) << 16 * (i % 2);
                }
            }
        }
    }
    // Eight values that the type has, to where 16 bytes are aligned.
    static __device__ __forceinline__ void store(const float* value, u8* row, u64 column) {
        u32 made[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            made[i] = INPUT == 0 ? __float_as_uint(value[i])
                                 : (u32)bits(value[2 * i % 8]) | (u32)bits(value[(2 * i + 1) % 8]) << 16;
        }
        uint4* const to = (uint4*)(row + column * (INPUT == 0 ? 4 : 2));
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i)
            to[i] = make_uint4(made[4 * i], made[4 * i + 1], made[4 * i + 2], made[4 * i + 3]);
    }
    static __device__ __forceinline__ u16 bits(float x) { return INPUT == 1 ? float_to_half(x) : float_to_bfloat(x); }
    // The nearest value that the type has.
    static __device__ __forceinline__ float rounded(float x) {
        return INPUT == 0 ? x : INPUT == 1 ? half_to_float(bits(x)) : bfloat_to_float(bits(x));
    }
};
