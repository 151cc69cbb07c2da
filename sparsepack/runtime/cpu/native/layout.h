// How matrices lie in memory while they run. Plain structs and inline arithmetic: every instruction set includes this.
//
// Zigzag Q4_K, in the file: band b = rows 256 b ... 256 b + 255; a piece of 144 bytes is one column of one band.
//
//     band 0:  column 0 | column 1 | ... | column K - 1
//     band 1:  column 0 | column 1 | ... | column K - 1
//
// 144 bytes are too few to fetch from memory at its full speed. While it runs, up to four bands make a quad, `span`
// quads lie together, and so an active column is one run of whole cache lines per span:
//
//     span 0:  column 0: quad 0 | quad 1 | ...;  column 1: quad 0 | quad 1 | ...;  ...
//     quad:    header 64 bytes | nibbles of band 0: 128 bytes | band 1 | band 2 | band 3
//     header:  fp16 d[4] | fp16 dmin[4] | low[32] | high[16]         (one per band; absent bands are zero)
//
//     slot(band, sub) = {0, 16, 8, 24}[band] + sub                   (sub: which 32 rows of the band, 0 to 7)
//     low[slot]  = scale & 15 | (min & 15) << 4                      (scale, min: the 6-bit numbers of Q4_K)
//     high[slot] for slot < 16:       bits 4-5 scale >> 4, bits 0-1 min >> 4
//     high[slot - 16] for slot >= 16: bits 6-7 scale >> 4, bits 2-3 min >> 4
//
//     nibbles of a band: 8 chunks of 16 bytes, chunk c for rows 32 c ... 32 c + 31, as 8 little-endian words;
//     nibble n (0 = least significant) of word w is row 32 c + 8 n + w
//
//     weight = d * scale * nibble - dmin * min
//
// Only the last quad of a matrix may have fewer than four bands, and only the last span fewer quads.
#pragma once
#include <stdint.h>

namespace sparsepack {

enum { BAND_ROWS = 256, QUAD_BANDS = 4, QUAD_ROWS = 1024, HEADER_BYTES = 64, BAND_BYTES = 128, FILE_BLOCK_BYTES = 144 };
enum { MAX_TILE = 256, MAX_SPAN = 16 };

struct Zigzag {
    const uint8_t* data;  // 64-byte aligned
    int64_t rows;         // logical rows
    int64_t columns;
    int32_t bands;  // rows / 256, rounded up
    int32_t span;   // quads that lie together, 1 to MAX_SPAN
    int32_t tile;   // columns that are multiplied together, a multiple of 8, at most MAX_TILE
    // fp16 [quads][columns]: the largest |d| of a column's bands in a quad; 8 more may be read after the last.
    const uint16_t* bounds;
};

static inline int32_t quads(const Zigzag* m) { return (m->bands + QUAD_BANDS - 1) / QUAD_BANDS; }
static inline int32_t quad_bands(const Zigzag* m, int32_t quad) {
    int32_t left = m->bands - quad * QUAD_BANDS;
    return left < QUAD_BANDS ? left : QUAD_BANDS;
}
static inline int32_t spans(const Zigzag* m) { return (quads(m) + m->span - 1) / m->span; }
static inline int32_t span_bands(const Zigzag* m, int32_t span) {
    int32_t first = span * m->span * QUAD_BANDS, left = m->bands - first, whole = m->span * QUAD_BANDS;
    return left < whole ? left : whole;
}
// Bytes of one column of a span.
static inline int64_t span_stride(const Zigzag* m, int32_t span) {
    int64_t bands = span_bands(m, span);
    return (bands + QUAD_BANDS - 1) / QUAD_BANDS * HEADER_BYTES + bands * BAND_BYTES;
}
static inline int64_t whole_quad_bytes(void) { return HEADER_BYTES + QUAD_BANDS * BAND_BYTES; }
static inline const uint8_t* span_data(const Zigzag* m, int32_t span) {
    return m->data + (int64_t)span * m->span * whole_quad_bytes() * m->columns;
}
static inline int32_t first_slot(int32_t band) { return (band & 1) * 16 + (band >> 1) * 8; }
// Of the columns themselves; the bounds come after them.
static inline int64_t zigzag_bytes(const Zigzag* m) {
    return m->columns * (quads(m) * (int64_t)HEADER_BYTES + m->bands * (int64_t)BAND_BYTES);
}
static inline int64_t bounds_bytes(const Zigzag* m) { return (quads(m) * m->columns + 8) * 2; }

// Neuron records (codecs/neurons.py draws the file's). While they run, a record is whole cache lines:
//
//     down column, as a column of a span of all bands | up row: nibbles 128 bytes a band | up row: 16 bytes a band | zeros
//
// A band is 256 channels of the hidden vector. The 16 bytes of a band of the up row are the file's (codecs/q4_k.py draws
// them). Its nibbles are in another order: byte 64 h + 8 sub + j has channel 32 sub + 16 h + j of the band in its low half
// and channel 32 sub + 16 h + 8 + j in its high half, so that a vector's lane is of one sub-block, whichever half is taken.
enum { MOST_NEURON_BANDS = MAX_SPAN * QUAD_BANDS, NEURON_TILE_BYTES = 192 << 10, MOST_NEURON_POSITIONS = 64 };

struct Neurons {
    const uint8_t* data;  // 64-byte aligned
    int64_t count;
    int32_t bands;  // hidden / 256, at most MOST_NEURON_BANDS
};

static inline int32_t neuron_hidden(const Neurons* n) { return n->bands * BAND_ROWS; }
static inline int64_t neuron_up(const Neurons* n) {
    return (n->bands + QUAD_BANDS - 1) / QUAD_BANDS * (int64_t)HEADER_BYTES + n->bands * (int64_t)BAND_BYTES;
}
static inline int64_t neuron_stride(const Neurons* n) {
    return (neuron_up(n) + n->bands * (int64_t)FILE_BLOCK_BYTES + 63) & ~(int64_t)63;
}
// The nibbles of a band of an up row, from the order above to the file's.
static inline void neuron_nibbles_to_file(const uint8_t* from, uint8_t* file) {
    for (int32_t sub = 0; sub < 8; sub += 2) {
        for (int32_t i = 0; i < 32; i++) {
            const uint8_t* byte = from + i / 16 * 64 + 8 * sub + i % 8;  // the next sub-block's is 8 further
            int32_t shift = i / 8 % 2 * 4;
            file[16 * sub + i] = (uint8_t)((byte[0] >> shift & 15) | (byte[8] >> shift & 15) << 4);
        }
    }
}
// Bytes of a record in the file.
static inline int64_t neuron_file_bytes(const Neurons* n) { return 2 * n->bands * (int64_t)FILE_BLOCK_BYTES; }
// Records that are multiplied together, while the next so many are fetched: both stay in the second-level cache.
static inline int32_t neuron_tile(const Neurons* n) {
    int64_t fit = NEURON_TILE_BYTES / neuron_stride(n) & ~(int64_t)7;
    return fit < 8 ? 8 : fit > 64 ? 64 : (int32_t)fit;
}
// Into how many units so many active neurons are cut, for so many threads; and where one begins.
static inline int32_t neuron_cuts(int32_t count, int32_t threads) {
    int32_t least = 32, wanted = threads == 1 ? 1 : 3 * threads, most = count / least;
    return most < 1 ? 1 : wanted < most ? wanted : most;
}
static inline int32_t neuron_border(int32_t count, int32_t cuts, int32_t cut) {
    return cut == cuts ? count : (int32_t)((int64_t)count * cut / cuts) & ~7;
}

// An input as the kernels of neurons want it, behind each other, from an address that 64 divides: float x [hidden]; int8
// digits [2 hidden], of each band in turn 8 of every sub-block, high ones and then low ones [4][high, low][8][8]; float sums [hidden / 32], of sub-blocks of x; float units [bands], of the digits.
static inline int64_t neuron_input_bytes(int32_t bands) { return bands * (int64_t)(6 * BAND_ROWS + 32 + 4) + 64; }

// Matrices stored by rows: the embedding and the output matrix. F32, F16, BF16, Q4_K and Q8_0 as in the file. Q6_K by tiles
// of 32 rows (the last one padded with zero rows), each 6720 bytes per 256 columns, as `rows_*.inc` draws it.
enum Type { F32 = 0, F16 = 1, BF16 = 2, Q4_K = 3, Q6_K = 4, Q8_0 = 5 };
enum { ROW_TILE = 32 };

struct Rows {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;
    int32_t type;
};

}  // namespace sparsepack
