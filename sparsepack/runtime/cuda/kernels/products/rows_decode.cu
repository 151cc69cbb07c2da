// Single rows of a matrix stored by rows (rows.cuh): the embedding's, or all of them for products with many vectors.
//
//     weights   tiles or padded rows, as rows.cuh draws them   ->   out float32 [rows asked for, columns]
//
// Launch: grid (rows asked for, columns / 1024 rounded up), 256 threads of four columns each.
//
// Macro: TYPE

#include "products/rows.cuh"

// Four columns of a row from 4 * quad on, rounded as the codecs round.
__device__ __forceinline__ void decode(float (&w)[4], const u8* weights, int row, int quad, int columns,
                                       int row_bytes) {
    const int tiles = (columns + 4 * TILE_QUADS - 1) / (4 * TILE_QUADS);
    const u8* tile = weights + ((u64)tiles * (row / TILE_ROWS) + quad / TILE_QUADS) * TILE_BYTES;
    const int r = row % 4, i = quad % QUADS;
    const int lane = row % TILE_ROWS / 4 * ACROSS + quad % TILE_QUADS / QUADS;
    if (TYPE == Q8_0) {
        const u32 word = ((const u32*)tile)[128 * i + lane * 4 + r];
        const float d = half_to_float(((const u16*)(tile + FACTORS))[lane / 2 * 4 + r]);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = d * (float)((int)(word >> FIELD * j & 255) - ZERO);
    } else if (TYPE == Q6_K) {
        const u32* words = (const u32*)tile + lane * 4 + r;
        const u32 word = i < 3 ? words[128 * i] : fourth(words[0], words[128], words[256]);
        const float d = half_to_float(((const u16*)(tile + FACTORS))[row % TILE_ROWS]);
        const float scale = d * (float)((int)tile[SCALES + lane * 4 + r] - 128);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = scale * (float)((int)(word >> FIELD * j & 63) - ZERO);
    } else if (TYPE == Q4_K) {
        const u32 word = ((const u32*)tile)[128 * (i / 2) + lane * 4 + r] >> 16 * (i % 2);
        const u32 bytes = ((const u32*)(tile + SCALES))[lane / 2];
        const u32 minima = mins(bytes, ((const u16*)(tile + MINS))[lane / 2]);
        const u16* factors = (const u16*)(tile + FACTORS) + row % TILE_ROWS * 2;
        const float scale = half_to_float(factors[0]) * (float)(bytes >> 8 * r & 63);
        const float minimum = half_to_float(factors[1]) * (float)(minima >> 8 * r & 63);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = __fsub_rn(__fmul_rn(scale, (float)(word >> FIELD * j & 15)), minimum);
    } else {
        const u8* from = weights + (u64)row_bytes * row;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = quad * 4 + j;  // inside the padded row
            if (TYPE == F32) w[j] = ((const float*)from)[column];
            if (TYPE == F16) w[j] = half_to_float(((const u16*)from)[column]);
            if (TYPE == BF16) w[j] = bfloat_to_float(((const u16*)from)[column]);
        }
    }
}

// Rows by their ids, or without ids the rows from `first` on, times `scale`: float32 [rows asked for, columns]. An id
// that is no row gives NaN.
extern "C" __global__ void __launch_bounds__(256)
    rows_decode(const u8* __restrict__ weights, int rows, int columns, int row_bytes, const int* ids, int first,
                float scale, float* out) {
    launch_dependents();
    wait_for_previous();
    const int quad = blockIdx.y * 256 + threadIdx.x, row = ids ? load_l2(ids + blockIdx.x) : first + (int)blockIdx.x;
    if (quad * 4 >= columns) return;
    float w[4];
    if ((u32)row < (u32)rows) {
        decode(w, weights, row, quad, columns, row_bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = __fmul_rn(w[j], scale);
    } else {
        for (int j = 0; j < 4; ++j) w[j] = __uint_as_float(0x7fffffff);
    }
    float* const to = out + (u64)columns * blockIdx.x + quad * 4;
    if (columns % 4 == 0) {
        *(float4*)to = make_float4(w[0], w[1], w[2], w[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (quad * 4 + j < columns) to[j] = w[j];
    }
}
