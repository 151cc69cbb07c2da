// Neuron records on the GPU: of each neuron its row of up, then its column of down, in superblocks of 144 bytes whose
// scales and minima lie as products/zigzag.cuh shows.
//
//     record   | up: superblock 0 | .. bands - 1 | down: superblock 0 | .. bands - 1 |      channels = 256 bands
//
// A warp takes a group of two superblocks at a time. Lane l = lane % 16 of superblock 2 g + lane / 16 has 8 bytes:
// with p = l / 4, channels 64 p + 8 (l % 4) + i of the superblock in the low nibbles (half 0), and those 32 further in
// the high ones (half 1), i = 0 .. 7.
//
// A nibble q becomes the float 1 + q / 16 by a shift and a mask, which takes no conversion:
//
//     weight = factor[half] (1 + q / 16) - rest[half],   factor = 16 d scale,   rest = factor + dmin min

#pragma once

#include "common/common.cuh"

static constexpr int BLOCK_BYTES = 144;
static constexpr int GROUP_CHANNELS = 512;

// The first of the eight channels that a lane has of a group in a half.
__device__ __forceinline__ int lane_channel(int group, int half) {
    const int lane = threadIdx.x % 32, l = lane % 16;
    return GROUP_CHANNELS * group + 256 * (lane / 16) + 64 * (l / 4) + 8 * (l % 4) + 32 * half;
}

// What a lane has of a superblock.
struct Piece {
    float q[2][8];  // 1 + nibble / 16
    float factor[2], rest[2];

    __device__ __forceinline__ explicit Piece(const u8* block) {
        const int l = threadIdx.x % 16, p = l / 4;
        const u32* words = (const u32*)block;
        const u32 ends = words[0];
        const u32 bits = __funnelshift_r(words[1 + 3 * p / 4], words[2 + 3 * p / 4], 24 * p & 31);
        const uint2 nibbles = *(const uint2*)(block + 16 + 8 * l);
        const float d = half_to_float(ends & 0xffff) * 16, dmin = half_to_float(ends >> 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factor[half] = d * number(bits >> 12 * half & 63);
            rest[half] = factor[half] + dmin * number(bits >> (12 * half + 6) & 63);
            const int low = half ? 15 : 19;  // how far to the left the first byte's nibble moves
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                q[half][i] = one_and_sixteenths(nibbles.x, low - 8 * i);
                q[half][4 + i] = one_and_sixteenths(nibbles.y, low - 8 * i);
            }
        }
    }

    // A small integer as a float, exactly.
    __device__ __forceinline__ static float number(u32 n) { return __uint_as_float(n | 0x4b000000) - 8388608.0f; }
    __device__ __forceinline__ static float one_and_sixteenths(u32 word, int left) {
        const u32 moved = left >= 0 ? word << left : word >> -left;
        return __uint_as_float((moved & 0x00780000) | 0x3f800000);
    }
};
