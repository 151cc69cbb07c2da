// The layout of a matrix stored by rows on the GPU: the output matrix or the embedding.
//
// rows.py repacks Q8_0, Q6_K and Q4_K into tiles of 8 rows x 256 columns, those of the same rows one after the other.
// Lane (h, l) = (lane / 16, lane % 16) of a warp has rows 4 h .. 4 h + 3 and columns 16 l .. 16 l + 15 of a tile:
//
//     Q8_0  byte 0 .. 2047                      2048 .. 2175
//               | 4 x [32 lanes][4 rows] u32  | [16 lane / 2][4 rows] fp16 |
//               | word p: columns 4 p .. + 3  | d                          |
//
//     Q6_K  byte 0 .. 1535                      1536 .. 1663                1664 .. 1679
//               | 3 x [32 lanes][4 rows] u32  | [32 lanes][4 rows] u8     | [8 rows] fp16 |
//               | word p: columns 4 p .. + 3  | scale + 128               | d             |
//
//     Q4_K  byte 0 .. 1023                      1024 .. 1087                1088 .. 1119              1120 .. 1151
//               | 2 x [32 lanes][4 rows] u32  | [16 lane / 2][4 rows] u8  | [16 lane / 2] u16       | [8 rows] 2 fp16 |
//               | word p: columns 8 p .. + 7  | scale, 2 high bits of min | low bits of 4 mins      | d, dmin         |
//
//     A word of Q8_0: four columns, q + 128 from 0 to 255; the last tile of a row ends in blocks whose d is 0, where
//     its width is no multiple of 256. A word of Q6_K: bits 0 .. 23 four columns, 6 bits each, q from 0 to 63; bits
//     24 .. 31 of the three words together: columns 12 .. 15. The u16 of Q4_K: byte i has the mins of row i (low
//     nibble) and row i + 2 (high).
//
// F32, F16 and BF16 stay by rows, each padded with zeros to 16 bytes; 4 rows x 512 bytes count as a tile here, and lane
// l has bytes 16 l .. 16 l + 15 of all four.
//
// A field of a word is a float as it is, once the rest is masked off: below 2^-126 floats are integers times 2^-149, so
// bits s, s + 1, ... (up to bit 23) hold q 2^(s - 149), exactly. x takes 2^(64 - s) in turn, and the scale 2^85. The
// last field of Q8_0 lies above bit 23 and is shifted down to bit 0.
//
// Macro: TYPE 0 .. 5 for F32, F16, BF16, Q4_K, Q6_K, Q8_0

#pragma once

#include "common/common.cuh"

enum { F32, F16, BF16, Q4_K, Q6_K, Q8_0 };

static constexpr bool PACKED = TYPE == Q4_K || TYPE == Q6_K || TYPE == Q8_0;
static constexpr bool WHOLE_TILES = TYPE == Q4_K || TYPE == Q6_K;  // whether 256 divides every width
static constexpr int ACROSS = PACKED ? 16 : 32;                    // lanes side by side along a row
static constexpr int QUADS = PACKED ? 4 : TYPE == F32 ? 1 : 2;  // of four columns, that a lane has in a row of a tile
static constexpr int TILE_ROWS = 4 * 32 / ACROSS;               // of a tile
static constexpr int TILE_QUADS = ACROSS * QUADS;               // in a row of a tile
static constexpr int TILE_BYTES = TYPE == Q8_0 ? 2176 : TYPE == Q6_K ? 1680 : TYPE == Q4_K ? 1152 : 2048;
static constexpr int TILE_STEP = PACKED ? TILE_BYTES : 512;              // bytes to the next tile of the same rows
static constexpr int FIELD = TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : 4;    // bits
static constexpr int ZERO = TYPE == Q8_0 ? 128 : TYPE == Q6_K ? 32 : 0;  // what a field has of a weight 0

static constexpr int SCALES = TYPE == Q6_K ? 1536 : 1024;  // bytes into a tile
static constexpr int MINS = 1088;
static constexpr int FACTORS = TYPE == Q8_0 ? 2048 : TYPE == Q6_K ? 1664 : 1120;

// By how many bits column j of the four in a word is shifted to the left in what `field` gives.
__device__ __forceinline__ constexpr int field_shift(int j) { return FIELD * (j + 1) <= 24 ? FIELD * j : 0; }

// Column j of the four in a word: in place, or where that is above bit 23, at bit 0.
__device__ __forceinline__ u32 field(u32 word, int j) {
    return FIELD * (j + 1) <= 24 ? word & ((1 << FIELD) - 1) << FIELD * j : word >> FIELD * j;
}

// Columns 12 .. 15 of Q6_K.
__device__ __forceinline__ u32 fourth(u32 a, u32 b, u32 c) { return __byte_perm(__byte_perm(a, b, 0x0073), c, 0x0710); }

// Q4_K's mins of four rows, a byte each.
__device__ __forceinline__ u32 mins(u32 scales, u32 low) {
    return (scales >> 2 & 0x30303030) | (low & 0x0f0f) | (low & 0xf0f0) << 12;
}
