// How a warp of zigzag_batch.cu multiplies k_tiles of Q6_P, on the tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = nibbles of planes 1 to 3, and two bits of planes 4 and 5, masked as they lie in
//                        bytes: float16 with nothing but their lowest bits, times 2^-24
//                    B [16 columns, 8]       = x S of a group of 64 rows, n = input, in float16
//     minima         A [group, 16 columns] = m - half, the same B
//
// Of up to four inputs, k is 8 columns of two groups, 2 p and 2 p + 1, and n is input n % 4 of group 2 p + n / 4: bytes of a word
// become float16 without another column's, and the lowest bits need no mask.
//
// Lane (g, t) = (lane / 4, lane % 4) has rows 8 g .. 8 g + 7 of each group, of columns t, t + 4, t + 8 and t + 12, and computes
// B for input g. Before, it has a column, lane % 16, and two groups, whose S and m - half it leaves for all.

#pragma once

#include "products/zigzag.cuh"

static constexpr bool FEW = INPUTS <= 4;

struct BatchAccumulator {
    // Of each group, of rows f = 0 .. 3; where FEW of p, of f = 0 and 1 together, of 0, of 2 and 3 together, of 2.
    float c[FEW ? 2 : 4][4][4];
    float minimum[2][4];  // row n of A is group n's, or p's; of every second product
};

// Bytes of a warp for each t, of columns t, t + 4, .. : S of all groups, 16 a column; m - half in float16, 8 a
// group, or where FEW of two groups 4 a column; masks of planes
// 2 and 3, of 4 and 5, 4 a column each.
static constexpr int PITCH_OF_SCRATCH = 4 * 16 + 4 * 8 + 2 * 16 + 16, SCRATCH = 4 * PITCH_OF_SCRATCH / 4;
// Of the largest x times `largest_d` (products/zigzag.py), the largest x S is less than the 2^LARGER_BITS-fold.
static constexpr int LARGER_BITS = 2;

// What a lane adds to where stages, the list and the warp's scratch begin.
struct LaneOffsets {
    int column, header;       // the lane's column in its k_tile, and its header
    int first, planes, rest;  // of column t: words of plane 1, of plane 2, of what lies elsewhere
    int put_scale, put_centre, put_mask;
    int take;
    u32 own[4];  // 1 of the group, or p, that the lane has of minima, twice in float16

    __device__ __forceinline__ explicit LaneOffsets(const PlanePlaces& places) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, c = lane % K_TILE, pair = lane / K_TILE;
        column = kept(c);
        header = kept(c * PITCH + places.header(pair));
        first = kept(t * PITCH + places.first() + g * 8);
        planes = kept(t * PITCH + places.plane(2) + g * 4);
        rest = PLANES_DIVIDED ? kept(K_TILE * PITCH + t * REST_PITCH + places.band * PLANE_BYTES + g * 4) : 0;
        put_scale = kept(c % 4 * PITCH_OF_SCRATCH + c / 4 * 16 + pair * 8);
        put_centre = kept(c % 4 * PITCH_OF_SCRATCH + 64 + pair * 16 + c / 4 * (FEW ? 4 : 2));
        put_mask = kept(c % 4 * PITCH_OF_SCRATCH + 96 + pair * 16 + c / 4 * 4);
        take = kept(t * PITCH_OF_SCRATCH);
#pragma unroll
        for (int group = 0; group < 4; ++group) own[group] = g == group ? 0x3c003c00 : 0;
    }
};

// B, of FEW for each p and 8 columns, else for each group; adds up minima. x: of the lane's input, columns t, t + 4, ..
typedef u32 BatchFactors[4][2];
__device__ __forceinline__ void factors(BatchAccumulator& sums, const float (&x)[4], const LaneOffsets& lane,
                                        const u8* taken, BatchFactors& b) {
    const uint4 centres[2] = {*(const uint4*)(taken + 64), *(const uint4*)(taken + 80)};
    if constexpr (FEW) {
        const int second = threadIdx.x % 32 / 16;
        const u32 place = second ? 0x10000 : 1;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* scales = (const float*)(taken + 16 * j) + second;
#pragma unroll
            for (int p = 0; p < 2; ++p) b[2 * p + j / 2][j % 2] = pack_half2(x[j] * scales[2 * p], 0) * place;
        }
    } else {
        float of[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 scales = *(const float4*)(taken + 16 * j);
            of[0][j] = x[j] * scales.x, of[1][j] = x[j] * scales.y;
            of[2][j] = x[j] * scales.z, of[3][j] = x[j] * scales.w;
        }
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            b[group][0] = pack_half2(of[group][0], of[group][1]);
            b[group][1] = pack_half2(of[group][2], of[group][3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two columns' words of a p, or of a group
        const uint4& of = centres[i / 2];
        const u32 own = lane.own[FEW ? i / 2 : i];
        const u32 row[4] = {mul_half2(i % 2 ? of.z : of.x, own), 0, mul_half2(i % 2 ? of.w : of.y, own), 0};
        mma(sums.minimum[i % 2], row, b[i]);
    }
}

// Of columns t + 8 m and t + 8 m + 4, of two words' rows each, bytes 2 p and 2 p + 1; or of all four columns, a group's byte.
__device__ __forceinline__ void bytes_of(const u32 (&words)[2][4], int i, u32 (&a)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32(&row)[4] = words[j % 2];
        a[j] = FEW ? __byte_perm(row[i % 2 * 2 + j / 2], 0, i / 2 ? 0x4342 : 0x4140)
                   : __byte_perm(row[j / 2 * 2], row[j / 2 * 2 + 1], i * 0x11 | (4 + i) * 0x1100);
    }
}
template <u32 MASK>
__device__ __forceinline__ void mma_masked(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const u32 rows[4] = {a[0] & MASK, a[1] & MASK, a[2] & MASK, a[3] & MASK};
    mma(c, rows, b);
}

// Add 16 columns. stage: of the k_tile; index: of its columns; value: of the lane's input there; scale: a power of two
// that brings x S into the range of float16, or 0; scratch: the warp's; has_rest: of a divided matrix, whether the ring has the
// rest of the lane's column.
__device__ __forceinline__ void multiply(BatchAccumulator& sums, const u8* stage, const LaneOffsets& lane,
                                         const int* index, const float* value, float scale, u8* scratch,
                                         bool has_rest) {
    const int level = DENSE ? LEVELS : (u32)index[lane.column] >> LEVEL_SHIFT;
    const int present = has_rest || !PLANES_DIVIDED ? level : min(level, CARD_LEVELS);
    const u32 header = *(const u32*)(stage + lane.header);
    const float ratio = ratio_of(level), exact = level == 1 ? 16.0f / 15 : 1.0f, middle = middle_of(level);
    const u32 centres = pack_half2(centre_of(header, 0, middle) * exact, centre_of(header, 1, middle) * exact);
    __syncwarp();
    *(float2*)(scratch + lane.put_scale) = make_float2(scale_of(header, 0) * ratio, scale_of(header, 1) * ratio);
    if constexpr (FEW) {
        *(u32*)(scratch + lane.put_centre) = centres;
    } else {
        *(u16*)(scratch + lane.put_centre) = (u16)centres;
        *(u16*)(scratch + lane.put_centre + 8) = (u16)(centres >> 16);
    }
    if (!ALL_PLANES) *(u32*)(scratch + lane.put_mask) = mask_of(present, threadIdx.x & K_TILE ? 4 : 2);
    __syncwarp();
    const u8* taken = scratch + lane.take;
    BatchFactors b;
    {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = value[threadIdx.x % 4 + 4 * j] * scale;
        factors(sums, x, lane, taken, b);
    }
    const auto pairs = [&](int j, int number, u32 mask) {
        const auto at = [&](int plane) { return stage + plane_in_stage(lane.planes, lane.rest, plane, j); };
        return TwoPlanes(at(number), at(number + 1), ALL_PLANES ? ALL_LANES : mask);
    };
    // Of level 0, whatever lies there: its inputs are zero.
    {
        const uint4 mask = *(const uint4*)(taken + 96);
        const u32 of[4] = {mask.x, mask.y, mask.z, mask.w};
        u32 upper[2][4], lower[2][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 first = *(const uint2*)(stage + lane.first + 4 * j * PITCH);
            const TwoPlanes next = pairs(j, 2, of[j]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                upper[half][j] = first_nibbles(half ? first.y : first.x, next.halves[half]);
                lower[half][j] = last_nibbles(half ? first.y : first.x, next.halves[half]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float (&c)[4][4] = sums.c[FEW ? i / 2 : i];
            u32 one[4], two[4];
            bytes_of(upper, i, one), bytes_of(lower, i, two);
            if constexpr (FEW) {
                mma(c[0], one, b[i]), mma_masked<0x00f000f0>(c[1], one, b[i]);
                mma(c[2], two, b[i]), mma_masked<0x00f000f0>(c[3], two, b[i]);
            } else {
                mma_masked<0x00f000f0>(c[0], one, b[i]), mma_masked<0x000f000f>(c[1], one, b[i]);
                mma_masked<0x00f000f0>(c[2], two, b[i]), mma_masked<0x000f000f>(c[3], two, b[i]);
            }
        }
    }
    if (!__any_sync(ALL_LANES, present > 3)) return;
    const uint4 mask = *(const uint4*)(taken + 112);
    const u32 of[4] = {mask.x, mask.y, mask.z, mask.w};
    u32 both[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const TwoPlanes last = pairs(j, 4, of[j]);
        both[0][j] = last.halves[0], both[1][j] = last.halves[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // As parts of nibbles: rows 0 and 2 of high ones, the others of low ones.
        const u32 quarter[2] = {mul_half2(b[i][0], 0x34003400), mul_half2(b[i][1], 0x34003400)};
        const u32 sixteenth[2] = {mul_half2(b[i][0], 0x2c002c00), mul_half2(b[i][1], 0x2c002c00)};
        float (&c)[4][4] = sums.c[FEW ? i / 2 : i];
        u32 rows[4];
        bytes_of(both, i, rows);
        if constexpr (FEW) {
            mma_masked<0x00cc00cc>(c[0], rows, sixteenth), mma_masked<0x00c000c0>(c[1], rows, sixteenth);
            mma_masked<0x00330033>(c[2], rows, quarter), mma_masked<0x00300030>(c[3], rows, quarter);
        } else {
            mma_masked<0x00c000c0>(c[0], rows, sixteenth), mma_masked<0x000c000c>(c[1], rows, sixteenth);
            mma_masked<0x00300030>(c[2], rows, quarter), mma_masked<0x00030003>(c[3], rows, quarter);
        }
    }
}

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PADDED_ROWS]. inverse: of the scale of the
// lane's input.
__device__ __forceinline__ void store_sums(const BatchAccumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int input = FEW ? t % 2 * 2 + n : 2 * t + n;
        const float factor = __shfl_sync(ALL_LANES, inverse, input * 4);
#pragma unroll
        for (int i = 0; i < (FEW ? 2 : 4); ++i) {
            const float mine = FEW ? sums.minimum[0][n] + sums.minimum[1][n] : sums.minimum[i % 2][n];
            const float minimum = __shfl_sync(ALL_LANES, mine, i * 4 + t);
            if (input >= INPUTS) continue;
            const int group = FEW ? 2 * i + t / 2 : i;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto sum = [&](int f) { return sums.c[i][f][2 * half + n]; };
                const float of[4] = {FEW ? sum(1) : sum(0), FEW ? sum(0) - sum(1) : sum(1), FEW ? sum(3) : sum(2),
                                     FEW ? sum(2) - sum(3) : sum(3)};
                *(float4*)(rows + padded_index(input * BAND_ROWS + 64 * group + 8 * g + 4 * half)) =
                    make_float4((of[0] * NIBBLE + minimum) * factor, (of[1] * (16 * NIBBLE) + minimum) * factor,
                                (of[2] * NIBBLE + minimum) * factor, (of[3] * (16 * NIBBLE) + minimum) * factor);
            }
        }
    }
}
