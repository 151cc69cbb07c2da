// Products of many positions with superblocks of Q4_K, which become float16 in registers, on their way to the tensor cores: with
// the experts that each position has, in one launch (a grouped GEMM; experts without positions are not read), or with one
// matrix.
//
//     blocks  [experts * tiles, columns, tile_bands, BLOCK_BYTES]   as zigzag.cuh draws it, an expert after the other
//     order   int32 [places]       the places, one for each expert of each position, by expert (expert_order.cu); or null: one
//                                  matrix, and places are positions
//     ends    int32 [experts + 1]  where in `order` each expert's places begin, and the last one's end
//     x       float16 [places / each, columns], factor float32: as decoder/prefill.cu has them; row place / each is a place's
//     y       float32 [splits, places, rows]   W x + bias [experts, rows] or null; where factor is null, sums of x as it is;
//                                  of a split some columns. Places of no expert stay as they are
//     row_scale  float32 [bands * 256] or null: what rows are multiplied by
//
// Launch: grid (bands of an expert / BANDS * splits, experts * parts), 128 BANDS threads. A block has BANDS bands of an expert,
// a split of its columns, and every parts-th of its groups of TOKENS places; four warps have 64 rows of a band each, whose
// nibbles are a word of a lane in each column: rows 64 p + 4 g .. + 3 and 32 further, g = lane / 4. So of the tensor
// cores' A, byte j of the words of 16 columns is 16 rows, low nibbles the first eight of them.
//
//     ring in shared memory   | stage 0: 32 columns, COLUMN_PITCH apart; TOKENS rows of x, X_PITCH apart | stage 1 | .. STAGES - 1 |
//     behind it               | mbarriers of the stages | the TOKENS places | their rows of x | scales and minima of each warp's columns |
//
// From sm_90 on the copy engine (TMA) brings the columns of a stage in one piece, where a block has all bands of a tile.
//
// Macros: BANDS 1 or 2, TOKENS 16, 32 or 64, STAGES; ALIGNED 1: rows of x begin at multiples of 16 bytes;
// WHOLE_TILES 1: BANDS are those of a tile; BULK 0: as before sm_90

#include "common/bulk.cuh"
#include "common/common.cuh"
#include "products/mma.cuh"
#if BULK
#include "common/tensor_copy.cuh"
#endif

#ifndef BANDS
#define BANDS 2
#define TOKENS 16
#define STAGES 4
#define ALIGNED 1
#define WHOLE_TILES 1
#endif
static constexpr bool COPY_ENGINE = BULK && WHOLE_TILES;

static constexpr int BLOCK_BYTES = 144, THREADS = 128 * BANDS, COLUMNS = 32;
static constexpr int COLUMN_BYTES = BANDS * BLOCK_BYTES;
// Where pieces are copied one by one, no two lanes' words lie in one bank.
static constexpr int COLUMN_PITCH = COLUMN_BYTES + (BANDS == 2 && !COPY_ENGINE ? 16 : 0);
static constexpr int X_PITCH = 2 * COLUMNS + 16, TILES = TOKENS / 8;
static constexpr int STAGE_BYTES = COLUMNS * COLUMN_PITCH + TOKENS * X_PITCH;

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_product(const u8* blocks, int columns, int rows, int tiles, int tile_bands, int gate_bands, float scale,
                    const int* order, const int* ends, int places_of_all, int parts, int each, int splits, const u16* x,
                    const float* factor, float inverse, const float* row_scale, const float* bias, float* y) {
    extern __shared__ __align__(16) u8 ring[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u64* const full = (u64*)(ring + STAGES * STAGE_BYTES);
    int *const places = (int*)(full + STAGES), *const rows_of_x = places + TOKENS;  // -1: none
    u16* const scales =
        (u16*)(rows_of_x + TOKENS) + warp * 4 * COLUMNS;  // of pairs of columns, by low and high nibbles
    const int p = warp % 4, own_band = warp / 4;          // of the block's
    const int expert = blockIdx.y / parts, part = blockIdx.y % parts;
    const int pair = blockIdx.x / splits, split = blockIdx.x % splits;
    const int tile = pair / (tile_bands / BANDS), member = pair % (tile_bands / BANDS) * BANDS;
#if BULK
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) barrier_init(full + stage, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#endif
    launch_dependents();
    wait_for_previous();
    const int begin = order ? load_l2(ends + expert) : 0, end = order ? load_l2(ends + expert + 1) : places_of_all;
    const int of_all = (columns + COLUMNS - 1) / COLUMNS, first_step = split * of_all / splits;
    const int steps = (split + 1) * of_all / splits - first_step;
    const int first_column = first_step * COLUMNS, last_column = min(columns, (first_step + steps) * COLUMNS);
    blocks += ((((u64)expert * tiles + tile) * columns + first_column) * tile_bands + member) * BLOCK_BYTES;
    y += (u64)split * places_of_all * rows;

    // The warp's band among those of the expert, gates before ups; one of zeros has none.
    const int half = gate_bands ? tile_bands / 2 : tile_bands, in_tile = member + own_band, up = in_tile >= half;
    const int of_part = tile * half + in_tile - up * half;
    const bool is_band = !gate_bands || of_part < gate_bands;
    const int first_row = (of_part + up * gate_bands) * 256 + 64 * p + 4 * g;

    int before = 0;  // steps of earlier groups
    for (int start = begin + part * TOKENS; start < end; start += parts * TOKENS, before += steps) {
        __syncthreads();  // all have read the places before
        if (threadIdx.x < TOKENS) {
            const int at = start + threadIdx.x, place = at >= end ? -1 : order ? load_l2(order + at) : at;
            places[threadIdx.x] = place, rows_of_x[threadIdx.x] = place < 0 ? -1 : place / each;
        }
        __syncthreads();
        constexpr int X_PIECES = (4 * TOKENS + THREADS - 1) / THREADS;  // of 16 bytes, of a thread
        const u16* from_x[X_PIECES];
#pragma unroll
        for (int i = 0; i < X_PIECES; ++i) {
            const int n = (int)threadIdx.x / 4 + i * (THREADS / 4), row = n < TOKENS ? rows_of_x[n] : -1;
            from_x[i] = row < 0 ? nullptr : x + (u64)row * columns + first_column + threadIdx.x % 4 * 8;
        }
        const auto load = [&](int step) {
            u8* const to = ring + (before + step) % STAGES * STAGE_BYTES;
            const int column = first_column + step * COLUMNS, left = last_column - column;
            const u8* const from = blocks + (u64)step * COLUMNS * tile_bands * BLOCK_BYTES;
            if (step < steps) {
#if BULK
                if (COPY_ENGINE && threadIdx.x == 0) {
                    u64* const barrier = full + (before + step) % STAGES;
                    const u32 bytes = min(left, COLUMNS) * COLUMN_BYTES;
                    expect_bytes(barrier, bytes);
                    copy_bulk(shared_address(to), from, bytes, barrier);
                }
#endif
                if (!COPY_ENGINE) {
                    constexpr int PIECES = COLUMN_BYTES / 16;
                    for (int i = threadIdx.x; i < min(left, COLUMNS) * PIECES; i += THREADS)
                        copy_async(to + i / PIECES * COLUMN_PITCH + i % PIECES * 16,
                                   from + i / PIECES * tile_bands * BLOCK_BYTES + i % PIECES * 16);
                }
                u8* const x_in_stage = to + COLUMNS * COLUMN_PITCH;
                if (ALIGNED) {
#pragma unroll
                    for (int i = 0; i < X_PIECES; ++i) {
                        const int n = (int)threadIdx.x / 4 + i * (THREADS / 4), c = threadIdx.x % 4 * 8;
                        const bool real = from_x[i] && c < left;
                        const u16* const number = real ? from_x[i] + step * COLUMNS : x;
                        if (n < TOKENS) copy_async(x_in_stage + n * X_PITCH + 2 * c, number, real);
                    }
                } else {
                    for (int i = threadIdx.x; i < TOKENS * COLUMNS; i += THREADS) {
                        const int n = i / COLUMNS, c = i % COLUMNS, row = rows_of_x[n];
                        const bool real = row >= 0 && c < left;
                        const u16* const number = x + (real ? (u64)row * columns + column + c : 0);
                        *(u16*)(x_in_stage + n * X_PITCH + 2 * c) = real ? load_l2(number) : 0;
                    }
                }
            }
            copy_commit();
        };
        float sums[4][TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STAGES - 1; ++step) load(step);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            copy_wait<STAGES - 2>();
#if BULK
            if (COPY_ENGINE) barrier_wait(full + (before + step) % STAGES, (before + step) / STAGES % 2);
#endif
            __syncthreads();
            load(step + STAGES - 1);
            const u8* const stage = ring + (before + step) % STAGES * STAGE_BYTES;
            const u8* const band = stage + own_band * BLOCK_BYTES;
            const u8* const x_in_stage = stage + COLUMNS * COLUMN_PITCH;
            {
                // Of the lane's column, w = s (q - 8) + (8 s - minimum): so what rounding does to s and to the second summand
                // is small, the minimum being mostly half of what q spans. Of high nibbles q comes as 16 q.
                const uint4 h = *(const uint4*)(band + lane * COLUMN_PITCH);
                const bool is = first_column + step * COLUMNS + lane < last_column;  // else anything lies there
                const float d = is ? half_to_float(h.x & 0xffff) * scale : 0;
                const float dmin = is ? half_to_float(h.x >> 16) * scale : 0;
                const u32 bits = p == 0   ? h.y
                                 : p == 1 ? h.y >> 24 | h.z << 8
                                 : p == 2 ? h.z >> 16 | h.w << 16
                                          : h.w >> 8;
                u16* const to = scales + lane / 2 * 4 + lane % 2;
                const float low = d * (float)(bits & 63), high = d * (float)(bits >> 12 & 63);
                to[0] = float_to_half(low);
                to[2] = float_to_half(8 * low - dmin * (float)(bits >> 6 & 63));
                to[2 * COLUMNS] = float_to_half(high * 0.0625f);
                to[2 * COLUMNS + 2] = float_to_half(8 * high - dmin * (float)(bits >> 18 & 63));
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < COLUMNS; k += 16) {
                const int c = k + 2 * t;  // and the next; these 8 further
                u32 words[4], b[TILES][2];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = *(const u32*)(band + (c + i / 2 * 8 + i % 2) * COLUMN_PITCH + 16 + 32 * p + 4 * g);
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const u8* const row = x_in_stage + (8 * n + g) * X_PITCH + 2 * c;
                    b[n][0] = *(const u32*)row, b[n][1] = *(const u32*)(row + 16);
                }
                uint2 of[2][2];  // of low and high nibbles, of both pairs of columns
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    of[i / 2][i % 2] = *(const uint2*)(scales + i / 2 * 2 * COLUMNS + (c / 2 + i % 2 * 4) * 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 bytes = j | j << 4 | (4 + j) << 8 | (4 + j) << 12;
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32 both = __byte_perm(words[2 * i], words[2 * i + 1], bytes);
                        // 1024 with a number in its last bits, less 1032, or 1152 = 1024 + 16 * 8
                        const u32 low = add_half2((both & 0x000f000f) | 0x64006400, 0xe408e408);
                        const u32 high = add_half2((both & 0x00f000f0) | 0x64006400, 0xe480e480);
                        a[2 * i] = fma_half2(low, of[0][i].x, of[0][i].y);
                        a[2 * i + 1] = fma_half2(high, of[1][i].x, of[1][i].y);
                    }
#pragma unroll
                    for (int n = 0; n < TILES; ++n) mma(sums[j][n], a, b[n]);
                }
            }
        }
        copy_wait<0>();
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int place = places[8 * n + 2 * t + e];
                if (place < 0 || !is_band) continue;
                const float up_again = factor ? load_l2(factor + rows_of_x[8 * n + 2 * t + e]) * inverse : 1;
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const int row = first_row + 32 * high;
                    float v[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        v[j] = sums[j][n][2 * high + e] * up_again;
                        if (row + j >= rows) continue;
                        if (row_scale) v[j] *= row_scale[row + j];
                        if (bias && !split) v[j] += bias[(u64)expert * rows + row + j];
                    }
                    float* const to = y + (u64)place * rows + row;
                    if (rows % 4 == 0 && row < rows) {
                        *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
                        continue;
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (row + j < rows) to[j] = v[j];
                }
            }
        }
    }
}
