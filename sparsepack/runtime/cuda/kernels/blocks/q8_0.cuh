// A superblock of Q8_0 on the GPU, eight blocks:
//
//     byte      0 .. 15               16 .. 271
//             | d of each sub-block | 128 + q of each row
//
//     weight = d[s] * q,  s = row / 32

#pragma once

#include "blocks/lane_rows.cuh"

static constexpr int BLOCK_BYTES = 272;

// What a lane has of a superblock: rows 8 lane .. 8 lane + 7.
struct LaneRows {
    uint2 q;
    u32 d;  // of two sub-blocks

    template <typename Reader>
    __device__ __forceinline__ void read(const u8* at, const Reader& reader) {
        const int lane = threadIdx.x % 32;
        q = reader.pair(at + 16 + 8 * lane);
        d = reader.word(at + lane / 8 * 4);
    }
    __device__ __forceinline__ float scale() const { return half_to_float(threadIdx.x / 4 % 2 ? d >> 16 : d & 0xffff); }
    // The rows' weights over the scale.
    __device__ __forceinline__ void numbers(float (&w)[8]) const {
        bytes_to_floats(q.x, 128, w);
        bytes_to_floats(q.y, 128, w + 4);
    }
};
