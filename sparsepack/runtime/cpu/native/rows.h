// Matrices stored by rows while they run: the embedding and the output matrix.
//
// F32, F16, BF16, Q4_K, Q8_0 and Q6_K_ROWS are the file's bytes, row after row. The output matrix in Q6_K is read whole for
// every token and so is laid out anew, for vectors whose lanes are rows:
//
//     rows  0 ... 31:  columns 0 ... 255 | columns 256 ... 511 | ...           (rows beyond the last: zeros)
//     rows 32 ... 63:  columns 0 ... 255 | columns 256 ... 511 | ...
//
// A tile, 32 rows by 256 columns, is 6720 bytes, 105 cache lines:
//
//     byte 0              512            576
//          +--------------+--------------+---------+---------+-----+----------+
//          | scales, int8 | d, fp16      | group 0 | group 1 | ... | group 15 |
//          | [16][32]     | [32]         |         |         |     |          |
//          +--------------+--------------+---------+---------+-----+----------+
//            [group][row]   [row]
//
// A group is the 16 columns that share a scale; it has 384 bytes:
//
//          rows 0 ... 15:  a [16] | b [16] | c [16]     rows 16 ... 31:  a [16] | b [16] | c [16]
//
// One dword of a, b or c is one row. Its four bytes hold in bits 0-5 four neighbouring columns of the group, the first
// column in the least significant byte: a columns 0 to 3, b 4 to 7, c 8 to 11. Columns 12 to 15 lie in bits 6-7: of a
// their bits 0-1, of b bits 2-3, of c bits 4-5.
//
//     weight = d * scale * (q - 32)
#pragma once
#include "layout.h"

namespace sparsepack {

// The file's own Q6_K, for the embedding, of which few rows are read.
enum { Q6_K_ROWS = 6 };

enum { BLOCK_COLUMNS = 256, Q4_K_BYTES = 144, Q6_K_BYTES = 210, Q8_0_COLUMNS = 32, Q8_0_BYTES = 34 };
enum { TILE_BYTES = 6720, TILE_SCALES = 0, TILE_D = 512, TILE_GROUPS = 576, GROUP_COLUMNS = 16, GROUP_BYTES = 384 };

static inline int64_t q6_k_tiled_bytes(int64_t rows, int64_t columns) {
    return (rows + ROW_TILE - 1) / ROW_TILE * (columns / BLOCK_COLUMNS) * TILE_BYTES;
}

// One tile from a block of Q6_K of each of its rows (at most 32), row i at blocks + i * stride.
void q6_k_tile(const uint8_t* blocks, int64_t stride, int32_t rows, uint8_t* tile);
// The same bytes back.
void q6_k_untile(const uint8_t* tile, int64_t stride, int32_t rows, uint8_t* blocks);

// Tiles of rows first ... last - 1 of a matrix of `rows` (first a multiple of ROW_TILE, last too or `rows`): from the
// file's bytes to a whole tiled matrix. Calls for different rows may run at once.
void q6_k_tile_rows(const uint8_t* file, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* tiled);
void q6_k_untile_rows(const uint8_t* tiled, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* file);

}  // namespace sparsepack
