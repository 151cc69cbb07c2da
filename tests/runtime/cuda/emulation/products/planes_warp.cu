// A warp for each band of a tile, which multiplies k_tiles that lie in a ring: what zigzag_gemv.cu and zigzag_batch.cu do around it.
//
//     stages [k_tiles][STAGE], index [columns], value [INPUTS][columns]  ->  sums [TILE_BANDS][INPUTS][PADDED_ROWS]
//
// Macros: TILE_BANDS, DENSE, INPUTS; BATCH 1: as several inputs, even if there is one; CARD_LEVELS: the matrix is divided

#include "common/common.cuh"
#if BATCH
#include "products/batch_q6_p.cuh"
#else
#include "products/gemv_q6_p.cuh"
#endif

extern "C" __global__ void planes_warp(const u8* stages, const int* index, const float* value, int k_tiles, float scale,
                                       float* sums_of_bands, int rest_columns) {
    const int band = blockIdx.x, columns = k_tiles * K_TILE, lane = threadIdx.x;
    constexpr int STAGE = K_TILE * (PITCH + REST_PITCH);
    const ColumnPipeline pipeline{index, rest_columns};
    const PlanePlaces places{TILE_BANDS, band};
    const LaneOffsets offsets(places);
    alignas(16) static u8 scratch[1024];
    float* rows = sums_of_bands + band * INPUTS * PADDED_ROWS;
#if BATCH
    const int input = lane / 4 % (INPUTS <= 4 ? 4 : 8);
    BatchAccumulator sums = {};
    for (int i = 0; i < k_tiles; ++i)
        multiply(sums, stages + i * STAGE, offsets, index + i * K_TILE,
                 value + (input < INPUTS ? input : 0) * columns + i * K_TILE, input < INPUTS ? scale : 0, scratch,
                 pipeline.has_rest(i * K_TILE + lane % K_TILE));
#else
    Accumulator sums = {};
    for (int i = 0; i < k_tiles; i += 2) {
        const bool both = i + 1 < k_tiles;
        const u8* at = stages + i * STAGE;
        const PlanesTiles tiles{at,
                                both ? at + STAGE : at,
                                index + i * K_TILE,
                                value + i * K_TILE,
                                both ? K_TILE : 0,
                                both,
                                pipeline,
                                i * K_TILE};
        multiply(sums, tiles, places, offsets, scale, scratch);
    }
#endif
    store_sums(sums, 1 / scale, rows);
}
