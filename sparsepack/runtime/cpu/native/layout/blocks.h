// The blocks in which the file holds quantised weights, byte for byte; sparsepack/formats/codecs draws their bits. A
// block may begin at any address.
#pragma once
#include <stdint.h>

namespace sparsepack {

// 16 bits at any address: a half-precision number.
typedef uint16_t Bits16 __attribute__((aligned(1), may_alias));

// d, dmin, and of 8 sub-blocks of 32 weights a scale and a min of 6 bits each (formats/blocks/q4_k.py).
struct Q4KHeader {
    Bits16 d, dmin;
    uint8_t scales[12];
};
struct Q4KBlock {
    Q4KHeader header;
    uint8_t nibbles[4][32];  // of two sub-blocks each: the first in the low halves, the second in the high ones
};
static_assert(sizeof(Q4KHeader) == 16 && sizeof(Q4KBlock) == 144, "Q4_K: 256 weights in 144 bytes");
static_assert(__builtin_offsetof(Q4KHeader, scales) == 4 && __builtin_offsetof(Q4KBlock, nibbles) == 16, "Q4_K");

// formats/blocks/q6_k.py
struct Q6KBlock {
    uint8_t low[2][64], high[2][32];
    int8_t scales[16];
    Bits16 d;
};
static_assert(sizeof(Q6KBlock) == 210, "Q6_K: 256 weights in 210 bytes");
static_assert(__builtin_offsetof(Q6KBlock, scales) == 192 && __builtin_offsetof(Q6KBlock, d) == 208, "Q6_K");

// formats/blocks/q8_0.py
struct Q80Block {
    Bits16 d;
    int8_t weights[32];
};
static_assert(sizeof(Q80Block) == 34 && __builtin_offsetof(Q80Block, weights) == 2, "Q8_0: 32 weights in 34 bytes");

}  // namespace sparsepack
