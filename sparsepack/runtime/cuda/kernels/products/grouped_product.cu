// Products of many positions with the experts that each of them has, in one launch (a grouped GEMM): superblocks of Q4_K become
// float16 in registers, on their way to the tensor cores, and experts without positions are not read.
//
//     blocks  [experts * tiles, columns, tile_bands, BLOCK_BYTES]   as zigzag.cuh draws it, an expert after the other
//     order   int64 [places]       the places, one for each expert of each position, by expert
//     ends    int64 [experts + 1]  where in `order` each expert's places begin, and the last one's end
//     x       float16 [places / each, columns], factor float32: as decoder/prefill.cu has them; row place / each is a place's
//     y       float32 [places, rows] = W x + bias [experts, rows] or null; places of no expert stay as they are
//
// Launch: grid (bands of an expert / BANDS, experts * parts), 128 BANDS threads. A block has BANDS bands of an expert and every
// parts-th of its groups of TOKENS places; four warps have 64 rows of a band each, whose nibbles are a word of a lane in
// each column: rows 64 p + 4 g .. + 3 and 32 further, g = lane / 4. So of the tensor cores' A, byte j of the words of 16
// columns is 16 rows, low nibbles the first eight of them.
//
//     ring in shared memory   | stage 0: 32 columns, COLUMN_PITCH apart; TOKENS rows of x, X_PITCH apart | stage 1 | .. STAGES - 1 |
//     behind it               | numbers of the TOKENS places | scales and minima of each warp's columns |
//
// Macros: BANDS 1 or 2, TOKENS 16, 32 or 64, STAGES; ALIGNED 1: rows of x begin at multiples of 16 bytes

#include "common/common.cuh"
#include "products/mma.cuh"

#ifndef BANDS
#define BANDS 2
#define TOKENS 16
#define STAGES 4
#define ALIGNED 1
#endif

static constexpr int BLOCK_BYTES = 144, THREADS = 128 * BANDS, COLUMNS = 32;
static constexpr int COLUMN_BYTES = BANDS * BLOCK_BYTES;
static constexpr int COLUMN_PITCH = COLUMN_BYTES + (BANDS == 2 ? 16 : 0);  // no two lanes' words in one bank
static constexpr int X_PITCH = 2 * COLUMNS + 16, TILES = TOKENS / 8;
static constexpr int STAGE_BYTES = COLUMNS * COLUMN_PITCH + TOKENS * X_PITCH;
typedef long long i64;

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_product(const u8* blocks, int columns, int rows, int tiles, int tile_bands, int gate_bands, float scale,
                    const i64* order, const i64* ends, int parts, int each, const u16* x, const float* factor,
                    float inverse, const float* bias, float* y) {
    extern __shared__ __align__(16) u8 ring[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int* const places = (int*)(ring + STAGES * STAGE_BYTES);           // [TOKENS], -1: none
    u16* const scales = (u16*)(places + TOKENS) + warp * 4 * COLUMNS;  // of pairs of columns, by low and high nibbles
    const int p = warp % 4, own_band = warp / 4;                       // of the block's
    const int expert = blockIdx.y / parts, part = blockIdx.y % parts;
    const int tile = blockIdx.x / (tile_bands / BANDS), member = blockIdx.x % (tile_bands / BANDS) * BANDS;
    launch_dependents();
    wait_for_previous();
    const int begin = (int)load_l2(ends + expert), end = (int)load_l2(ends + expert + 1);
    const int steps = (columns + COLUMNS - 1) / COLUMNS;
    blocks += (((u64)expert * tiles + tile) * columns * tile_bands + member) * BLOCK_BYTES;

    // The warp's band among those of the expert, gates before ups; one of zeros has none.
    const int half = gate_bands ? tile_bands / 2 : tile_bands, in_tile = member + own_band, up = in_tile >= half;
    const int of_part = tile * half + in_tile - up * half;
    const bool is_band = !gate_bands || of_part < gate_bands;
    const int first_row = (of_part + up * gate_bands) * 256 + 64 * p + 4 * g;

    for (int start = begin + part * TOKENS; start < end; start += parts * TOKENS) {
        __syncthreads();  // all have read the places before
        if (threadIdx.x < TOKENS)
            places[threadIdx.x] = start + (int)threadIdx.x < end ? (int)load_l2(order + start + threadIdx.x) : -1;
        __syncthreads();
        const auto load = [&](int step) {
            u8* const to = ring + step % STAGES * STAGE_BYTES;
            if (step < steps) {
                constexpr int PIECES = COLUMN_BYTES / 16;
                for (int i = threadIdx.x; i < COLUMNS * PIECES; i += THREADS) {
                    const int c = i / PIECES, column = step * COLUMNS + c;
                    const bool real = column < columns;
                    const u8* const from = blocks + (u64)(real ? column : 0) * tile_bands * BLOCK_BYTES;
                    copy_async(to + c * COLUMN_PITCH + i % PIECES * 16, from + i % PIECES * 16, real);
                }
                u8* const rows_of_x = to + COLUMNS * COLUMN_PITCH;
                constexpr int EACH = ALIGNED ? 8 : 1, OF_ROW = COLUMNS / EACH;  // numbers at a time
                for (int i = threadIdx.x; i < TOKENS * OF_ROW; i += THREADS) {
                    const int n = i / OF_ROW, column = step * COLUMNS + i % OF_ROW * EACH, place = places[n];
                    const bool real = place >= 0 && column < columns;
                    const u16* const from = x + (real ? (u64)(place / each) * columns + column : 0);
                    u8* const at = rows_of_x + n * X_PITCH + i % OF_ROW * EACH * 2;
                    if (ALIGNED)
                        copy_async(at, from, real);
                    else
                        *(u16*)at = real ? load_l2(from) : 0;
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
            __syncthreads();
            load(step + STAGES - 1);
            const u8* const stage = ring + step % STAGES * STAGE_BYTES;
            const u8* const band = stage + own_band * BLOCK_BYTES;
            const u8* const rows_of_x = stage + COLUMNS * COLUMN_PITCH;
            {
                // Of the lane's column, w = s (q - 8) + (8 s - minimum): so what rounding does to s and to the second summand
                // is small, the minimum being mostly half of what q spans. Of high nibbles q comes as 16 q.
                const uint4 h = *(const uint4*)(band + lane * COLUMN_PITCH);
                const float d = half_to_float(h.x & 0xffff) * scale, dmin = half_to_float(h.x >> 16) * scale;
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
                    const u8* const row = rows_of_x + (8 * n + g) * X_PITCH + 2 * c;
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
                const float up_again = load_l2(factor + place / each) * inverse;
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const int row = first_row + 32 * high;
                    float v[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        v[j] = sums[j][n][2 * high + e] * up_again;
                        if (bias && row + j < rows) v[j] += bias[(u64)expert * rows + row + j];
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
