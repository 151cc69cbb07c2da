// Blocks of quantised weights, a header each: how the file holds one, how it lies in memory in zigzag order (layout.h), and
// what a weight is. Another block is a header like q8_0.h: an include and a name in `ZigzagBlocks` here.
#pragma once
#include <stdint.h>

namespace sparsepack {

// 16 bits at any address: a half-precision number. Blocks of a file may begin at any.
typedef uint16_t Bits16 __attribute__((aligned(1), may_alias));

enum { BAND_ROWS = 256, BAND_SUBS = 8, QUAD_BANDS = 4, QUAD_ROWS = 1024, PIECE_ROWS = 64, PIECE_SUBS = 2 };
enum { CHUNK_ROWS = 32, QUAD_CHUNKS = QUAD_ROWS / CHUNK_ROWS };

// ggml's numbers, and one of ours.
enum Type { F32 = 0, F16 = 1, Q8_0 = 8, Q4_K = 12, Q6_K = 14, BF16 = 30, Q6_P = 1000 };

}  // namespace sparsepack

#include "blocks/q4_k.h"
#include "blocks/q6_k.h"
#include "blocks/q6_p.h"
#include "blocks/q8_0.h"

namespace sparsepack {
namespace {  // of each file its own: instruction sets differ

// Whether one of the blocks has that number; calls work(block) with it.
template <class... Blocks>
struct BlockList {
    template <class Work>
    static bool find(int32_t number, Work&& work) {
        return ((number == Blocks::NUMBER && (work(Blocks()), true)) || ...);
    }
};
typedef BlockList<ZigzagQ4_K, ZigzagQ6_K, ZigzagQ8_0> ZigzagBlocks;

}  // namespace
}  // namespace sparsepack
