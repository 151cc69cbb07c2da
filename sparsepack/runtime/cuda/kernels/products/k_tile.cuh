// Columns are multiplied a k_tile at a time (CUTLASS's word): 16 of them, the k of mma.m16n8k16. What a band of 256
// rows has in a k_tile is one A operand of 16 matrix products (zigzag_gemv.cu).
//
//     active columns of a block   | 16: k_tile 0 | 16: k_tile 1 | .. | the last one, filled up with zeros |

#pragma once

#include "common/common.cuh"

static constexpr int K_TILE = 16;  // columns

__device__ __forceinline__ int k_tiles(int columns) { return (columns + K_TILE - 1) / K_TILE; }

// The number of lanes before this one whose bit is set.
__device__ __forceinline__ int lanes_before(u32 mask) { return __popc(mask & ((1u << (threadIdx.x % 32)) - 1)); }
