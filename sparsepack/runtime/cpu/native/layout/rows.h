// Matrices stored by rows while they run: the embedding and the output matrix.
//
// F32, F16, BF16, Q4_K, Q8_0 and Q6_K_ROWS are the file's bytes, row after row. The output matrix in Q6_K is read whole
// for every token and so is laid out anew, for vectors whose lanes are rows:
//
//     rows  0 ... 31:  columns 0 ... 255 | columns 256 ... 511 | ...           (rows beyond the last: zeros)
//     rows 32 ... 63:  columns 0 ... 255 | columns 256 ... 511 | ...
#pragma once
#include "layout/layout.h"

namespace sparsepack {

// The file's own Q6_K, for the embedding, of which few rows are read.
enum { Q6_K_ROWS = 256 + Q6_K };

enum { BLOCK_COLUMNS = 256, Q8_0_COLUMNS = 32 };
enum { GROUP_COLUMNS = 16, BLOCK_GROUPS = BLOCK_COLUMNS / GROUP_COLUMNS, HALF_ROWS = ROW_TILE / 2 };

// The 16 columns that share a scale, of 16 rows of a tile. words[0] (a), words[1] (b) and words[2] (c) have a dword for
// each row. Its four bytes hold in bits 0-5 four neighbouring columns of the group, the first column in the least
// significant byte: a columns 0 to 3, b 4 to 7, c 8 to 11. Columns 12 to 15 lie in bits 6-7: of a their bits 0-1, of b
// bits 2-3, of c bits 4-5.
struct HalfGroup {
    uint8_t words[3][HALF_ROWS][4];
};

// 32 rows by 256 columns: weight = d * scale * (q - 32).
struct Q6KTile {
    int8_t scales[BLOCK_GROUPS][ROW_TILE];
    Bits16 d[ROW_TILE];
    HalfGroup groups[BLOCK_GROUPS][2];  // rows 0 to 15, rows 16 to 31
};
static_assert(sizeof(HalfGroup) == 192 && sizeof(Q6KTile) == 6720, "a tile is 105 cache lines");
static_assert(__builtin_offsetof(Q6KTile, d) == 512 && __builtin_offsetof(Q6KTile, groups) == 576, "Q6KTile");

static inline int64_t q6_k_tiled_bytes(int64_t rows, int64_t columns) {
    return (rows + ROW_TILE - 1) / ROW_TILE * (columns / BLOCK_COLUMNS) * (int64_t)sizeof(Q6KTile);
}

// One tile from a block of Q6_K of each of its rows (at most 32), row i at blocks + i * stride.
void q6_k_tile(const uint8_t* blocks, int64_t stride, int32_t rows, Q6KTile* tile);
// The inverse of `q6_k_tile`, byte for byte.
void q6_k_untile(const Q6KTile* tile, int64_t stride, int32_t rows, uint8_t* blocks);

// Tiles of rows first ... last - 1 of a matrix of `rows` (first a multiple of ROW_TILE, last too or `rows`): from the
// file's bytes to a whole tiled matrix. Calls for different rows may run at once.
void q6_k_tile_rows(const uint8_t* file, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* tiled);
void q6_k_untile_rows(const uint8_t* tiled, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* file);

}  // namespace sparsepack
