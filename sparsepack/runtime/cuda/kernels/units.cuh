// Columns are multiplied in units of 16.

#pragma once

#include "common.cuh"

static constexpr int COLUMNS = 16;  // of a unit

__device__ __forceinline__ int units(int columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// Before a lane's own: how many of the lanes' bits are set.
__device__ __forceinline__ int before(u32 mask) { return __popc(mask & ((1u << (threadIdx.x % 32)) - 1)); }
