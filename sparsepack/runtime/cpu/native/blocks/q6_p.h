// Q6_P (formats/blocks/q6_p.py): nested planes. Part of blocks.h, for files of every instruction set.
#pragma once

namespace sparsepack {

enum { PLANES = 5, PLANE_GROUP = 64, PLANE_GROUPS = BAND_ROWS / PLANE_GROUP };

// Byte i of `first` has bits 4 and 5 of q of weight 64 g + i at 2 g. Byte i of the others has a bit of weight 64 g + i at
// 2 g, and of weight 64 g + 32 + i at 2 g + 1.
struct Q6PBlock {
    uint8_t s[PLANE_GROUPS], b[PLANE_GROUPS];
    uint8_t first[64], others[PLANES - 1][32];
};
static_assert(sizeof(Q6PBlock) == 200, "Q6_P: 256 weights in 200 bytes");
static_assert(__builtin_offsetof(Q6PBlock, first) == 8 && __builtin_offsetof(Q6PBlock, others) == 72, "Q6_P");

// At level l a weight is S (T + 2 + m), where S is the float of bits (s << 20) + (b >> 6 << 18) + SCALE_BITS and m the lower six
// bits of b, a number with a sign, times 4. From level 2 on T + 2 is 64 p1 + 32 p2 + 16 p3 + 8 p4 + 4 p5 - PLANE_MIDDLE[l], by
// the planes that are read; at level 1 it is 60 p1 - PLANE_MIDDLE[1].
static const int32_t PLANE_MIDDLE[PLANES + 1] = {0, 88, 110, 118, 122, 124};
enum { SCALE_BITS = 103 << 23, FIRST_STEP = 60 };
static inline int32_t plane_scale_bits(uint8_t s, uint8_t b) { return (s << 20) + (b >> 6 << 18) + SCALE_BITS; }
static inline int32_t plane_centre(uint8_t b) { return (int8_t)(b << 2); }

// Bytes of a superblock that a reader of so many planes reads.
static inline int64_t level_bytes(int32_t level) { return level ? 72 + 32 * (level - 1) : 0; }

}  // namespace sparsepack
