// y = W xn for a matrix stored by rows (rows.cuh) and one to eight vectors; xn = x, or RMSNorm(x).
//
//     weights   | tiles of rows 0 .. 7: tile 0 | tile 1 | .. | tiles of rows 8 .. 15 | ..      drawn in rows.cuh
//     xn        float32 [BATCH, columns], in shared memory in the order in which lanes multiply it
//     y         float32 [BATCH, rows]
//
// Launch: grid: up to one block of 16 warps for each multiprocessor. A warp takes one row of tiles, 8 rows of the
// matrix (floats: 4), after the other; the tiles travel to its own ring in shared memory, STAGES - 1 ahead, the first
// ones while the previous kernel still runs. A row's sum runs over its tiles in order, then over the lanes: the same
// bits every run, whatever the grid. xn lies in shared memory; where all columns do not fit, it comes in pieces, and y
// holds the sum so far.
//
// Macros: TYPE; BATCH 1 .. 8, vectors; STAGES; CAPPED 1: y has a soft cap

#include "products/rows.cuh"

#ifndef CAPPED
#define CAPPED 0
#endif

static constexpr int WARPS = 16;
static constexpr int THREADS = WARPS * 32;
static constexpr int RING = STAGES * TILE_BYTES;  // of a warp

// The tiles of a warp in the order in which it takes them: how far they were sent for.
struct TilePipeline {
    int rows, row_bytes;  // row_bytes: of floats
    int first, last;      // tiles of this piece
    int row_tile, tile;
    const u8* from;  // this lane's first bytes of the next tile
    u64 jump;        // from behind the last tile of these rows to the warp's next rows

    __device__ __forceinline__ TilePipeline(const u8* weights, int rows, int tiles, int row_bytes, int first, int last)
        : rows(rows), row_bytes(row_bytes), first(first), last(last), tile(first) {
        const u64 row_tile_bytes = PACKED ? (u64)tiles * TILE_BYTES : (u64)row_bytes * TILE_ROWS;
        row_tile = threadIdx.x / 32 * gridDim.x + blockIdx.x;
        from = weights + row_tile_bytes * row_tile + (u64)first * TILE_STEP + threadIdx.x % 32 * 16;
        jump = row_tile_bytes * (gridDim.x * WARPS) - (u64)(last - first) * TILE_STEP;
    }

    // The next tile; none after the last.
    __device__ __forceinline__ void fetch(u8* slot) {
        const int lane = threadIdx.x % 32;
        if (row_tile * TILE_ROWS < rows) {
            slot += lane * 16;
            if (PACKED) {
#pragma unroll
                for (int i = 0; i < TILE_BYTES / 512; ++i) copy_async(slot + i * 512, from + i * 512);
                constexpr int WHOLE = TILE_BYTES / 512 * 512;
                if (lane < (TILE_BYTES - WHOLE) / 16) copy_async(slot + WHOLE, from + WHOLE);
            } else if (tile * 512 + lane * 16 < row_bytes) {
                const int below = rows - 1 - row_tile * TILE_ROWS;
#pragma unroll
                for (int i = 0; i < TILE_ROWS; ++i)
                    copy_async(slot + i * 512, from + (u64)(u32)min(i, below) * row_bytes);
            }
            from += TILE_STEP;
            if (++tile == last) {
                tile = first;
                row_tile += gridDim.x * WARPS;
                from += jump;
            }
        }
        copy_commit();
    }
};

__device__ __forceinline__ float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ u32 component(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Byte i of a word, less `zero`, times 2^85.
__device__ __forceinline__ float unpacked(u32 bytes, int i, u32 zero) {
    const u32 base = (108 + 127) << 23;  // 2^108, whose last bit counts 2^85
    return __uint_as_float(__byte_perm(bytes, base, 0x7650 | i)) - __uint_as_float(base | zero);
}

// sums[b][r] += W xn over a lane's part of a tile. x: float4 [BATCH][QUADS][ACROSS], from the lane's own on.
// x_sums: float [BATCH][16], likewise.
__device__ __forceinline__ void multiply(float (&sums)[BATCH][4], const u8* tile, const float4* x,
                                         const float* x_sums) {
    const int lane = threadIdx.x % 32;
    const uint4* planes = (const uint4*)tile + lane;
    u32 words[4][4];  // [row][quad]
    uint4 p[4];
#pragma unroll
    for (int i = 0; i < TILE_BYTES / 512; ++i) p[i] = planes[32 * i];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (TYPE == Q6_K) {
#pragma unroll
            for (int i = 0; i < 3; ++i) words[r][i] = component(p[i], r);
            words[r][3] = fourth(words[r][0], words[r][1], words[r][2]);
        } else if (TYPE == Q4_K) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[r][i] = component(p[i / 2], r) >> 16 * (i % 2);
        } else if (TYPE == Q8_0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[r][i] = component(p[i], r);
        }
    }

    float dots[BATCH][4];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int r = 0; r < 4; ++r) dots[b][r] = !PACKED ? sums[b][r] : ZERO ? x_sums[b * 16] : 0.0f;

#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        float w[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (PACKED) w[r][j] = __uint_as_float(field(words[r][i], j));
                if (TYPE == F32) w[r][j] = __uint_as_float(component(p[r], j));
                if (TYPE == F16 || TYPE == BF16) {
                    const u16 half = (u16)(component(p[r], 2 * i + j / 2) >> 16 * (j % 2));
                    w[r][j] = TYPE == F16 ? half_to_float(half) : bfloat_to_float(half);
                }
            }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const float4 v = x[b * TILE_QUADS + i * ACROSS];
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) dots[b][r] = fmaf(w[r][j], component(v, j), dots[b][r]);
        }
    }

    uint4 factors = {};
    u32 scales = 0, minima = 0;
    if (TYPE == Q8_0) {
        const uint2 d = ((const uint2*)(tile + FACTORS))[lane / 2];
        factors = {d.x, d.x >> 16, d.y, d.y >> 16};
    } else if (TYPE == Q6_K) {
        const uint2 d = ((const uint2*)(tile + FACTORS))[lane / 16];
        factors = {d.x, d.x >> 16, d.y, d.y >> 16};
        scales = ((const u32*)(tile + SCALES))[lane];
    } else if (TYPE == Q4_K) {
        factors = ((const uint4*)(tile + FACTORS))[lane / 16];
        const u32 bytes = ((const u32*)(tile + SCALES))[lane / 2];
        scales = bytes & 0x3f3f3f3f;
        minima = mins(bytes, ((const u16*)(tile + MINS))[lane / 2]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (PACKED) {
            const float of_block = TYPE == Q8_0 ? 0x1p85f : unpacked(scales, r, TYPE == Q6_K ? 128 : 0);
            const float scale = half_to_float((u16)component(factors, r)) * of_block;
            // x_sums have 2^-85 for the mins.
            const float minimum =
                TYPE == Q4_K ? half_to_float((u16)(component(factors, r) >> 16)) * unpacked(minima, r, 0) : 0;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                sums[b][r] = fmaf(scale, dots[b][r], sums[b][r]);
                if (TYPE == Q4_K) sums[b][r] = fmaf(-minimum, x_sums[b * 16], sums[b][r]);
            }
        } else {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) sums[b][r] = dots[b][r];
        }
    }
}

// Four of a row's columns; zeros beyond the last.
__device__ __forceinline__ float4 four(const float* row, int column, int columns) {
    if (WHOLE_TILES) return load_l2((const float4*)(row + column));
    if (PACKED) return column < columns ? load_l2((const float4*)(row + column)) : make_float4(0, 0, 0, 0);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = column + j < columns ? load_l2(row + column + j) : 0;
    return make_float4(v[0], v[1], v[2], v[3]);
}

// 1 / sqrt(mean(x^2) + eps) of every vector. inverse: float [BATCH]; scratch: float [BATCH][WARPS]; both shared.
__device__ __forceinline__ void inverse_norms(float* inverse, float* scratch, const float* x, int columns, float eps) {
#pragma unroll 1
    for (int b = 0; b < BATCH; ++b) {
        float sum = 0;
#pragma unroll 4
        for (int k = threadIdx.x * 4; k < columns; k += THREADS * 4) {
            const float4 v = four(x + (u64)columns * b, k, columns);
            sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) scratch[b * WARPS + threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x < BATCH) {
        float sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += scratch[threadIdx.x * WARPS + w];
        inverse[threadIdx.x] = 1 / sqrtf(sum / columns + eps);
    }
    __syncthreads();
}

// Columns [first, first + 4 quads) of every vector as `multiply` reads them, times inverse[b] * norm if there is one.
// to: float4 [tiles][BATCH][QUADS][ACROSS]; sums: float [tiles][BATCH][16].
__device__ __forceinline__ void fill(float4* to, float* sums, const float* x, int first, int quads, int columns,
                                     const float* norm, const float* inverse) {
#pragma unroll 1
    for (int b = 0; b < BATCH; ++b) {
        const float factor = norm ? inverse[b] : 1;
#pragma unroll 4
        for (int i = threadIdx.x; i < quads; i += THREADS) {  // whole warps: quads is a multiple of 32
            const int column = first + 4 * i;
            float4 v = four(x + (u64)columns * b, column, columns);
            if (norm) {
                v.x *= factor * (WHOLE_TILES || column < columns ? norm[column] : 0);
                v.y *= factor * (WHOLE_TILES || column + 1 < columns ? norm[column + 1] : 0);
                v.z *= factor * (WHOLE_TILES || column + 2 < columns ? norm[column + 2] : 0);
                v.w *= factor * (WHOLE_TILES || column + 3 < columns ? norm[column + 3] : 0);
            }
            const int of = i / TILE_QUADS * BATCH + b, lane = i % TILE_QUADS / QUADS;
            if (PACKED) {
                float sum = (v.x + v.y) + (v.z + v.w);
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                // What dots begin with, since q is too large by ZERO; or what mins are multiplied by.
                if (i % 4 == 0) sums[of * 16 + lane] = sum * (ZERO ? -ZERO * 0x1p-85f : 0x1p-85f);
                v.x *= 0x1p64f;
                v.y *= 0x1p64f / (1 << field_shift(1));
                v.z *= 0x1p64f / (1 << field_shift(2));
                v.w *= 0x1p64f / (1 << field_shift(3));
            }
            to[of * TILE_QUADS + i % QUADS * ACROSS + lane] = v;
        }
    }
}

// Orders by value, then by the lower row; a NaN before all else.
__device__ __forceinline__ u64 candidate(float value, int row) {
    u32 bits = __float_as_uint(value + 0.0f);  // -0 equals 0
    if (value != value) bits = 0x7fffffff;
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000) << 32 | ~(u32)row;
}

// y           float32 [BATCH, rows]
// x           float32 [BATCH, columns]
// norm        float32 [columns]: RMSNorm comes first; or null
// columns     of Q4_K and Q6_K: a multiple of 256; of Q8_0: of 32
// row_bytes   of floats
// piece       tiles of a row whose x fits in shared memory
// cap         where CAPPED, y becomes cap tanh(y / cap)
// candidates  u64 [BATCH, blocks]: the best row of each block, as sampling.cu reads it; or null
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    rows_product(const u8* __restrict__ weights, int rows, int columns, int row_bytes, const float* x,
                 const float* __restrict__ norm, float eps, int piece, float* y, float cap, u64* candidates) {
    launch_dependents();
    extern __shared__ __align__(16) u8 shared[];
    u8* const ring = shared + threadIdx.x / 32 * RING;
    u64* const scratch = (u64*)(shared + WARPS * RING);  // [BATCH][WARPS]
    float4* const xs = (float4*)(scratch + BATCH * WARPS);
    float* const x_sums = (float*)(xs + piece * BATCH * TILE_QUADS);

    const int across = threadIdx.x % ACROSS;
    const int tiles = (columns + 4 * TILE_QUADS - 1) / (4 * TILE_QUADS);
    float* const inverse = (float*)scratch + BATCH * WARPS;
    u64 best[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) best[b] = 0;

    for (int first = 0; first < tiles; first += piece) {
        const int last = min(first + piece, tiles);
        TilePipeline pipeline(weights, rows, tiles, row_bytes, first, last);
        for (int i = 0; i < STAGES - 1; ++i) pipeline.fetch(ring + i * TILE_BYTES);
        if (first == 0) {
            if (norm) {
#pragma unroll 1
                for (int k = threadIdx.x * 32; k < columns; k += THREADS * 32) prefetch_l2(norm + k);
            }
            wait_for_previous();
            if (norm) inverse_norms(inverse, (float*)scratch, x, columns, eps);
        }
        fill(xs, x_sums, x, first * 4 * TILE_QUADS, (last - first) * TILE_QUADS, columns, norm, inverse);
        __syncthreads();

        int now = 0, free = (STAGES - 1) * TILE_BYTES;
        const int step = gridDim.x * WARPS;
        for (int row_tile = threadIdx.x / 32 * gridDim.x + blockIdx.x; row_tile * TILE_ROWS < rows; row_tile += step) {
            float sums[BATCH][4] = {};
            const float4* from = xs + across;
            const float* from_sums = x_sums + across;
            for (int tile = first; tile < last; ++tile) {
                copy_wait<STAGES - 2>();
                __syncwarp();  // all lanes' copies are here, and all have done with `free`
                pipeline.fetch(ring + free);
                if (PACKED || tile * 512 + across * 16 < row_bytes) multiply(sums, ring + now, from, from_sums);
                from += BATCH * TILE_QUADS;
                from_sums += BATCH * 16;
                free = now;
                now = now + TILE_BYTES == RING ? 0 : now + TILE_BYTES;
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int r = 0; r < 4; ++r)
#pragma unroll
                    for (int apart = ACROSS / 2; apart; apart /= 2)
                        sums[b][r] += __shfl_xor_sync(ALL_LANES, sums[b][r], apart);
            const int row = row_tile * TILE_ROWS + threadIdx.x % 32 / ACROSS * 4 + across;
            if (across < 4 && row < rows) {
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    float* const to = y + (u64)rows * b + row;
                    float sum =
                        across < 2 ? (across == 0 ? sums[b][0] : sums[b][1]) : (across == 2 ? sums[b][2] : sums[b][3]);
                    if (first) sum += *to;
                    if (CAPPED && last == tiles) sum = cap * tanhf(sum / cap);
                    *to = sum;
                    if (last == tiles) best[b] = max(best[b], candidate(sum, row));
                }
            }
        }
        __syncthreads();  // x and the rings may be overwritten
    }

    if (candidates) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            for (int apart = 16; apart; apart /= 2) best[b] = max(best[b], __shfl_xor_sync(ALL_LANES, best[b], apart));
            if (threadIdx.x % 32 == 0) scratch[b * WARPS + threadIdx.x / 32] = best[b];
        }
        __syncthreads();
        if (threadIdx.x < BATCH) {
            u64 top = 0;
            for (int w = 0; w < WARPS; ++w) top = max(top, scratch[threadIdx.x * WARPS + w]);
            candidates[threadIdx.x * gridDim.x + blockIdx.x] = top;
        }
    }
}
