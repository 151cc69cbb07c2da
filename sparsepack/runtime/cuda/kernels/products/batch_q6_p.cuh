// How a warp of zigzag_batch.cu multiplies k_tiles of Q6_P, on the tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = nibbles of planes 1 to 3, and two bits of planes 4 and 5, masked as they lie in
//                        bytes: float16 with nothing but their lowest bits, times 2^-24
//                    B [16 columns, 8]       = x S of a group of 64 rows, n = input, in float16
//     minima         A [group, 16 columns] = m - half, the same B
//
// Lane (g, t) = (lane / 4, lane % 4) has rows 8 g .. 8 g + 7 of each group, of columns t, t + 4, t + 8 and t + 12, and computes
// B for input g. Before, it has a column, lane % 16, and two groups, whose S and m - half it leaves for all.

#pragma once

#include "products/zigzag.cuh"

struct BatchAccumulator {
    float c[4][4][4];  // of each group, of rows f = 0 .. 3
    float minimum[2][4];  // row n of A is group n's; of groups 0 and 2, of 1 and 3
};

// Bytes of a warp for each t, of columns t, t + 4, .. : S of all groups, 16 a column; m - half in float16, 8 a group; masks of planes
// 2 and 3, of 4 and 5, 4 a column each.
static constexpr int PITCH_OF_SCRATCH = 4 * 16 + 4 * 8 + 2 * 16 + 16, SCRATCH = 4 * PITCH_OF_SCRATCH / 4;
// Of the largest x times `largest_d` (products/zigzag.py), the largest x S is less than the 2^LARGER_BITS-fold.
static constexpr int LARGER_BITS = 2;

// What a lane adds to where stages, the list and the warp's scratch begin.
struct LaneOffsets {
    int column, header;                  // the lane's column in its k_tile, and its header
    int first, planes;                   // of column t: words of plane 1, and of plane 2
    int put_scale, put_centre, put_mask;
    int take;

    __device__ __forceinline__ explicit LaneOffsets(const PlanePlaces& places) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, c = lane % K_TILE, pair = lane / K_TILE;
        column = kept(c);
        header = kept(c * PITCH + places.header(pair));
        first = kept(t * PITCH + places.first() + g * 8);
        planes = kept(t * PITCH + places.plane(2) + g * 4);
        put_scale = kept(c % 4 * PITCH_OF_SCRATCH + c / 4 * 16 + pair * 8);
        put_centre = kept(c % 4 * PITCH_OF_SCRATCH + 64 + pair * 16 + c / 4 * 2);
        put_mask = kept(c % 4 * PITCH_OF_SCRATCH + 96 + pair * 16 + c / 4 * 4);
        take = kept(t * PITCH_OF_SCRATCH);
    }
};

// A byte of columns t and t + 4, of t + 8 and t + 12: of two words' rows each. Adds what a mask shows.
struct Rows {
    u32 a[4];

    __device__ __forceinline__ Rows(const u32 (&words)[2][4], int byte) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = __byte_perm(words[i % 2][i / 2 * 2], words[i % 2][i / 2 * 2 + 1], byte | (4 + byte) << 8 | (4 + byte) << 12 | byte << 4);
    }
    template <u32 MASK>
    __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&b)[2]) const {
        const u32 rows[4] = {a[0] & MASK, a[1] & MASK, a[2] & MASK, a[3] & MASK};
        mma(c, rows, b);
    }
};

// Add 16 columns. stage: of the k_tile; index: of its columns; value: of the lane's input there; scale: a power of two
// that brings x S into the range of float16, or 0; scratch: the warp's.
__device__ __forceinline__ void multiply(BatchAccumulator& sums, const u8* stage, const LaneOffsets& lane,
                                         const int* index, const float* value, float scale, u8* scratch) {
    const int level = DENSE ? LEVELS : (u32)index[lane.column] >> LEVEL_SHIFT;
    const u32 header = *(const u32*)(stage + lane.header);
    const float ratio = ratio_of(level), exact = level == 1 ? 16.0f / 15 : 1.0f, middle = middle_of(level);
    __syncwarp();
    *(float2*)(scratch + lane.put_scale) = make_float2(scale_of(header, 0) * ratio, scale_of(header, 1) * ratio);
#pragma unroll
    for (int j = 0; j < 2; ++j)
        *(u16*)(scratch + lane.put_centre + 8 * j) = float_to_half(centre_of(header, j, middle) * exact);
    if (!DENSE) *(u32*)(scratch + lane.put_mask) = mask_of(level, threadIdx.x & K_TILE ? 4 : 2);
    __syncwarp();
    const u8* taken = scratch + lane.take;
    u32 b[4][2];
    {
        float factors[4][4];  // of each group and column
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float x = value[threadIdx.x % 4 + 4 * j] * scale;
            const float4 units = *(const float4*)(taken + 16 * j);
            factors[0][j] = x * units.x, factors[1][j] = x * units.y;
            factors[2][j] = x * units.z, factors[3][j] = x * units.w;
        }
        const uint4 centres[2] = {*(const uint4*)(taken + 64), *(const uint4*)(taken + 80)};
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            b[group][0] = pack_half2(factors[group][0], factors[group][1]);
            b[group][1] = pack_half2(factors[group][2], factors[group][3]);
            const bool own = threadIdx.x % 32 / 4 == group;
            const uint4& of = centres[group / 2];
            const u32 row[4] = {own ? group % 2 ? of.z : of.x : 0, 0, own ? group % 2 ? of.w : of.y : 0, 0};
            mma(sums.minimum[group % 2], row, b[group]);
        }
    }
    const auto pairs = [&](int j, int number, u32 mask) {
        return TwoPlanes(stage + lane.planes + (number - 2) * TILE_BANDS * PLANE_BYTES + 4 * j * PITCH, TILE_BANDS,
                         DENSE ? ALL_LANES : mask);
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
        for (int group = 0; group < 4; ++group) {
            const Rows one(upper, group), two(lower, group);
            one.multiply<0x00f000f0>(sums.c[group][0], b[group]);
            one.multiply<0x000f000f>(sums.c[group][1], b[group]);
            two.multiply<0x00f000f0>(sums.c[group][2], b[group]);
            two.multiply<0x000f000f>(sums.c[group][3], b[group]);
        }
    }
    if (!__any_sync(ALL_LANES, level > 3)) return;
    const uint4 mask = *(const uint4*)(taken + 112);
    const u32 of[4] = {mask.x, mask.y, mask.z, mask.w};
    u32 both[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const TwoPlanes last = pairs(j, 4, of[j]);
        both[0][j] = last.halves[0], both[1][j] = last.halves[1];
    }
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        // As parts of nibbles: rows 0 and 2 of high ones, the others of low ones.
        const u32 quarter[2] = {mul_half2(b[group][0], 0x34003400), mul_half2(b[group][1], 0x34003400)};
        const u32 sixteenth[2] = {mul_half2(b[group][0], 0x2c002c00), mul_half2(b[group][1], 0x2c002c00)};
        const Rows rows(both, group);
        rows.multiply<0x00c000c0>(sums.c[group][0], sixteenth);
        rows.multiply<0x000c000c>(sums.c[group][1], sixteenth);
        rows.multiply<0x00300030>(sums.c[group][2], quarter);
        rows.multiply<0x00030003>(sums.c[group][3], quarter);
    }
}

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PADDED_ROWS]. inverse: of the scale of the
// lane's input.
__device__ __forceinline__ void store_sums(const BatchAccumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int input = 2 * t + n;
        const float factor = __shfl_sync(ALL_LANES, inverse, input * 4);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const float minimum = __shfl_sync(ALL_LANES, sums.minimum[group % 2][n], group * 4 + t);
            if (input >= INPUTS) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float(&c)[4][4] = sums.c[group];
                const int i = 2 * half + n;
                *(float4*)(rows + padded_index(input * BAND_ROWS + 64 * group + 8 * g + 4 * half)) =
                    make_float4((c[0][i] * NIBBLE + minimum) * factor, (c[1][i] * (16 * NIBBLE) + minimum) * factor,
                                (c[2][i] * NIBBLE + minimum) * factor, (c[3][i] * (16 * NIBBLE) + minimum) * factor);
            }
        }
    }
}
