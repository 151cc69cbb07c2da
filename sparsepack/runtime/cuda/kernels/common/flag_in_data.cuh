// Flag in data (the LL protocol): values that a kernel reads before the one that writes them has ended, without a flag
// beside them. A 32-bit word is SENTINEL until its value is stored, and a reader polls the word until it changes, which
// takes one way to the L2 cache and back. A later kernel resets the word to SENTINEL. (NCCL's LL protocol sends a flag
// with each word; TensorRT-LLM's Lamport all-reduce puts the flag into the data, as here, with -0 as its sentinel.)
//
//     word      SENTINEL  -> ll_store ->  value  -> ll_load, by any number of readers ->  SENTINEL  -> ..
//     kernel                 K                            K + 1, while K still ends                 K + 2 or later
//
// One value is one 32-bit store, so a reader sees all of it or none. Nothing else is ordered by it: whoever needs other
// data of K calls wait_for_previous().
//
// Kernels K, K + 1, .. of a chain keep this order:
//   - K stores, and resets, only after wait_for_previous(): K - 1 and all before it have ended by then.
//   - K calls launch_dependents(), which lets K + 1 begin, only when it has an input that K - 1 stored: by the rule
//     above K - 2 has ended by then.
// So words that K + 1 reads before K has ended must have been reset by K - 2 or before, and words that K resets must
// have been read by K - 1 or before.
// Kernels that let the next one begin at once (all but zigzag_gemv, route, attention and the norms) may not stand before
// one that reads such words. Attention writes its row of the cache before it has waited: nobody else touches it in the
// same step.

#pragma once

#include "common/common.cuh"

static constexpr u32 SENTINEL = 0xffffffff;  // a NaN that no operation makes

// A value's bits, never SENTINEL: such a NaN is stored as another one.
__device__ __forceinline__ u32 ll_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == SENTINEL ? 0x7fffffff : bits;
}

__device__ __forceinline__ u32 ll_load(const void* p) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}
__device__ __forceinline__ void ll_store(void* p, float x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(ll_bits(x)) : "memory");
}
__device__ __forceinline__ void ll_store4(void* p, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(ll_bits(x.x)), "r"(ll_bits(x.y)),
                 "r"(ll_bits(x.z)), "r"(ll_bits(x.w))
                 : "memory");
}

// Four words that one block stored and this thread alone reads, as soon as all are there. It resets them.
__device__ __forceinline__ float4 ll_take4(void* p) {
    u32 x, y, z, w;
    do {
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "l"(p)
                     : "memory");
    } while (x == SENTINEL || y == SENTINEL || z == SENTINEL || w == SENTINEL);
    *(uint4*)p = make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL);
    return make_float4(__uint_as_float(x), __uint_as_float(y), __uint_as_float(z), __uint_as_float(w));
}

// Poll for COUNT values; at(i): where the i-th is, or null for 0. All of them are asked for before any is waited for.
template <int COUNT, typename At>
__device__ __forceinline__ void ll_wait(float (&values)[COUNT], At at) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float* p = at(i);
            const u32 word = p ? ll_load(p) : 0;
            values[i] = __uint_as_float(word);
            missing |= word == SENTINEL;
        }
    } while (missing);
}

// The same of values that, unless FLAGGED, a kernel that has ended left in plain memory.
template <bool FLAGGED, int COUNT, typename At>
__device__ __forceinline__ void ll_receive(float (&values)[COUNT], At at) {
    if constexpr (FLAGGED) {
        ll_wait(values, at);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = at(i) ? load_l2(at(i)) : 0;
    }
}

// Reset words that nobody reads any more, by thread `number` of `all`.
__device__ __forceinline__ void ll_reset(u32* words, int count, int number, int all) {
#pragma unroll 1
    for (int i = number; i < count; i += all) words[i] = SENTINEL;
}
