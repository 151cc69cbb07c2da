// Words that are handed on before a kernel ends: they are EMPTY until somebody writes a value, and who waits for one
// reads the word until it is anything else, which takes one way to the L2 cache and back. A later kernel empties them
// again.
//
// Kernels K, K + 1, .. of a chain keep this order:
//   - K writes, and empties, only after after_previous(): K - 1 and all before it have ended by then.
//   - K lets K + 1 begin only when it has an input that K - 1 wrote: by the rule above K - 2 has ended by then.
// So words that K + 1 reads early, those of K, must have been emptied by K - 2 or before, and words that K empties must
// have been read by K - 1 or before.
// Kernels that let the next one begin at once (all but zigzag_gemv and attention) may not stand before one that reads
// early. Attention writes its row of the cache before it has waited: nobody else touches it in the same step.

#pragma once

#include "common.cuh"

static constexpr u32 EMPTY = 0xffffffff;  // a NaN that no operation makes

// A value's bits, never EMPTY.
__device__ __forceinline__ u32 word_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == EMPTY ? 0x7fffffff : bits;
}

__device__ __forceinline__ u32 read_word(const void* p) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}
__device__ __forceinline__ void write_word(void* p, float x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(word_of(x)) : "memory");
}
__device__ __forceinline__ void write_words(void* p, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word_of(x.x)), "r"(word_of(x.y)),
                 "r"(word_of(x.z)), "r"(word_of(x.w))
                 : "memory");
}

// Four words that one block wrote and this thread alone reads, as soon as all are there. They are empty then.
__device__ __forceinline__ float4 take_words(void* p) {
    u32 x, y, z, w;
    do {
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "l"(p)
                     : "memory");
    } while (x == EMPTY || y == EMPTY || z == EMPTY || w == EMPTY);
    *(uint4*)p = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    return make_float4(__uint_as_float(x), __uint_as_float(y), __uint_as_float(z), __uint_as_float(w));
}

// COUNT values; at(i): where the i-th is, or null for 0. All of them are asked for before any is waited for.
template <int COUNT, typename At> __device__ __forceinline__ void wait_for(float (&values)[COUNT], At at) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float* p = at(i);
            const u32 word = p ? read_word(p) : 0;
            values[i] = __uint_as_float(word);
            missing |= word == EMPTY;
        }
    } while (missing);
}

// Words that nobody reads any more, by thread `number` of `all`.
__device__ __forceinline__ void make_empty(u32* words, int count, int number, int all) {
#pragma unroll 1
    for (int i = number; i < count; i += all) words[i] = EMPTY;
}
