// A column of a tile of superblocks of Q6_P on the GPU. Its bands' pieces lie part by part, so that a reader of the first l
// planes needs one piece of memory, `column_bytes(bands, l)` of it:
//
//     | headers of all bands, 8 each | plane 1 of all bands, 64 each | plane 2, 32 each | plane 3 | plane 4 | plane 5 |
//
//     header        of each group of 64 rows 16 bits: 6 for 32 + k, above them 10 for the scale's code; where there is one
//                   band, 8 unused bytes follow, so that pieces of memory are multiples of 16
//     Byte j of every word is of group j, rows 64 j + i. Words 2 g and 2 g + 1 of plane 1, and word g of the others, have rows
//     i = 8 g + 4 h + f: of the half h, and f = 0, 1, 2, 3 at bits 6, 2, 4, 0 (PLACES) of that byte:
//
//     plane 1       the highest two bits of q, at PLACES of byte j of word 2 g + h
//     planes 4, 5   as two bits of one word they would stand at PLACES of byte j, too. Of the first half plane 4 has the upper
//                   bit where it would be, plane 5 the lower. Of the second half each has its bit one place below
//     planes 2, 3   likewise, but what would stand at 6, 4, 2 and 0 stands two places further down, around the word's end:
//                   of f = 0 at 4, of 2 at 2, of 1 at 0, of 3 at 6 of byte j - 1. So nibbles come together without shifts
//
// Where a matrix is divided, a column's piece ends with plane `first`, and the others lie elsewhere, `rest_bytes` of a column:
//
//     | plane first + 1 of all bands, 32 each | .. | plane 5 |
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
// Of a column's planes after the first ones, what a level reads.
__device__ __forceinline__ constexpr int rest_bytes(int bands, int first, int level) {
    return level > first ? bands * (level - first) * PLANE_BYTES : 0;
}
// Of a superblock as it is stored, what a level reads, which is what is counted.
static constexpr int COUNTED_HEADER = 40, COUNTED_OF_LEVEL = 32, COUNTED_BYTES = 200;
__device__ __forceinline__ int counted_bytes(int level) {
    return level ? COUNTED_HEADER + COUNTED_OF_LEVEL * level : 0;
}

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
    // Of a plane after the first ones, in what lies elsewhere.
    __device__ __forceinline__ int rest(int first, int number) const {
        return rest_bytes(bands, first, number - 1) + band * PLANE_BYTES;
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

// Where rows f = 0, 1, 2 and 3 have two bits in a byte.
__device__ __forceinline__ constexpr int place_of(int f) { return f == 0 ? 6 : f == 1 ? 2 : f == 2 ? 4 : 0; }

// A plane and the next one as plane 1 is, two bits a row, of the first or second half.
__device__ __forceinline__ u32 two_planes(u32 one, u32 two, int half) {
    if (!half) return select<0xaaaaaaaa>(one, two);
    const u32 both = select<0x55555555>(one, two);
    return __funnelshift_l(both, both, 1);
}
// A word of a plane and of the next one, two bits a row, of both halves. mask: of the column, ones for planes that are read.
struct TwoPlanes {
    u32 halves[2];

    __device__ __forceinline__ TwoPlanes(const u8* first, const u8* second, u32 mask) {
        const u32 one = *(const u32*)first, two = *(const u32*)second;
#pragma unroll
        for (int half = 0; half < 2; ++half) halves[half] = two_planes(one, two, half) & mask;
    }
};
// Of a level, the mask of planes number and number + 1.
__device__ __forceinline__ u32 mask_of(int level, int number) {
    return level > number ? ALL_LANES : level == number ? 0xaaaaaaaa : 0;
}

// Plane 1, and planes 2 and 3 together: nibbles of rows f = 0 (high) and 1, and of f = 2 and 3.
__device__ __forceinline__ u32 first_nibbles(u32 first, u32 pairs) { return select<0xcccccccc>(first, pairs); }
__device__ __forceinline__ u32 last_nibbles(u32 first, u32 pairs) {
    const u32 both = select<0x33333333>(first, pairs);
    return __funnelshift_l(both, both, 2);
}

// What a lane has of a superblock of which `level` planes are read: rows 8 lane .. 8 lane + 7, as weights.
struct LanePlanes {
    u32 header, first[2], next[LEVELS - 1];

    // rest: where planes after the first `present` ones lie
    template <typename Reader>
    __device__ __forceinline__ void read(const u8* column, const PlanePlaces& places, int level, const Reader& reader,
                                         int present = LEVELS, const u8* rest = nullptr) {
        const int lane = threadIdx.x % 32, g = lane % 8;
        header = level ? reader.word(column + places.header(lane / 16)) : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            first[half] = level ? reader.word(column + places.first() + 8 * g + 4 * half) : 0;
#pragma unroll
        for (int n = 0; n < LEVELS - 1; ++n) {
            const u8* plane = n + 2 > present ? rest + places.rest(present, n + 2) : column + places.plane(n + 2);
            next[n] = level >= n + 2 ? reader.word(plane + 4 * g) : 0;
        }
    }

    __device__ __forceinline__ void weights(int level, float (&w)[8]) const {
        const int group = threadIdx.x % 32 / 8;
        const float scale = scale_of(header, group % 2), base = scale * centre_of(header, group % 2, middle_of(level));
        const float unit = scale * (4 * ratio_of(level));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 upper = two_planes(next[0], next[1], half), lower = two_planes(next[2], next[3], half);
            const u32 nibbles[2] = {first_nibbles(first[half], upper), last_nibbles(first[half], upper)};
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                const u32 nibble = nibbles[f / 2] >> (8 * group + (f % 2 ? 0 : 4)) & 15;
                const u32 q = nibble << 2 | (lower >> (8 * group + place_of(f)) & 3);
                w[4 * half + f] = (float)q * unit + base;
            }
        }
    }
};
