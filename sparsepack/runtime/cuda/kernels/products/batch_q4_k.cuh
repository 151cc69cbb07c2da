// How a warp of zigzag_batch.cu multiplies k_tiles of Q4_K, on the tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = q * scale, exact: up to 15 * 63, times 2^-24
//                    B [16 columns, 8]       = x d, n = input, as the sum of two float16
//
// Lane (g, t) = (lane / 4, lane % 4) holds bytes 16 g .. 16 g + 15 of four columns, which are rows of the sub-blocks 2
// (g / 2) and 2 (g / 2) + 1, and computes B for input g. Minima are a product of their own: A [sub-block, column] =
// min, B = x dmin.

#pragma once

#include "products/zigzag.cuh"

struct BatchAccumulator {
    float low[8][4], high[8][4];  // of two bytes' nibbles
    float minimum[4];
};

// Two float16 of small integers: exact as they are, times 2^-24.
__device__ __forceinline__ u32 pair(u32 first, u32 second) { return first | second << 16; }

// Two float16 with the values of small integers: times a nibble in the lowest bits they are exact, too.
__device__ __forceinline__ u32 numbers(u32 first, u32 second) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(pair(first, second) | 0x64006400), "r"(0x64006400));
    return c;
}

// Add 16 columns. header(c): where the band's piece of column c begins; value: of the lane's input; scale: a power of
// two that brings x d into the range of float16.
template <typename Header>
__device__ __forceinline__ void multiply(BatchAccumulator& sums, Header header, const float* value, const float*, int,
                                         float scale) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, p = g / 2;
    uint4 q[4];
    u32 bits[4];
    float xd[4], xm[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = column_of_lane(t, i);
        const u8* at = header(column);
        const uint4 h = *(const uint4*)at;
        q[i] = *(const uint4*)(at + 16 + 16 * g);
        // Scale and minimum of sub-block 2 p, then of 2 p + 1: 24 bits at 24 p.
        bits[i] = __funnelshift_r(p == 0 ? h.y : p == 1 ? h.y : p == 2 ? h.z : h.w, p < 2 ? h.z : h.w, 24 * p & 31);
        const float x = value ? value[column] * scale : 0;
        xd[i] = x * half_to_float(h.x & 0xffff);
        xm[i] = x * half_to_float(h.x >> 16);
    }
    u32 b[2][2], m[2][2], scales[2][2], minima[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* d = xd + 2 * i;
        const float* e = xm + 2 * i;
        b[0][i] = pack_half2(d[0], d[1]);
        b[1][i] = pack_half2(d[0] - half_to_float(b[0][i] & 0xffff), d[1] - half_to_float(b[0][i] >> 16));
        m[0][i] = pack_half2(e[0], e[1]);
        m[1][i] = pack_half2(e[0] - half_to_float(m[0][i] & 0xffff), e[1] - half_to_float(m[0][i] >> 16));
        const u32 first = bits[2 * i], second = bits[2 * i + 1];
        scales[0][i] = numbers(first & 63, second & 63);
        scales[1][i] = numbers(first >> 12 & 63, second >> 12 & 63);
        minima[2 * i] = pair(first >> (6 + 12 * (g & 1)) & 63, second >> (6 + 12 * (g & 1)) & 63);
    }
    mma(sums.minimum, minima, m[0]);
    mma(sums.minimum, minima, m[1]);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4& one = q[i / 2 * 2];
            const uint4& two = q[i / 2 * 2 + 1];
            const int word = tile / 2, byte = tile % 2 * 2 + i % 2;
            const u32 first = word == 0 ? one.x : word == 1 ? one.y : word == 2 ? one.z : one.w;
            const u32 second = word == 0 ? two.x : word == 1 ? two.y : word == 2 ? two.z : two.w;
            const u32 both = __byte_perm(first, second, byte | (4 + byte) << 8 | byte << 4 | (4 + byte) << 12);
            low[i] = mul_half2(both & 0x000f000f, scales[0][i / 2]);
            high[i] = mul_half2(both & 0x00f000f0, scales[1][i / 2]);
        }
        mma(sums.low[tile], low, b[0]);
        mma(sums.high[tile], high, b[0]);
        mma(sums.low[tile], low, b[1]);
        mma(sums.high[tile], high, b[1]);
    }
}

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PADDED_ROWS]. inverse: of the scale of the
// lane's input.
__device__ __forceinline__ void store_sums(const BatchAccumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int input = 2 * t + i;
        // minimum[i]: sub-block g. This lane's rows are of the two of its pair.
        const float mine = sums.minimum[i] * NIBBLE;
        const float low = __shfl_sync(ALL_LANES, mine, (g & ~1) * 4 + t);
        const float high = __shfl_sync(ALL_LANES, mine, (g | 1) * 4 + t);
        const float factor = __shfl_sync(ALL_LANES, inverse, input * 4);
        if (input >= INPUTS) continue;
        float* at = rows + padded_index(input * BAND_ROWS + 64 * (g / 2) + 16 * (g & 1));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            *(float2*)(at + 2 * j) =
                make_float2((sums.low[j][i] * NIBBLE - low) * factor, (sums.low[j][2 + i] * NIBBLE - low) * factor);
            *(float2*)(at + 32 + 2 * j) = make_float2((sums.high[j][i] * (NIBBLE / 16) - high) * factor,
                                                      (sums.high[j][2 + i] * (NIBBLE / 16) - high) * factor);
        }
    }
}
