// In the place of kernels/common/common.cuh: a host compiler makes functions of kernels, which `run` calls once for each
// thread of a grid. Threads of a block are the fibres of `fibres.h`: a barrier lets the block's others run, and what is
// exchanged within a warp those of the warp.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/fibres.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__

struct float2 {
    float x, y;
};
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct dim3 {
    int x, y, z;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}

#define threadIdx (dim3{fibres::current, 0, 0})
inline dim3 blockIdx, blockDim, gridDim;
inline void* dynamic_shared;
static constexpr u32 ALL_LANES = 0xffffffff;

inline void wait_for_previous() {}
inline void launch_dependents() {}
inline void __syncthreads() { fibres::wait(fibres::AT_BARRIER); }
inline void __syncwarp() { fibres::wait(fibres::AT_WARP); }

// What each lane of a warp has.
template <typename T>
inline const T* of_lanes(T x) {
    static T banks[2][fibres::MOST];  // a lane is at most one call ahead of another one of its warp
    T* const bank = banks[fibres::turn()];
    bank[fibres::current] = x;
    __syncwarp();
    return bank + fibres::current / 32 * 32;
}
inline float __shfl_down_sync(u32, float x, int step) {
    const int lane = threadIdx.x % 32;
    return of_lanes(x)[lane + step < 32 ? lane + step : lane];
}
inline float warp_sum(float x) {
    const float* const lanes = of_lanes(x);
    float sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += lanes[lane];
    return sum;
}
inline u32 __reduce_add_sync(u32, u32 x) {
    const u32* const lanes = of_lanes(x);
    u32 sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += lanes[lane];
    return sum;
}
template <typename T>
inline T __shfl_sync(u32, T x, int from) {
    return of_lanes(x)[from];
}
template <typename T>
inline T __shfl_xor_sync(u32, T x, int step) {
    return of_lanes(x)[threadIdx.x % 32 ^ step];
}
inline u32 __match_any_sync(u32, int x) {
    const int* const lanes = of_lanes(x);
    u32 same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= (u32)(lanes[lane] == x) << lane;
    return same;
}
inline u32 __ballot_sync(u32 lanes, bool is) { return __reduce_add_sync(lanes, (u32)is << threadIdx.x % 32); }
inline bool __any_sync(u32 lanes, bool is) { return __ballot_sync(lanes, is); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline int kept(int x) { return x; }
inline int atomicAdd(int* counter, int n) { return __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }
inline u32 atomicAdd(u32* counter, u32 n) { return __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }
inline void atomic_add(u64* counter, u64 n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }

template <typename T>
inline T load_l2(const T* p) {
    return *p;
}
template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
template <typename T>
inline void __stcg(T* p, T x) {
    *p = x;
}
template <typename To, typename From>
inline To bits_as(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 selected) {
    const u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}
template <u32 MASK>
inline u32 select(u32 a, u32 b) {
    return (a & MASK) | (b & ~MASK);
}
inline u32 __funnelshift_l(u32 low, u32 high, int n) { return n ? high << n | low >> (32 - n) : high; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return (float)(1 / std::sqrt((double)x)); }
inline float half_to_float(u16 bits) { return (float)bits_as<_Float16>(bits); }
inline u16 float_to_half(float x) { return bits_as<u16>((_Float16)x); }
inline u32 pack_half2(float first, float second) { return float_to_half(first) | (u32)float_to_half(second) << 16; }
inline u32 mul_half2(u32 a, u32 b) {
    const auto part = [](u32 pair, int n) { return half_to_float((u16)(pair >> 16 * n)); };
    return pack_half2(part(a, 0) * part(b, 0), part(a, 1) * part(b, 1));
}
inline float bfloat_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 float_to_bfloat(float x) {  // to the nearest, to even between two; not for NaN
    const u32 bits = __float_as_uint(x);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_bfloat2(float first, float second) {
    return float_to_bfloat(first) | (u32)float_to_bfloat(second) << 16;
}
inline u32 fma_half2(u32 a, u32 b, u32 c) {  // a product of two float16 is exact in float32, and so nearly is the sum
    const auto part = [](u32 pair, int n) { return (double)half_to_float((u16)(pair >> 16 * n)); };
    const auto sum = [&](int n) { return (u32)bits_as<u16>((_Float16)(part(a, n) * part(b, n) + part(c, n))); };
    return sum(0) | sum(1) << 16;
}
inline u32 add_half2(u32 a, u32 b) { return fma_half2(a, 0x3c003c00, b); }
inline void copy_async(void* to, const void* from) { memcpy(to, from, 16); }
inline void copy_async(void* to, const void* from, bool real) { real ? memcpy(to, from, 16) : memset(to, 0, 16); }
inline void copy_commit() {}
template <int PENDING>
inline void copy_wait() {}

template <typename T>
inline T argument(u64 value) {
    return bits_as<T>(value);
}
template <typename... T, size_t... N>
inline void call(void (*kernel)(T...), const u64* arguments, std::index_sequence<N...>) {
    kernel(argument<T>(arguments[N])...);
}
// Returns null, or what went wrong.
template <typename... T>
inline const char* run(void (*kernel)(T...), int x, int y, int threads, char* shared, u64 seed, const u64* arguments) {
    static void (*of)(T...);
    static const u64* values;
    of = kernel, values = arguments, dynamic_shared = shared, blockDim = {threads, 1, 1}, gridDim = {x, y, 1};
    const char* wrong = nullptr;
    for (int block = 0; block < x * y && !wrong; ++block) {
        blockIdx = {block % x, block / x, 0};
        wrong = fibres::run([] { call(of, values, std::index_sequence_for<T...>()); }, threads, seed + (u64)block);
    }
    return wrong;
}
