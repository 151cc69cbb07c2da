// The superblocks in zigzag order, a header for each type: BLOCK_BYTES of one as it lies on the GPU, a multiple of 16, and
// what a lane has of it: LANE_ROWS 1: eight rows (lane_rows.cuh); 0: what kernels of Q4_K make of it; or with PLANES 1, what
// those of planes do, of which columns are read at a level each, up to LEVELS.
// products/zigzag.py lays them out.
//
// Macros: BLOCK, the name of the header; CARD_LEVELS, where a matrix of planes is divided: how many of a column's first planes
//         lie together (products/zigzag.cuh)

#pragma once

#ifndef BLOCK
#define BLOCK q4_k
#endif
#define BLOCK_FILE(text) #text
#define BLOCK_HEADER(NAME) BLOCK_FILE(NAME.cuh)

#include BLOCK_HEADER(BLOCK)

#ifndef PLANES
#define PLANES 0
static constexpr int LEVELS = 1;
static constexpr int COUNTED_HEADER = 1, COUNTED_OF_LEVEL = 0, COUNTED_BYTES = 1;  // columns are counted, and no bytes
__device__ __forceinline__ int counted_bytes(int level) { return level; }
#endif

#ifdef CARD_LEVELS
#define PLANES_DIVIDED 1
#else
#define PLANES_DIVIDED 0
#define CARD_LEVELS LEVELS
#endif
