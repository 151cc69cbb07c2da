// Q8_0 (formats/blocks/q8_0.py). Part of blocks.h, for files of every instruction set.
#pragma once

namespace sparsepack {

struct Q80Block {
    Bits16 d;
    int8_t weights[32];
};
static_assert(sizeof(Q80Block) == 34 && __builtin_offsetof(Q80Block, weights) == 2, "Q8_0: 32 weights in 34 bytes");

namespace {  // of each file its own: instruction sets differ

struct ZigzagQ8_0 {
    // A column of a quad while it runs: the d of each chunk of 32 rows, then the chunks.
    enum { NUMBER = Q8_0, SUPERBLOCK_BYTES = 8 * sizeof(Q80Block), SUB_ROWS = 32, LARGEST = 128 };
    struct Header {
        Bits16 d[QUAD_CHUNKS];
    };
    struct Chunk {
        int8_t weights[CHUNK_ROWS];
    };

    // Chunk `from` of a superblock of the file becomes chunk `to` of a quad.
    static void pack(const uint8_t* superblock, int32_t from, Header* header, int32_t to, Chunk* chunk) {
        const Q80Block& block = ((const Q80Block*)superblock)[from];
        header->d[to] = block.d;
        for (int32_t i = 0; i < CHUNK_ROWS; i++) chunk->weights[i] = block.weights[i];
    }

    // What the weights of a sub-block are multiples of; half: a function that decodes float16.
    template <class Half>
    static inline float scale(const Header& header, int32_t sub, Half half) {
        return half(header.d[sub]);
    }
    // Those of so many sub-blocks times x.
    template <class Half>
    static inline void factors(const Header& header, int32_t subs, float x, Half half, float* to) {
        for (int32_t sub = 0; sub < subs; sub++) to[sub] = half(header.d[sub]) * x;
    }
    static inline int32_t number(const Chunk& chunk, int32_t row) { return chunk.weights[row]; }

    // The same of consecutive rows, by the vectors V of an instruction set.
    template <class V>
    static inline __attribute__((always_inline)) typename V::Floats numbers(const Chunk& chunk, int32_t row) {
        return V::to_floats(V::load_signed_bytes(chunk.weights + row));
    }
};

}  // namespace
}  // namespace sparsepack
