// A column of a tile of superblocks of Q6_P on the GPU. Its bands' pieces lie part by part, so that a reader of the first l
// planes needs one piece of memory, `column_bytes(bands, l)` of it:
//
//     | headers of all bands, 8 each | plane 1 of all bands, 64 each | plane 2, 32 each | plane 3 | plane 4 | plane 5 |
//
//     header        of each group of 64 rows 16 bits: 6 for 32 + k, above them 10 for the scale's code; where there is one
//                   band, 8 unused bytes follow, so that pieces of memory are multiples of 16
//     plane 1       bits 2 g, 2 g + 1 of byte 8 (i % 32 / 4) + 4 (i / 32) + i % 4: the highest two of q of row 64 g + i
//     planes 2 ..   bits 2 g, 2 g + 1 of byte i = 0 .. 31: the next of q of row 64 g + i, and of row 64 g + 32 + i
//
//     weight = S * (T + m),  S = the float32 of the bits (code << 18) + (103 << 23),  m = 4 k + 2,
//     T = ratio * (64 p1 + 32 p2 + 16 p3 + 8 p4 + 4 p5 - half),
//     of level l planes after l are zero, half = 128 - 2^(6 - l), and ratio is 15/16 at level 1, else 1
//
// With 4 bands, levels end at multiples of 32 bytes, with 8 of 64.

#pragma once

#include "common/common.cuh"

#define LANE_ROWS 0
#define PLANES 1

static constexpr int BLOCK_BYTES = 200;
static constexpr int LEVELS = 5;
static constexpr int FIRST_BYTES = 64, PLANE_BYTES = 32;

__device__ __forceinline__ constexpr int headers_bytes(int bands) { return bands > 1 ? 8 * bands : 16; }
// Of a column's piece, what a level reads.
__device__ __forceinline__ constexpr int column_bytes(int bands, int level) {
    return level ? headers_bytes(bands) + bands * (FIRST_BYTES + (level - 1) * PLANE_BYTES) : 0;
}
// Of a superblock as it is stored, what a level reads, which is what is counted.
__device__ __forceinline__ int counted_bytes(int level) { return level ? 40 + 32 * level : 0; }
static constexpr int COUNTED_BYTES = 200;

__device__ __forceinline__ float ratio_of(int level) { return level == 1 ? 0.9375f : 1.0f; }
// ratio * half
__device__ __forceinline__ float middle_of(int level) {
    return level == 1 ? 90.0f : 128.0f - __uint_as_float((u32)(133 - level) << 23);
}

// Where a band's header and planes begin in a column's piece.
struct PlanePlaces {
    int bands, band;

    // Of groups 2 pair and 2 pair + 1.
    __device__ __forceinline__ int header(int pair) const { return band * 8 + pair * 4; }
    __device__ __forceinline__ int first() const { return headers_bytes(bands) + band * FIRST_BYTES; }
    // Of plane 2, 3, 4 or 5.
    __device__ __forceinline__ int plane(int number) const {
        return headers_bytes(bands) + bands * (FIRST_BYTES + (number - 2) * PLANE_BYTES) + band * PLANE_BYTES;
    }
};

// A group's S, and its m less `middle`, from the word that has them and another group's: which 0 or 1.
__device__ __forceinline__ float scale_of(u32 header, int which) {
    const u32 code = which ? header >> 4 & 0x0ffc0000 : (header & 0xffc0) << 12;
    return __uint_as_float(code + (103u << 23));
}
__device__ __forceinline__ float centre_of(u32 header, int which, float middle) {
    const float biased = __uint_as_float((header & (which ? 0x3f0000 : 0x3f)) | 0x4b000000) - 8388608.0f;
    return biased * (which ? 4.0f / 65536 : 4.0f) - (126.0f + middle);
}

// The bits of `a` where the mask has ones, of `b` elsewhere, in one instruction.
template <u32 MASK>
__device__ __forceinline__ u32 select(u32 a, u32 b) {
    u32 c;
    asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(c) : "r"(a), "n"(MASK), "r"(b));
    return c;
}

// A plane and the next one, of the first or second half of each group's rows, as plane 1 is: two bits each, two rows.
__device__ __forceinline__ u32 two_planes(u32 one, u32 two, int half) {
    return half ? select<0xaaaaaaaa>(one, two >> 1) : select<0xaaaaaaaa>(one << 1, two);
}
// Plane 1 and two planes together: nibbles of groups 3 (high) and 1, and of groups 2 and 0.
__device__ __forceinline__ u32 odd_nibbles(u32 first, u32 pairs) { return select<0xcccccccc>(first, pairs >> 2); }
__device__ __forceinline__ u32 even_nibbles(u32 first, u32 pairs) { return select<0xcccccccc>(first << 2, pairs); }

// What a lane has of a superblock of which `level` planes are read: rows 8 lane .. 8 lane + 7, as weights.
struct LanePlanes {
    u32 header, first[2], next[LEVELS - 1][2];

    template <typename Reader>
    __device__ __forceinline__ void read(const u8* column, const PlanePlaces& places, int level, const Reader& reader) {
        const int lane = threadIdx.x % 32, eighth = lane % 8;  // of a group: rows 8 eighth ..
        header = level ? reader.word(column + places.header(lane / 16)) : 0;
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
        const float scale = scale_of(header, group % 2), base = scale * centre_of(header, group % 2, middle_of(level));
        const float unit = scale * (4 * ratio_of(level));
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            u32 q = (first[word] >> 2 * group & 0x03030303) << 4;
#pragma unroll
            for (int n = 0; n < LEVELS - 1; ++n) q |= (next[n][word] >> (2 * group + half) & 0x01010101) << (3 - n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float number = __uint_as_float(__byte_perm(q, 0x4b000000, 0x7650 | i)) - 8388608.0f;
                w[4 * word + i] = number * unit + base;
            }
        }
    }
};
