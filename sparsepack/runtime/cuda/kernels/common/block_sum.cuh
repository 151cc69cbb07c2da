#pragma once
#include "common/common.cuh"

// The sum over a block of WARPS warps, up to 32, in the same order every time; every thread gets it.
// scratch: [WARPS] of shared memory.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < WARPS ? scratch[threadIdx.x % 32] : 0);
}
