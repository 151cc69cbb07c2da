// How a warp of zigzag_batch.cu multiplies k_tiles of Q6_P, on the tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = bits of planes as they lie in bytes, masked: of four rows that share a byte,
//                        one of each group of 64, one mask after the other; as float16 with nothing but their lowest
//                        bits, times 2^-24
//                    B [16 columns, 8]       = x S of the mask's group, n = input, as the sum of two float16
//
// Which bits lie together is what gemv_q6_p.cuh says; of planes 4 and 5 the first float16 is enough. Lane (g, t) = (lane / 4,
// lane % 4) has rows 4 g .. 4 g + 3 and 32 more of each group, of columns t, t + 4, t + 8 and t + 12, and computes B for
// input g, and its minima. Before, it has a column, lane % 16, and two groups, whose S and S (m - half) it leaves for all.

#pragma once

#include "products/zigzag.cuh"

struct BatchAccumulator {
    float c[2][4][2][4];  // of each half of the rows, of each group
    float minimum[4];     // of each group, of the lane's input and columns
};

static constexpr int SCRATCH = 2 * K_TILE * 4;  // floats of a warp
// Of the largest x times `largest_d` (products/zigzag.py), the largest x S is less than the 2^LARGER_BITS-fold; at level 1 it
// is multiplied by 4.
static constexpr int LARGER_BITS = 2 + 2;

// Rows of A out of words of columns t + 4 j: of bytes 2 i and 2 i + 1.
struct Rows {
    u32 a[2][4];

    __device__ __forceinline__ explicit Rows(const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                a[i][2 * x] = __byte_perm(words[2 * x], words[2 * x + 1], i ? 0x7632 : 0x5410);
                a[i][2 * x + 1] = a[i][2 * x] >> 8;
            }
        }
    }
    // Add those of a group, whose bits a mask shows, times TERMS parts of B.
    template <int TERMS>
    __device__ __forceinline__ void multiply(float (&c)[2][4], u32 mask, const u32 (&b)[2][2]) const {
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 rows[4] = {a[i][0] & mask, a[i][1] & mask, a[i][2] & mask, a[i][3] & mask};
                mma(c[i], rows, b[term]);
            }
        }
    }
};

// Four rows that share a byte, two bits each, of all groups. even, odd: two float16 that B of these groups is multiplied by.
template <int TERMS>
__device__ __forceinline__ void multiply_pairs(float (&c)[4][2][4], const u32 (&words)[4], const u32 (&b)[4][2][2],
                                               u32 even, u32 odd) {
    const Rows rows(words);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        u32 scaled[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled[i / 2][i % 2] = mul_half2(b[group][i / 2][i % 2], group % 2 ? odd : even);
        rows.multiply<TERMS>(c[group], 0x00030003 << 2 * group, scaled);
    }
}

// Add 16 columns. stage: of the k_tile; index: of its columns; value: of the lane's input there, or null; scale: a power of
// two that brings x S into the range of float16; scratch: the warp's.
__device__ __forceinline__ void multiply(BatchAccumulator& sums, const u8* stage, const PlanePlaces& places,
                                         const int* index, const float* value, float scale, float* scratch) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, c = lane % K_TILE, pair = lane / K_TILE;
    const int level = DENSE ? LEVELS : (u32)index[c] >> LEVEL_SHIFT;
    u32 reads[LEVELS + 1];  // columns of which plane l is read, from the lane's first on
#pragma unroll
    for (int l = 2; l <= LEVELS; ++l) reads[l] = DENSE ? ALL_LANES : __ballot_sync(ALL_LANES, level >= l);
    const u32 header = *(const u32*)(stage + c * PITCH + places.header(pair));
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float factor = scale_of(header, j);
        scratch[c * 4 + 2 * pair + j] = factor * ratio_of(level);
        scratch[(K_TILE + c) * 4 + 2 * pair + j] = factor * centre_of(header, j, middle_of(level));
    }
    __syncwarp();
    float factors[4][4];  // of each group and column
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int k = t + 4 * j;
        const float x = value ? value[k] * scale : 0;
        const float4 units = *(const float4*)(scratch + k * 4), centres = *(const float4*)(scratch + (K_TILE + k) * 4);
        factors[0][j] = x * units.x, factors[1][j] = x * units.y;
        factors[2][j] = x * units.z, factors[3][j] = x * units.w;
        sums.minimum[0] += x * centres.x, sums.minimum[1] += x * centres.y;
        sums.minimum[2] += x * centres.z, sums.minimum[3] += x * centres.w;
    }
    u32 b[4][2][2];  // group, term
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* f = factors[group] + 2 * i;
            const u32 first = pack_half2(f[0], f[1]);
            b[group][0][i] = first;
            b[group][1][i] = pack_half2(f[0] - half_to_float(first & 0xffff), f[1] - half_to_float(first >> 16));
        }
    }
    // Of level 0, whatever lies there: its inputs are zero.
    u32 first[2][4], one[4], two[4];
    const u8* own = stage + t * PITCH;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint2 words = *(const uint2*)(own + 4 * j * PITCH + places.first() + g * 8);
        first[0][j] = words.x, first[1][j] = words.y;
    }
    if (!reads[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            multiply_pairs<2>(sums.c[half], first[half], b, 0x44004400, 0x3c003c00);  // 4 and 1
        return;
    }
    // Plane `number` and the next, zeros where they are not read.
    const auto load_planes = [&](int number) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u8* at = own + 4 * j * PITCH + g * 4;
            const u32 upper = *(const u32*)(at + places.plane(number)),
                      lower = *(const u32*)(at + places.plane(number + 1));
            one[j] = DENSE || reads[number] >> t & 1u << 4 * j ? upper : 0;
            two[j] = DENSE || reads[number + 1] >> t & 1u << 4 * j ? lower : 0;
        }
    };
    load_planes(2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 odd[4], even[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 pairs = two_planes(one[j], two[j], half);
            odd[j] = odd_nibbles(first[half][j], pairs);
            even[j] = even_nibbles(first[half][j], pairs);
        }
        const Rows of_odd(odd), of_even(even);
        of_odd.multiply<2>(sums.c[half][3], 0x00f000f0, b[3]);
        of_even.multiply<2>(sums.c[half][2], 0x00f000f0, b[2]);
        of_odd.multiply<2>(sums.c[half][1], 0x000f000f, b[1]);
        of_even.multiply<2>(sums.c[half][0], 0x000f000f, b[0]);
    }
    if (!reads[4]) return;
    load_planes(4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = two_planes(one[j], two[j], half);
        multiply_pairs<1>(sums.c[half], pairs, b, 0x34003400, 0x2c002c00);  // 1/4 and 1/16
    }
}

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PADDED_ROWS]. inverse: of the scale of the
// lane's input.
__device__ __forceinline__ void store_sums(const BatchAccumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        float minimum = sums.minimum[group];
        minimum += __shfl_xor_sync(ALL_LANES, minimum, 1);
        minimum += __shfl_xor_sync(ALL_LANES, minimum, 2);
        const float unit = group < 2 ? 16 * NIBBLE : NIBBLE;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int input = 2 * t + n;
            const float base = __shfl_sync(ALL_LANES, minimum, input * 4);
            const float factor = __shfl_sync(ALL_LANES, inverse, input * 4);
            if (input >= INPUTS) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&c)[4] = sums.c[i / 2][group][i % 2];
                float* at = rows + padded_index(input * BAND_ROWS + 64 * group + 32 * (i / 2) + 4 * g + 2 * (i % 2));
                *(float2*)at = make_float2((c[n] * unit + base) * factor, (c[2 + n] * unit + base) * factor);
            }
        }
    }
}
