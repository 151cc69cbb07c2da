// The type of cached keys and values: CacheType.
//
// Macro: KV 1 bfloat16, 2 float16, 3 float32

#pragma once

#include "common/common.cuh"

#ifndef KV
#define KV 1
#endif

#if KV == 3
typedef float CacheType;
#else
typedef u16 CacheType;
#endif

__device__ __forceinline__ CacheType to_cache_type(float x) {
#if KV == 1
    return float_to_bfloat(x);
#elif KV == 2
    return float_to_half(x);
#else
    return x;
#endif
}

__device__ __forceinline__ float from_cache_type(CacheType x) {
#if KV == 1
    return bfloat_to_float(x);
#elif KV == 2
    return half_to_float(x);
#else
    return x;
#endif
}
