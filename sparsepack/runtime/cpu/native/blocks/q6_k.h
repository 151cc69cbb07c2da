// Q6_K in zigzag order (formats/blocks/q6_k.py): what of it is its own, for files of every instruction set.
#pragma once
#include "layout/layout.h"

namespace sparsepack {
namespace {  // of each file its own: instruction sets differ

struct ZigzagQ6_K {
    // A column of a quad while it runs: the scale of each sub-block of 16 rows and the d of each band, then chunks.
    enum { SUPERBLOCK_BYTES = sizeof(Q6KBlock), SUB_ROWS = 16 };
    struct Header {
        int8_t scales[2 * QUAD_CHUNKS];
        Bits16 d[QUAD_BANDS];
    };
    // Byte i of `low` has row i in its low half and row 16 + i in its high one; `high` has two bits of each row in turn.
    struct Chunk {
        uint8_t low[16], high[8];
    };

    // Chunk `from` of a superblock of the file becomes chunk `to` of a quad.
    static void pack(const uint8_t* superblock, int32_t from, Header* header, int32_t to, Chunk* chunk) {
        const Q6KBlock& block = *(const Q6KBlock*)superblock;
        header->d[to / BAND_SUBS] = block.d;
        for (int32_t i = 0; i < 2; i++) header->scales[2 * to + i] = block.scales[2 * from + i];
        *chunk = {};
        for (int32_t row = 0; row < CHUNK_ROWS; row++) {
            int32_t half = from / 4, l = from % 4 * CHUNK_ROWS + row;  // of 128 weights
            chunk->low[row % 16] |= (uint8_t)((block.low[half][l % 64] >> l / 64 * 4 & 15) << row / 16 * 4);
            chunk->high[row / 4] |= (uint8_t)((block.high[half][l % 32] >> l / 32 * 2 & 3) << row % 4 * 2);
        }
    }

    // What the weights of a sub-block are multiples of; half: a function that decodes float16.
    template <class Half>
    static inline float scale(const Header& header, int32_t sub, Half half) {
        return half(header.d[sub / 16]) * (float)header.scales[sub];
    }
    // Those of so many sub-blocks of 16 times x.
    template <class Half>
    static inline void factors(const Header& header, int32_t subs, float x, Half half, float* to) {
        for (int32_t band = 0; 16 * band < subs; band++) {
            float d = half(header.d[band]) * x;
            for (int32_t i = 0; i < 16; i++) to[16 * band + i] = d * (float)header.scales[16 * band + i];
        }
    }
    static inline int32_t number(const Chunk& chunk, int32_t row) {
        return ((chunk.low[row % 16] >> row / 16 * 4 & 15) | (chunk.high[row / 4] >> row % 4 * 2 & 3) << 4) - 32;
    }

    // The same of consecutive rows, by the vectors V of an instruction set.
    template <class V>
    static inline __attribute__((always_inline)) typename V::Floats numbers(const Chunk& chunk, int32_t row) {
        int32_t bits;
        __builtin_memcpy(&bits, chunk.high + row / 16 * 4, 4);
        typename V::Ints low = V::load_bytes(chunk.low + row % 16) >> row / 16 * 4 & 15;
        typename V::Ints high = V::splat_int(bits) >> (V::lane_numbers() + row % 16) * 2 & 3;
        return V::to_floats((low | high << 4) - 32);
    }
};

}  // namespace
}  // namespace sparsepack
