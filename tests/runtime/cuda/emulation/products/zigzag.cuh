// In the place of kernels/products/zigzag.cuh: what a warp that multiplies planes knows of its block.

#pragma once

#include "blocks/block.cuh"
#include "products/k_tile.cuh"
#include "products/mma.cuh"

static constexpr int STAGES = 2, K_SLICES = 1, LEVEL_SHIFT = 28, BAND_ROWS = 256, PADDED_ROWS = BAND_ROWS + 20;
static constexpr int PITCH = (column_bytes(TILE_BANDS, CARD_LEVELS) + 31) / 64 * 64 + 32;
static constexpr int REST_PITCH = rest_bytes(TILE_BANDS, CARD_LEVELS, LEVELS);
static constexpr float NIBBLE = 16777216.0f;

inline int padded_index(int i) { return i / BAND_ROWS * PADDED_ROWS + i % BAND_ROWS + i % BAND_ROWS / 64 * 4; }

#include "products/plane_in_stage.cuh"

struct ColumnPipeline {
    const int* index;
    int rest_columns;

    bool has_rest(int entry) const {
        return PLANES_DIVIDED && (index[entry] & ((1 << LEVEL_SHIFT) - 1)) < rest_columns;
    }
};

struct FromRing {
    u32 word(const u8* p) const { return *(const u32*)p; }
};
