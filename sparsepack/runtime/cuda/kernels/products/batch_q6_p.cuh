// How a warp of zigzag_batch.cu multiplies k_tiles of Q6_P: in float32, eight rows in each lane, as batch_floats.cuh does.

#pragma once

#include "products/zigzag.cuh"

struct BatchAccumulator {
    float c[INPUTS][8];
};

// Add 16 columns. stage: of the k_tile; index: of its columns; values: of the first input there, `stride` apart.
__device__ __forceinline__ void multiply(BatchAccumulator& sums, const u8* stage, const PlanePlaces& places,
                                         const int* index, const float* values, int stride) {
#pragma unroll 2
    for (int c = 0; c < K_TILE; ++c) {
        const int level = DENSE ? LEVELS : (u32)index[c] >> LEVEL_SHIFT;
        if (!level) continue;
        LanePlanes rows;
        rows.read(stage + c * PITCH, places, level, FromRing());
        float w[8];
        rows.weights(level, w);
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            const float x = values[b * stride + c];
#pragma unroll
            for (int r = 0; r < 8; ++r) sums.c[b][r] += x * w[r];
        }
    }
}

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PADDED_ROWS].
__device__ __forceinline__ void store_sums(const BatchAccumulator& sums, float, float* rows) {
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        float* at = rows + padded_index(b * BAND_ROWS + threadIdx.x % 32 * 8);
#pragma unroll
        for (int r = 0; r < 8; ++r) at[r] = sums.c[b][r];
    }
}
