// Q6_K (formats/blocks/q6_k.py). Part of blocks.h, for files of every instruction set.
#pragma once

namespace sparsepack {

struct Q6KBlock {
    uint8_t low[2][64], high[2][32];
    int8_t scales[16];
    Bits16 d;
};
static_assert(sizeof(Q6KBlock) == 210, "Q6_K: 256 weights in 210 bytes");
static_assert(__builtin_offsetof(Q6KBlock, scales) == 192 && __builtin_offsetof(Q6KBlock, d) == 208, "Q6_K");

namespace {  // of each file its own: instruction sets differ

struct ZigzagQ6_K {
    // A column of a quad while it runs: the scale of each sub-block of 16 rows and the d of each band, then chunks.
    enum { NUMBER = Q6_K, SUPERBLOCK_BYTES = sizeof(Q6KBlock), SUB_ROWS = 16, LARGEST = 32 };
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
        const uint8_t *low = block.low[from / 4] + from % 2 * 32, *high = block.high[from / 4];
        int32_t low_shift = from % 4 / 2 * 4, high_shift = from % 4 * 2;
        for (int32_t i = 0; i < 16; i++)
            chunk->low[i] = (uint8_t)((low[i] >> low_shift & 15) | (low[16 + i] >> low_shift & 15) << 4);
        for (int32_t i = 0; i < 8; i++) {
            chunk->high[i] = 0;
            for (int32_t k = 0; k < 4; k++) chunk->high[i] |= (uint8_t)((high[4 * i + k] >> high_shift & 3) << 2 * k);
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
