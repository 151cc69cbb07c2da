// Eight values of F32, F16 or BF16 that a thread reads at a time.
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
};
