// Q4_K (formats/blocks/q4_k.py). Part of blocks.h, for files of every instruction set.
#pragma once

namespace sparsepack {

// d, dmin, and of 8 sub-blocks of 32 weights a scale and a min of 6 bits each.
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

// The scales of a quad, one column. Where it has fewer bands, those of the absent ones are zero. The 6-bit numbers of
// sub-block `sub` (32 rows) of a band are at slot first_slot(band) + sub:
//
//     low[slot]  = scale & 15 | (min & 15) << 4
//     high[slot] for slot < 16:       bits 4-5 scale >> 4, bits 0-1 min >> 4
//     high[slot - 16] for slot >= 16: bits 6-7 scale >> 4, bits 2-3 min >> 4
//
//     weight = d * scale * nibble - dmin * min          of a matrix whose rows have scales, times that of its row
struct QuadHeader {
    Bits16 d[QUAD_BANDS], dmin[QUAD_BANDS];
    uint8_t low[32], high[16];
};

// A chunk has 32 rows as 8 little-endian words: nibble n (0 = least significant) of word w is row 8 n + w.
struct BandNibbles {
    uint8_t chunks[BAND_SUBS][16];
};

struct Quad {
    QuadHeader header;
    BandNibbles bands[QUAD_BANDS];
};
static_assert(sizeof(QuadHeader) == 64 && __builtin_offsetof(QuadHeader, dmin) == 8, "a header is a cache line");
static_assert(__builtin_offsetof(QuadHeader, low) == 16 && __builtin_offsetof(QuadHeader, high) == 48, "QuadHeader");
static_assert(sizeof(BandNibbles) == 128 && sizeof(Quad) == 576, "whole cache lines");

// The first of the 8 slots of a band in its quad: 0, 16, 8 or 24.
static inline int32_t first_slot(int32_t band) { return (band & 1) * 16 + (band >> 1) * 8; }

namespace {  // of each file its own: instruction sets differ

struct ZigzagQ4_K {
    enum { NUMBER = Q4_K, SUPERBLOCK_BYTES = sizeof(Q4KBlock) };
    typedef QuadHeader Header;
    struct Chunk {
        uint8_t nibbles[16];
    };

    // Chunk `from` of a superblock of the file becomes chunk `to` of a quad.
    static void pack(const uint8_t* superblock, int32_t from, Header* header, int32_t to, Chunk* chunk) {
        const Q4KBlock& block = *(const Q4KBlock*)superblock;
        int32_t band = to / BAND_SUBS, slot = first_slot(band) + to % BAND_SUBS, i = from % 4;
        const uint8_t *a = block.header.scales, *b = a + 4, *c = a + 8;
        int32_t scale = from < 4 ? a[i] & 63 : (c[i] & 15) | a[i] >> 6 << 4;
        int32_t min = from < 4 ? b[i] & 63 : c[i] >> 4 | b[i] >> 6 << 4;
        header->d[band] = block.header.d;
        header->dmin[band] = block.header.dmin;
        header->low[slot] = (uint8_t)((scale & 15) | (min & 15) << 4);
        header->high[slot % 16] |= (uint8_t)((scale >> 4 << 4 | min >> 4) << slot / 16 * 2);
        const uint8_t* q = block.nibbles[from / 2];
        for (int32_t k = 0; k < 16; k++) {
            int32_t w = k % 2 * 16 + k / 2, shift = from % 2 * 4;
            chunk->nibbles[k] = (uint8_t)((q[w] >> shift & 15) | (q[8 + w] >> shift & 15) << 4);
        }
    }
};

// The chunks of a whole superblock, as ZigzagQ4_K::pack makes each.
inline void pack_band(ZigzagQ4_K, const uint8_t* superblock, QuadHeader* header, int32_t band,
                      ZigzagQ4_K::Chunk* chunks) {
    const Q4KBlock& block = *(const Q4KBlock*)superblock;
    header->d[band] = block.header.d;
    header->dmin[band] = block.header.dmin;
    uint32_t first, second, mixed, high[2];  // four sub-blocks to a word
    uint8_t *low_at = header->low + first_slot(band), *high_at = header->high + first_slot(band) % 16;
    __builtin_memcpy(&first, block.header.scales, 4);
    __builtin_memcpy(&second, block.header.scales + 4, 4);
    __builtin_memcpy(&mixed, block.header.scales + 8, 4);
    uint32_t low[2] = {(first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4, mixed};
    __builtin_memcpy(low_at, low, 8);
    __builtin_memcpy(high, high_at, 8);
    high[0] |= ((first & 0x30303030) | (second >> 4 & 0x03030303)) << first_slot(band) / 16 * 2;
    high[1] |= ((first >> 2 & 0x30303030) | (second >> 6 & 0x03030303)) << first_slot(band) / 16 * 2;
    __builtin_memcpy(high_at, high, 8);
    for (const auto& file : block.nibbles) {
        for (int32_t w = 0; w < 8; w++) {
            uint8_t a = file[w], b = file[8 + w], c = file[16 + w], d = file[24 + w];
            chunks[0].nibbles[2 * w] = (uint8_t)((a & 15) | b << 4);
            chunks[0].nibbles[2 * w + 1] = (uint8_t)((c & 15) | d << 4);
            chunks[1].nibbles[2 * w] = (uint8_t)(a >> 4 | (b & 0xf0));
            chunks[1].nibbles[2 * w + 1] = (uint8_t)(c >> 4 | (d & 0xf0));
        }
        chunks += 2;
    }
}

// The largest |d| of a column's bands: as integers, halves without their sign are in order.
inline uint16_t largest_d(const QuadHeader& header) {
    uint16_t largest = 0;
    for (uint16_t d : header.d) largest = (d & 0x7fff) > largest ? d & 0x7fff : largest;
    return largest;
}

}  // namespace
}  // namespace sparsepack
