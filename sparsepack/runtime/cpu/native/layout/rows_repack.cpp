// Q6_K between the file's layout and the one that the kernels read.
#include "layout/rows.h"

#include <string.h>

namespace sparsepack {
namespace {

enum { QUARTERS = 4 };

// The 256 numbers of a block, 0 ... 63, in the order of the columns.
void read_block(const Q6KBlock* block, uint8_t* q) {
    for (int half = 0; half < 2; half++, q += 128) {
        const uint8_t *low = block->low[half], *high = block->high[half];
        for (int l = 0; l < 32; l++) q[l] = (uint8_t)((low[l] & 15) | (high[l] & 3) << 4);
        for (int l = 0; l < 32; l++) q[32 + l] = (uint8_t)((low[32 + l] & 15) | (high[l] & 12) << 2);
        for (int l = 0; l < 32; l++) q[64 + l] = (uint8_t)(low[l] >> 4 | (high[l] & 48));
        for (int l = 0; l < 32; l++) q[96 + l] = (uint8_t)(low[32 + l] >> 4 | (high[l] & 192) >> 2);
    }
}

void write_block(const uint8_t* q, Q6KBlock* block) {
    for (int half = 0; half < 2; half++, q += 128) {
        uint8_t *low = block->low[half], *high = block->high[half];
        for (int l = 0; l < 64; l++) low[l] = (uint8_t)((q[l] & 15) | (q[64 + l] & 15) << 4);
        for (int l = 0; l < 32; l++)
            high[l] = (uint8_t)(q[l] >> 4 | q[32 + l] >> 4 << 2 | q[64 + l] >> 4 << 4 | q[96 + l] >> 4 << 6);
    }
}

int32_t rows_left(int64_t rows, int64_t row) {
    return rows - row < ROW_TILE ? (int32_t)(rows - row) : (int32_t)ROW_TILE;
}

const uint32_t TWO_BITS = 0x03030303, SIX_BITS = 0x3f3f3f3f;

}  // namespace

void q6_k_tile(const uint8_t* blocks, int64_t stride, int32_t rows, Q6KTile* tile) {
    if (rows < ROW_TILE) memset(tile, 0, sizeof *tile);
    for (int32_t row = 0; row < rows; row++, blocks += stride) {
        auto* block = (const Q6KBlock*)blocks;
        uint8_t q[BLOCK_COLUMNS];
        read_block(block, q);
        tile->d[row] = block->d;
        for (int group = 0; group < BLOCK_GROUPS; group++) {
            tile->scales[group][row] = block->scales[group];
            HalfGroup& to = tile->groups[group][row / HALF_ROWS];
            uint32_t words[QUARTERS];
            memcpy(words, q + GROUP_COLUMNS * group, GROUP_COLUMNS);
            for (int i = 0; i < 3; i++) {
                words[i] |= (words[3] >> 2 * i & TWO_BITS) << 6;
                memcpy(to.words[i][row % HALF_ROWS], &words[i], 4);
            }
        }
    }
}

void q6_k_untile(const Q6KTile* tile, int64_t stride, int32_t rows, uint8_t* blocks) {
    for (int32_t row = 0; row < rows; row++, blocks += stride) {
        auto* block = (Q6KBlock*)blocks;
        uint8_t q[BLOCK_COLUMNS];
        block->d = tile->d[row];
        for (int group = 0; group < BLOCK_GROUPS; group++) {
            block->scales[group] = tile->scales[group][row];
            const HalfGroup& from = tile->groups[group][row / HALF_ROWS];
            uint32_t words[QUARTERS] = {};
            for (int i = 0; i < 3; i++) {
                memcpy(&words[i], from.words[i][row % HALF_ROWS], 4);
                words[3] |= (words[i] >> 6 & TWO_BITS) << 2 * i;
                words[i] &= SIX_BITS;
            }
            memcpy(q + GROUP_COLUMNS * group, words, GROUP_COLUMNS);
        }
        write_block(q, block);
    }
}

void q6_k_tile_rows(const uint8_t* file, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* tiled) {
    int64_t across = columns / BLOCK_COLUMNS, stride = across * (int64_t)sizeof(Q6KBlock);
    for (int64_t row = first; row < last; row += ROW_TILE) {
        int32_t held = rows_left(rows, row);
        auto* to = (Q6KTile*)tiled + row / ROW_TILE * across;
        for (int64_t i = 0; i < across; i++)
            q6_k_tile(file + row * stride + i * (int64_t)sizeof(Q6KBlock), stride, held, to + i);
    }
}

void q6_k_untile_rows(const uint8_t* tiled, int64_t rows, int64_t columns, int64_t first, int64_t last, uint8_t* file) {
    int64_t across = columns / BLOCK_COLUMNS, stride = across * (int64_t)sizeof(Q6KBlock);
    for (int64_t row = first; row < last; row += ROW_TILE) {
        int32_t held = rows_left(rows, row);
        auto* from = (const Q6KTile*)tiled + row / ROW_TILE * across;
        for (int64_t i = 0; i < across; i++)
            q6_k_untile(from + i, stride, held, file + row * stride + i * (int64_t)sizeof(Q6KBlock));
    }
}

}  // namespace sparsepack
