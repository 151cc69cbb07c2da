// How matrices lie in memory while they run. Plain structs and inline arithmetic: every instruction set includes this.
//
// Zigzag, in the file: band b = rows 256 b ... 256 b + 255; a superblock, of Q4_K 144 bytes, is one column of one band.
//
//     band 0:  column 0 | column 1 | ... | column K - 1
//     band 1:  column 0 | column 1 | ... | column K - 1
//
// 144 bytes are too few to fetch from memory at its full speed. While it runs, up to four bands make a quad, `span`
// quads lie together, and so an active column is one run of whole cache lines per span:
//
//     span 0:  column 0: quad 0 | quad 1 | ...;  column 1: quad 0 | quad 1 | ...;  ...
//     quad:    header | chunks of 32 rows: of band 0 | band 1 | band 2 | band 3
//
// blocks/*.h draw header and chunks.
//
// Only the last quad of a matrix may have fewer than four bands, and only the last span fewer quads. Where the file has a
// tail (formats/orders/zigzag.py), the last band has the chunks of its pieces alone, and columns of the last span are no
// whole cache lines.
#pragma once
#include "blocks/blocks.h"

namespace sparsepack {

enum { MAX_TILE = 256, MAX_SPAN = 16 };

// Bytes of a superblock in the file, and while it runs of the header of a quad and of a chunk; zeros for another type.
struct ZigzagBytes {
    int64_t superblock, header, chunk;
};
static inline ZigzagBytes zigzag_block(int32_t number) {
    ZigzagBytes of = {0, 0, 0};
    if (number == Q6_P) of.superblock = sizeof(Q6PBlock);  // layout/planes.h
    ZigzagBlocks::find(number, [&](auto block) {
        typedef decltype(block) Block;
        static_assert(sizeof(typename Block::Header) % 2 == 0, "chunks follow headers without a gap");
        of = {Block::SUPERBLOCK_BYTES, sizeof(typename Block::Header), sizeof(typename Block::Chunk)};
    });
    return of;
}

struct Zigzag {
    const uint8_t* data;  // 64-byte aligned
    int64_t rows;         // logical rows
    int64_t columns;
    int32_t bands;  // rows / 256, rounded up
    int32_t span;   // quads that lie together, 1 to MAX_SPAN
    int32_t tile;   // columns that are multiplied together, a multiple of 8, at most MAX_TILE
    // Of Q4_K, fp16 [quads][columns]: the largest |d| of a column's bands in a quad; 8 more may be read after the last.
    const uint16_t* bounds;
    int32_t pieces;          // of 64 rows in the last band where it is a tail, 1 to 3; 0: it is whole
    const float* row_scale;  // [bands * 256]: what each row's sum is multiplied by; null: nothing
    int32_t block;           // the number of one of ZigzagBlocks, or Q6_P
    ZigzagBytes bytes;       // of that block
    int32_t absent = 0;      // of Q6_P: so many first planes lie elsewhere, and are multiplied there (layout/planes.h)
};

// Bytes of one column of a whole quad.
static inline int64_t quad_bytes(const Zigzag* m) { return m->bytes.header + QUAD_CHUNKS * m->bytes.chunk; }

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
// Chunks that the last band lacks.
static inline int32_t absent_chunks(const Zigzag* m) { return m->pieces ? BAND_SUBS - PIECE_SUBS * m->pieces : 0; }
// Chunks of one column of a quad, and of a span.
static inline int32_t quad_chunks(const Zigzag* m, int32_t quad) {
    return quad_bands(m, quad) * BAND_SUBS - (quad == quads(m) - 1 ? absent_chunks(m) : 0);
}
static inline int32_t span_chunks(const Zigzag* m, int32_t span) {
    return span_bands(m, span) * BAND_SUBS - (span == spans(m) - 1 ? absent_chunks(m) : 0);
}
// y [count] of rows from the first on: their sums become products.
static inline void scale_rows(const Zigzag* m, int64_t first, int32_t count, float* y) {
    if (!m->row_scale) return;
    for (int32_t i = 0; i < count; i++) y[i] *= m->row_scale[first + i];
}
// Bytes of one column of a span.
static inline int64_t span_stride(const Zigzag* m, int32_t span) {
    int32_t quads = (span_bands(m, span) + QUAD_BANDS - 1) / QUAD_BANDS;
    return quads * m->bytes.header + span_chunks(m, span) * m->bytes.chunk;
}
static inline const uint8_t* span_data(const Zigzag* m, int32_t span) {
    return m->data + span * m->span * quad_bytes(m) * m->columns;
}
// The bytes of the columns themselves; the bounds come after them.
static inline int64_t zigzag_bytes(const Zigzag* m) {
    int64_t chunks = m->bands * BAND_SUBS - absent_chunks(m);
    return m->columns * (quads(m) * m->bytes.header + chunks * m->bytes.chunk);
}
// Vectors of several chunks may be read beyond the last chunk of a tail, up to 64 bytes.
static inline int64_t bounds_bytes(const Zigzag* m) { return (quads(m) * m->columns + 8) * 2 + (m->pieces ? 64 : 0); }

// Neuron records (formats/orders/neuron.py draws the file's). While they run, a record is whole cache lines:
//
//     down column, as a column of a span of all bands | up row: UpNibbles of each band | Q4KHeader of each band | zeros
//
// A band is 256 channels of the hidden vector.

// A band of an up row. Byte [h][sub][j] has channel 32 sub + 16 h + j of the band in its low half and channel
// 32 sub + 16 h + 8 + j in its high half, so that a vector's lane is of one sub-block, whichever half is taken.
struct UpNibbles {
    uint8_t bytes[2][BAND_SUBS][8];
};
static_assert(sizeof(UpNibbles) == 128, "whole cache lines");

enum { MOST_NEURON_BANDS = MAX_SPAN * QUAD_BANDS, NEURON_TILE_BYTES = 192 << 10, MOST_NEURON_POSITIONS = 64 };

struct Neurons {
    const uint8_t* data;  // 64-byte aligned
    int64_t count;
    int32_t bands;       // hidden / 256, at most MOST_NEURON_BANDS
    bool plain = false;  // without gates: records have no up row, and what a gate would be is what a down column weighs
};

static inline int32_t neuron_hidden(const Neurons* n) { return n->bands * BAND_ROWS; }
// The byte of a record at which its up row begins.
static inline int64_t neuron_up(const Neurons* n) {
    return (n->bands + QUAD_BANDS - 1) / QUAD_BANDS * (int64_t)sizeof(QuadHeader) +
           n->bands * (int64_t)sizeof(BandNibbles);
}
static inline int64_t neuron_stride(const Neurons* n) {
    return (neuron_up(n) + (n->plain ? 0 : n->bands * (int64_t)sizeof(Q4KBlock)) + 63) & ~(int64_t)63;
}
// The nibbles of a band of an up row, from the order above to the file's.
static inline void neuron_nibbles_to_file(const UpNibbles* from, Q4KBlock* to) {
    for (int32_t sub = 0; sub < BAND_SUBS; sub += 2) {
        for (int32_t i = 0; i < 32; i++) {
            int32_t shift = i / 8 % 2 * 4, half = i / 16, j = i % 8;
            to->nibbles[sub / 2][i] = (uint8_t)((from->bytes[half][sub][j] >> shift & 15) |
                                                (from->bytes[half][sub + 1][j] >> shift & 15) << 4);
        }
    }
}
// The bytes of a record in the file.
static inline int64_t neuron_file_bytes(const Neurons* n) {
    return (n->plain ? 1 : 2) * n->bands * (int64_t)sizeof(Q4KBlock);
}
// The number of records that are multiplied together while as many more are fetched: all stay in the second-level
// cache.
static inline int32_t neuron_tile(const Neurons* n) {
    int64_t fit = NEURON_TILE_BYTES / neuron_stride(n) & ~(int64_t)7;
    return fit < 8 ? 8 : fit > 64 ? 64 : (int32_t)fit;
}

// Gates by rows, laid out as up rows are, each whole cache lines: UpNibbles of each band | Q4KHeader of each band | zeros
struct Gates {
    const uint8_t* data;  // 64-byte aligned
    int64_t count;
    int32_t bands;  // hidden / 256, at most MOST_NEURON_BANDS
};
static inline int64_t gate_stride(const Gates* g) { return (g->bands * (int64_t)sizeof(Q4KBlock) + 63) & ~(int64_t)63; }

// An input as the kernels of neurons want it, behind each other, from an address that 64 divides: float x [hidden];
// int8 digits [2 hidden], of each band in turn 8 of every sub-block, high ones and then low ones [4][high, low][8][8];
// float sums [hidden / 32], of sub-blocks of x; float units [bands], of the digits.
static inline int64_t neuron_input_bytes(int32_t bands) { return bands * (int64_t)(6 * BAND_ROWS + 32 + 4) + 64; }
// From the input of one position to that of the next.
static inline int64_t neuron_input_stride(int32_t bands) { return (neuron_input_bytes(bands) + 63) & ~(int64_t)63; }

// Matrices stored by rows: the embedding and the output matrix. F32, F16, BF16, Q4_K and Q8_0 as in the file. Q6_K by
// tiles of 32 rows (the last one padded with zero rows), each 6720 bytes per 256 columns, as `rows_*.inc` draws it.
enum { ROW_TILE = 32 };

struct Rows {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;
    int32_t type;
};

}  // namespace sparsepack
