// What blocks have in common whose lanes take eight rows each.

#pragma once

#include "common/common.cuh"

#define LANE_ROWS 1

// Four bytes, less `offset`, as floats: exact.
__device__ __forceinline__ void bytes_to_floats(u32 bytes, float offset, float* w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7650 | i)) - (8388608 + offset);
}
