// A column of a tile of superblocks of Q6_P on the GPU. Its bands' pieces lie part by part, so that a reader of the first l
// planes needs one piece of memory, bands * (48 + 32 l) bytes of it:
//
//     | headers of all bands, 16 each | plane 1 of all bands, 64 each | plane 2, 32 each | plane 3 | plane 4 | plane 5 |
//
//     header        d, c (float16) | of each group of 64 rows: s (uint8), 128 + m (uint8) | unused, 4 bytes
//     plane 1       bits 2 g, 2 g + 1 of byte 8 (i % 32 / 4) + 4 (i / 32) + i % 4: the highest two of q of row 64 g + i
//     planes 2 ..   bits 2 g, 2 g + 1 of byte i = 0 .. 31: the next of q of row 64 g + i, and of row 64 g + 32 + i
//
//     weight = d * s[g] * T / 256 + c * m[g],  T = ratio * (64 p1 + 32 p2 + 16 p3 + 8 p4 + 4 p5 - half),
//     of level l planes after l are zero, half = 128 - 2^(6 - l), and ratio is 15/16 at level 1, else 1
//
// With 4 bands, levels end at multiples of 64 bytes: what memory reads together.

#pragma once

#include "common/common.cuh"

#define LANE_ROWS 0
#define PLANES 1

static constexpr int BLOCK_BYTES = 208;
static constexpr int LEVELS = 5;
static constexpr int HEADER_BYTES = 16, FIRST_BYTES = 64, PLANE_BYTES = 32;

// Bytes of a superblock that are read at a level, here and as they are stored, which is what is counted.
__device__ __forceinline__ int level_bytes(int level) { return level ? HEADER_BYTES + 32 + 32 * level : 0; }
__device__ __forceinline__ int counted_bytes(int level) { return level ? 44 + 32 * level : 0; }
static constexpr int COUNTED_BYTES = 204;

__device__ __forceinline__ float ratio_of(int level) { return level == 1 ? 0.9375f : 1.0f; }
// half / 256; of level 0 zero, since nothing of it counts.
__device__ __forceinline__ float half_of(int level) {
    return level ? 0.5f - __uint_as_float((u32)(125 - level) << 23) : 0.0f;
}

// Where a band's header and planes begin in a column's piece.
struct PlanePlaces {
    int bands, band;

    __device__ __forceinline__ int header() const { return band * HEADER_BYTES; }
    __device__ __forceinline__ int first() const { return bands * HEADER_BYTES + band * FIRST_BYTES; }
    // Of plane 2, 3, 4 or 5.
    __device__ __forceinline__ int plane(int number) const {
        return bands * (HEADER_BYTES + FIRST_BYTES + (number - 2) * PLANE_BYTES) + band * PLANE_BYTES;
    }
};

// A group's s and m, from the word that has them and the next group's: first 0 or 1.
__device__ __forceinline__ float scale_of(u32 pairs, int first) {
    return __uint_as_float(__byte_perm(pairs, 0x4b000000, 0x7540 | 2 * first)) - 8388608.0f;
}
__device__ __forceinline__ float minimum_of(u32 pairs, int first) {
    return __uint_as_float(__byte_perm(pairs, 0x4b000000, 0x7541 + 2 * first)) - (8388608.0f + 128.0f);
}

// What a lane has of a superblock of which `level` planes are read: rows 8 lane .. 8 lane + 7, as weights.
struct LanePlanes {
    u32 ends, pairs, first[2], next[LEVELS - 1][2];

    template <typename Reader>
    __device__ __forceinline__ void read(const u8* column, const PlanePlaces& places, int level, const Reader& reader) {
        const int lane = threadIdx.x % 32, eighth = lane % 8;  // of a group: rows 8 eighth ..
        ends = level ? reader.word(column + places.header()) : 0;
        pairs = level ? reader.word(column + places.header() + 4 + lane / 16 * 4) : 0;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            const int four = 2 * (eighth % 4) + word;  // of the 32 rows of a half
            first[word] = level ? reader.word(column + places.first() + 8 * four + eighth / 4 * 4) : 0;
#pragma unroll
            for (int n = 0; n < LEVELS - 1; ++n)
                next[n][word] = level >= n + 2 ? reader.word(column + places.plane(n + 2) + 4 * four) : 0;
        }
    }

    __device__ __forceinline__ void weights(int level, float (&w)[8]) const {
        const int lane = threadIdx.x % 32, group = lane / 8, half = lane % 8 / 4;
        const float unit = half_to_float(ends & 0xffff) * scale_of(pairs, group % 2) * ratio_of(level);
        const float base = half_to_float(ends >> 16) * minimum_of(pairs, group % 2) - unit * half_of(level);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            u32 q = (first[word] >> 2 * group & 0x03030303) << 4;
#pragma unroll
            for (int n = 0; n < LEVELS - 1; ++n) q |= (next[n][word] >> (2 * group + half) & 0x01010101) << (3 - n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float number = __uint_as_float(__byte_perm(q, 0x4b000000, 0x7650 | i)) - 8388608.0f;
                w[4 * word + i] = number * (unit * (4.0f / 256)) + base;
            }
        }
    }
};
