// Q6_K between the file's layout and the one that the kernels read.
#include "rows.h"

#include <string.h>

namespace sparsepack {
namespace {

enum { HALF_ROWS = 16, QUARTERS = 4 };

// The 256 numbers of a block, 0 ... 63, in the order of the columns.
void read_block(const uint8_t* block, uint8_t* q) {
    for (int half = 0; half < 2; half++, q += 128) {
        const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        for (int l = 0; l < 32; l++) q[l] = (uint8_t)((low[l] & 15) | (high[l] & 3) << 4);
        for (int l = 0; l < 32; l++) q[32 + l] = (uint8_t)((low[32 + l] & 15) | (high[l] & 12) << 2);
        for (int l = 0; l < 32; l++) q[64 + l] = (uint8_t)(low[l] >> 4 | (high[l] & 48));
        for (int l = 0; l < 32; l++) q[96 + l] = (uint8_t)(low[32 + l] >> 4 | (high[l] & 192) >> 2);
    }
}

void write_block(const uint8_t* q, uint8_t* block) {
    for (int half = 0; half < 2; half++, q += 128) {
        uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        for (int l = 0; l < 64; l++) low[l] = (uint8_t)((q[l] & 15) | (q[64 + l] & 15) << 4);
        for (int l = 0; l < 32; l++)
            high[l] = (uint8_t)(q[l] >> 4 | q[32 + l] >> 4 << 2 | q[64 + l] >> 4 << 4 | q[96 + l] >> 4 << 6);
    }
}

// Where a row's dword of `a` is in a group; b and c follow after 64 bytes each.
int64_t row_in_group(int32_t row) { return row / HALF_ROWS * (GROUP_BYTES / 2) + row % HALF_ROWS * 4; }

int32_t rows_left(int64_t rows, int64_t row) {
    return rows - row < ROW_TILE ? (int32_t)(rows - row) : (int32_t)ROW_TILE;
}

const uint32_t TWO_BITS = 0x03030303, SIX_BITS = 0x3f3f3f3f;

}  // namespace

void q6_k_tile(const uint8_t* blocks, int64_t stride, int32_t rows, uint8_t* tile) {
    if (rows < ROW_TILE) memset(tile, 0, TILE_BYTES);
    for (int32_t row = 0; row < rows; row++, blocks += stride) {
        uint8_t q[BLOCK_COLUMNS];
        read_block(blocks, q);
        memcpy(tile + TILE_D + 2 * row, blocks + 208, 2);
        for (int group = 0; group < BLOCK_COLUMNS / GROUP_COLUMNS; group++) {
            tile[TILE_SCALES + ROW_TILE * group + row] = blocks[192 + group];
            uint8_t* to = tile + TILE_GROUPS + GROUP_BYTES * group + row_in_group(row);
            uint32_t words[QUARTERS];
            memcpy(words, q + GROUP_COLUMNS * group, GROUP_COLUMNS);
            for (int i = 0; i < 3; i++) {
                words[i] |= (words[3] >> 2 * i & TWO_BITS) << 6;
                memcpy(to + 64 * i, &words[i], 4);
            }
        }
    }
}

void q6_k_untile(const uint8_t* tile, int64_t stride, int32_t rows, uint8_t* blocks) {
    for (int32_t row = 0; row < rows; row++, blocks += stride) {
        uint8_t q[BLOCK_COLUMNS];
        memcpy(blocks + 208, tile + TILE_D + 2 * row, 2);
        for (int group = 0; group < BLOCK_COLUMNS / GROUP_COLUMNS; group++) {
            blocks[192 + group] = tile[TILE_SCALES + ROW_TILE * group + row];
            const uint8_t* from = tile + TILE_GROUPS + GROUP_BYTES * group + row_in_group(row);
            uint32_t words[QUARTERS] = {};
            for (int i = 0; i < 3; i++) {
                memcpy(&words[i], from + 64 * i, 4);
                words[3] |= (words[i] >> 6 & TWO_BITS) << 2 * i;
                words[i] &= SIX_BITS;
            }
            memcpy(q + GROUP_COLUMNS * group, words, GROUP_COLUMNS);
        }
        write_block(q, blocks);
    }
}

void q6_k_tile_rows(const uint8_t* file, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* tiled) {
    int64_t across = columns / BLOCK_COLUMNS, stride = across * Q6_K_BYTES;
    for (int64_t row = first; row < last; row += ROW_TILE) {
        int32_t held = rows_left(rows, row);
        uint8_t* to = tiled + row / ROW_TILE * across * TILE_BYTES;
        for (int64_t i = 0; i < across; i++)
            q6_k_tile(file + row * stride + i * Q6_K_BYTES, stride, held, to + i * TILE_BYTES);
    }
}

void q6_k_untile_rows(const uint8_t* tiled, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* file) {
    int64_t across = columns / BLOCK_COLUMNS, stride = across * Q6_K_BYTES;
    for (int64_t row = first; row < last; row += ROW_TILE) {
        int32_t held = rows_left(rows, row);
        const uint8_t* from = tiled + row / ROW_TILE * across * TILE_BYTES;
        for (int64_t i = 0; i < across; i++)
            q6_k_untile(from + i * TILE_BYTES, stride, held, file + row * stride + i * Q6_K_BYTES);
    }
}

}  // namespace sparsepack
