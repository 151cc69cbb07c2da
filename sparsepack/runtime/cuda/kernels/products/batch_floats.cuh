// How a warp of zigzag_batch.cu multiplies k_tiles of blocks whose lanes have eight rows each, as gemv_floats.cuh does.

#pragma once

#include "products/zigzag.cuh"

struct BatchAccumulator {
    float c[INPUTS][8];
};

// Add 16 columns. header(c): where the band's piece of column c begins; values: of the first input there, `stride` apart.
template <typename Header>
__device__ __forceinline__ void multiply(BatchAccumulator& sums, Header header, const float*, const float* values,
                                         int stride, float) {
#pragma unroll 4
    for (int c = 0; c < K_TILE; ++c) {
        LaneRows rows;
        rows.read(header(c), FromRing());
        const float scale = rows.scale();
        float w[8];
        rows.numbers(w);
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            const float factor = values[b * stride + c] * scale;
#pragma unroll
            for (int r = 0; r < 8; ++r) sums.c[b][r] += factor * w[r];
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
