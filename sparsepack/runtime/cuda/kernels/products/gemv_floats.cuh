// How a warp of zigzag_gemv.cu or zigzag_batch.cu multiplies k_tiles of blocks whose lanes have eight rows each (`LaneRows`
// of blocks/*.cuh): in float32, each row's sum in its lane. Some 3 to 5 instructions a weight, which memory hides.

#pragma once

#include "products/zigzag.cuh"

struct Accumulator {
    float c[8];
};

// As of gemv_q4_k.cuh: nothing that a lane need know before.
struct SubBlock {
    __device__ __forceinline__ explicit SubBlock(int) {}
};

struct KTile {
    LaneRows rows[K_TILE];

    template <typename Header, typename Reader>
    __device__ __forceinline__ void read(Header header, const Reader& reader, const SubBlock&) {
#pragma unroll
        for (int c = 0; c < K_TILE; ++c) rows[c].read(header(c), reader);
    }
};

// Add 16 columns. scale: a power of two, which keeps sums in range whatever x is.
__device__ __forceinline__ void multiply(Accumulator& sums, const KTile& k_tile, const float* value, float scale,
                                         const SubBlock&) {
#pragma unroll
    for (int c = 0; c < K_TILE; ++c) {
        const float factor = value[c] * scale * k_tile.rows[c].scale();
        float w[8];
        k_tile.rows[c].numbers(w);
#pragma unroll
        for (int r = 0; r < 8; ++r) sums.c[r] += factor * w[r];
    }
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void store_sums(const Accumulator& sums, float inverse, float* rows) {
    float* at = rows + padded_index(threadIdx.x % 32 * 8);
#pragma unroll
    for (int r = 0; r < 8; ++r) at[r] = sums.c[r] * inverse;
}
