// Split-K reduction: the blocks of a tile, which have different columns, come to one sum for each row.
//
// Each of them has the same COUNT sums, first those of its warps. Where SHARES > 1 it stores its own in a workspace
// (CUTLASS's word) of flag-in-data words (common/flag_in_data.cuh), and finishes a share of the COUNT: takes what all
// of them stored there, in the order of the blocks, so that the same bits come every run, and resets it to SENTINEL.
// There is no ticket and no last block: blocks wait for each other, so all of a grid must run at once.
//
//     workspace   | COUNT sums of block 0 | of block 1 | .. SHARES - 1 | ... the next tile's
//
// The warps' sums lie in shared memory, 256 of a band after the other (of each input, then of the next band). Lanes
// that write at a time are 64 rows apart, which would be the same bank: so 4 floats stay unused after each 64, and 4
// more after 256:
//
//     a warp's sums   | 64 | 4 | 64 | 4 | 64 | 4 | 64 | 4 | 4 |     PADDED_ROWS floats; row i at padded_index(i)
//
// Launch: as column_split.cuh; the first WARPS warps of a block reduce.
//
// Macros: SHARES: how many blocks come to one sum, by default the SPLITS of the columns; and those of zigzag.cuh

#pragma once

#include "common/flag_in_data.cuh"
#include "products/zigzag.cuh"

#ifndef SHARES
#define SHARES SPLITS
#endif

static constexpr int PADDED_ROWS = BAND_ROWS + 20;  // of a band's sums
__device__ __forceinline__ int padded_index(int i) {
    return i / BAND_ROWS * PADDED_ROWS + i % BAND_ROWS + i % BAND_ROWS / 64 * 4;
}

// What a block finishes of COUNT: from begin on, before end.
template <int COUNT>
struct RowShare {
    static constexpr int EACH = (COUNT + SHARES - 1) / SHARES;
    int begin, end;

    __device__ __forceinline__ explicit RowShare(int split)
        : begin(min(split * EACH, COUNT)), end(min(begin + EACH, COUNT)) {}
};

// The sums of a block's warps, of each as many as its band has, become the block's: in its part of the workspace, or
// where it is alone in place of its first warps', so that sum i is at own[padded_index(i)].
template <int COUNT>
__device__ __forceinline__ void reduce_warps(float* own, float* workspace) {
#pragma unroll 1
    for (int r = threadIdx.x * 4; r < COUNT; r += THREADS * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k_slice = 0; k_slice < K_SLICES; ++k_slice) {
            const float4 v = *(const float4*)(own + padded_index(k_slice * COUNT + r));
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
        if (SHARES > 1) {
            ll_store4(workspace + r, sum);
        } else {
            *(float4*)(own + padded_index(r)) = sum;  // which no other thread reads before
        }
    }
    if (SHARES == 1) sync_consumers<THREADS>();
}

// Adds to sums, in order, what the blocks of a tile stored STRIDE apart, and resets it. Each stored COUNT partial sums,
// the i-th apart(i) from the first; of them the last COUNT - present may be missing.
template <int STRIDE, int COUNT, typename Apart>
__device__ __forceinline__ void reduce_splits(float* partials, float (&sums)[COUNT], Apart apart, int present = COUNT) {
    constexpr int MOST = COUNT > 2 ? 16 : 32, ONCE = SHARES <= MOST ? SHARES : MOST;  // blocks asked at a time
#pragma unroll 1
    for (int first = 0; first < SHARES; first += ONCE, partials += ONCE * STRIDE) {
        float values[ONCE][COUNT];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int s = 0; s < ONCE; ++s) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const bool none = SHARES % ONCE && first + s >= SHARES || i >= present;
                    const u32 word = none ? 0 : ll_load(partials + s * STRIDE + apart(i));
                    values[s][i] = __uint_as_float(word);
                    missing |= word == SENTINEL;
                }
            }
        } while (missing);
#pragma unroll
        for (int s = 0; s < ONCE; ++s) {
            if (SHARES % ONCE && first + s >= SHARES) break;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                sums[i] += values[s][i];
                if (i < present) *(u32*)(partials + s * STRIDE + apart(i)) = SENTINEL;
            }
        }
    }
}
