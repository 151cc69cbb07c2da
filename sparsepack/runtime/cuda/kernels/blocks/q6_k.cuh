// A superblock of Q6_K on the GPU:
//
//     byte      0, 1   2 .. 15   16 .. 31               32 .. 159              160 .. 223
//             | d    | unused  | scale of each sub-block | low 4 bits of 256 q | high 2 bits of 256 q
//
//     weight = d * scale[s] * (q - 32),  s = row / 16
//
//     byte 32 + 4 l + i   row 8 l + i (low nibble) and 8 l + 4 + i (high)               l = 0 .. 31, i = 0 .. 3
//     byte 160 + 4 m + i  bits 0-1, 2-3: rows 16 m + i, 16 m + 4 + i; bits 4-5, 6-7: rows 16 m + 8 + i, 16 m + 12 + i

#pragma once

#include "blocks/lane_rows.cuh"

static constexpr int BLOCK_BYTES = 224;

// What a lane has of a superblock: rows 8 lane .. 8 lane + 7.
struct LaneRows {
    u32 low, high, d, scales;

    template <typename Reader>
    __device__ __forceinline__ void read(const u8* at, const Reader& reader) {
        const int lane = threadIdx.x % 32;
        low = reader.word(at + 32 + 4 * lane);
        high = reader.word(at + 160 + lane / 2 * 4);
        d = reader.word(at);
        scales = reader.word(at + 16 + lane / 8 * 4);
    }
    __device__ __forceinline__ float scale() const {
        return half_to_float(d & 0xffff) * (float)(signed char)(scales >> threadIdx.x / 2 % 4 * 8 & 0xff);
    }
    // The rows' weights over the scale.
    __device__ __forceinline__ void numbers(float (&w)[8]) const {
        const u32 bits = high >> threadIdx.x % 2 * 4;
        bytes_to_floats((low & 0x0f0f0f0f) | (bits << 4 & 0x30303030), 32, w);
        bytes_to_floats((low >> 4 & 0x0f0f0f0f) | (bits << 2 & 0x30303030), 32, w + 4);
    }
};
