// Matrices from the order of the file to the order in which they run (layout.h), and back.
#pragma once
#include "layout/layout.h"
#include "memory/memory.h"
#include "threads/pool.h"

#include <vector>

namespace sparsepack {

struct ZigzagMatrix {
    Zigzag view;
    Memory memory;
    std::vector<float> row_scale;  // what the view shows, where rows have scales
};

struct RowsMatrix {
    Rows view;
    Memory memory;  // empty where the view shows the file's bytes
};

// Pieces of 64 rows in the tail of so many rows, 1 to 3; 0: they have none.
static inline int32_t tail_pieces(int64_t rows) {
    return (int32_t)(rows % BAND_ROWS + PIECE_ROWS - 1) / PIECE_ROWS % 4;
}
// Superblocks of a tail, of four pieces each.
static inline int64_t tail_blocks(int64_t rows, int64_t columns) { return (columns * tail_pieces(rows) + 3) / 4; }

// blocks: [bands, columns, superblock bytes] as in the file; where they are a view of one, its pages are given back as soon as
// they are copied, so that a model is never held twice. A span longer than the matrix becomes as long as the matrix.
// tail: [tail_blocks, superblock bytes], then `blocks` has the whole bands alone; null: the last band is padded. absent: of
// planes, so many first ones are left out.
ZigzagMatrix repack_zigzag(const uint8_t* blocks, int64_t rows, int64_t columns, int32_t span, int32_t tile, Pool& pool,
                           const uint8_t* tail = nullptr, int32_t block = Q4_K, int32_t absent = 0);

// The inverse of `repack_zigzag` of a matrix of Q4_K without a tail, byte for byte.
void unpack_zigzag(const Zigzag& matrix, uint8_t* blocks, Pool& pool);

struct ExpertsMatrix {
    std::vector<Zigzag> views;  // of each expert, all of one shape
    Memory memory;
};

// The same for a matrix of each of `experts`: blocks [experts, bands, columns, bytes], tail [experts, tail_blocks, bytes].
ExpertsMatrix repack_experts(const uint8_t* blocks, int64_t experts, int64_t rows, int64_t columns, int32_t span,
                             int32_t tile, Pool& pool, const uint8_t* tail = nullptr, int32_t block = Q4_K,
                             int32_t absent = 0);

// A matrix of planes of that shape at `data`, which has the bytes of its spans and bounds (layout/planes.h), zeros; what `repack_experts` does.
Zigzag repack_planes(Zigzag view, const uint8_t* blocks, const uint8_t* tail, uint8_t* data, Pool& pool);

struct NeuronMatrix {
    Neurons view;
    Memory memory;
};

// records: [count][neuron_file_bytes]; pages of a file are given back as by `repack_zigzag`.
NeuronMatrix repack_neurons(const uint8_t* records, int64_t count, int32_t bands, Pool& pool, bool plain = false);

// The inverse of `repack_neurons`, byte for byte.
void unpack_neurons(const Neurons& neurons, uint8_t* records, Pool& pool);

struct GateMatrix {
    Gates view;
    Memory memory;
};

// rows: [count][bands * sizeof(Q4KBlock)], Q4_K as in the file, whose pages are given back likewise.
GateMatrix repack_gates(const uint8_t* rows, int64_t count, int32_t bands, Pool& pool);

// One column of a quad. block: that of its first band; the next band's is `band_bytes` further.
void pack_quad(const uint8_t* block, int64_t band_bytes, int32_t bands, Quad* quad);
void unpack_quad(const Quad* quad, int32_t bands, uint8_t* block, int64_t band_bytes);

// Bytes of one row in the file.
int64_t row_bytes(int32_t type, int64_t columns);
// Columns that are stored together, of which a row has a whole number; 0 for a type that no rows have.
int64_t block_columns(int32_t type);

// data: [rows, row_bytes], of which this makes a copy in huge pages, Q6_K in the tiles of rows.h; gives pages of a file
// back likewise.
RowsMatrix repack_rows(const uint8_t* data, int64_t rows, int64_t columns, int32_t type, Pool& pool);

// The inverse of `repack_rows`, byte for byte.
void unpack_rows(const Rows& matrix, uint8_t* data, Pool& pool);

// The file's bytes themselves, where few rows are read (the embedding). They must outlive the view.
Rows rows_in_place(const uint8_t* data, int64_t rows, int64_t columns, int32_t type);

}  // namespace sparsepack
