// Stands for <metal_stdlib> where there is no Mac: what our kernels use of the Metal Shading Language, in C++17 for clang.
// metal_emulation.py takes the attributes [[...]] out of a source, compiles it against this, and links threads.cpp to it.
//
// It is compiled twice:
//     SPACES defined    types only: each address space is a type of its own, and a pointer to a wrong one is an error
//     SPACES undefined  to run: memory is memory, and the compiler calls threads.cpp before each access to it
//
// A kernel's variable in threadgroup memory is declared outside of it, between guards (GUARDED); the kernel gets its name
// back by GUARDED_IN.
//
// Threads of a threadgroup are fibres. A function that Metal's threads execute together ends a fibre's turn.

#pragma once

#include <stddef.h>
#include <stdint.h>

#define UNCHECKED __attribute__((no_sanitize("thread"), noinline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#define VECTORS(type)                                         \
    typedef type type##2 __attribute__((ext_vector_type(2))); \
    typedef type type##3 __attribute__((ext_vector_type(3))); \
    typedef type type##4 __attribute__((ext_vector_type(4)))
VECTORS(uchar);
VECTORS(ushort);
VECTORS(uint);
VECTORS(int);
VECTORS(float);
VECTORS(half);
#undef VECTORS

#ifdef SPACES
#define device __attribute__((address_space(1)))
#define threadgroup __attribute__((address_space(3)))
#define constant const __attribute__((address_space(4)))
#define GUARDED(declared, name) static threadgroup declared
#define GUARDED_IN(memory, name) using memory::name
#define GUARDED_AT(name) name
#else
#define device
#define threadgroup
#define constant const
#define GUARDED(declared, name)                        \
    static struct {                                    \
        __attribute__((aligned(64))) char before[256]; \
        __attribute__((aligned(64))) declared;         \
        __attribute__((aligned(64))) char after[256];  \
    } guarded_##name
#define GUARDED_IN(memory, name) auto& name = memory::guarded_##name.name
#define GUARDED_AT(name) guarded_##name.name
#endif
#define thread
#define kernel static

// What a thread is told of its place.
struct Place {
    uint threadgroup_position_in_grid[3], threadgroups_per_grid[3];
    uint thread_position_in_threadgroup[3], threads_per_threadgroup[3];
    uint thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup;
    uint simdgroups_per_threadgroup;
};

extern "C" {
// Wait until all threads of the threadgroup are here. spaces: 1 device memory, 2 threadgroup memory, or both
void emulation_barrier(uint spaces, uint line);
// Wait until all lanes of the simdgroup are here. Returns what they brought, a word of 8 bytes each.
const uint64_t* emulation_exchange(const void* value, size_t size, const char* function, uint line);
uint emulation_lane();
float expf(float), logf(float), sqrtf(float), tanhf(float), sinf(float), cosf(float), powf(float, float);
}

#define INFINITY __builtin_inff()

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { emulation_barrier(uint(flags), line); }

template <typename To, typename From>
inline To as_type(From x) {
    return __builtin_bit_cast(To, x);
}

template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
inline float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fmin(float a, float b) { return __builtin_fminf(a, b); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float exp(float x) { return expf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }

// Lanes

template <typename T>
struct Lanes {
    T of[32];
};

template <typename T>
UNCHECKED Lanes<T> exchanged(T x, const char* function, uint line) {
    static_assert(sizeof(T) <= 8, "a lane brings at most 8 bytes");
    const uint64_t* all = emulation_exchange(&x, sizeof(T), function, line);
    Lanes<T> lanes;
    for (int i = 0; i < 32; ++i) __builtin_memcpy(&lanes.of[i], all + i, sizeof(T));
    return lanes;
}

template <typename T>
UNCHECKED T simd_sum(T x, uint line = __builtin_LINE()) {
    const Lanes<T> lanes = exchanged(x, "simd_sum", line);
    T sum = 0;
    for (int i = 0; i < 32; ++i) sum += lanes.of[i];
    return sum;
}
template <typename T>
UNCHECKED T simd_max(T x, uint line = __builtin_LINE()) {
    const Lanes<T> lanes = exchanged(x, "simd_max", line);
    T most = lanes.of[0];
    for (int i = 1; i < 32; ++i) most = most < lanes.of[i] ? lanes.of[i] : most;
    return most;
}
template <typename T>
UNCHECKED T simd_min(T x, uint line = __builtin_LINE()) {
    const Lanes<T> lanes = exchanged(x, "simd_min", line);
    T least = lanes.of[0];
    for (int i = 1; i < 32; ++i) least = lanes.of[i] < least ? lanes.of[i] : least;
    return least;
}
template <typename T>
UNCHECKED T simd_prefix_exclusive_sum(T x, uint line = __builtin_LINE()) {
    const Lanes<T> lanes = exchanged(x, "simd_prefix_exclusive_sum", line);
    T sum = 0;
    for (uint i = 0; i < emulation_lane(); ++i) sum += lanes.of[i];
    return sum;
}
template <typename T>
UNCHECKED T simd_broadcast(T x, ushort lane, uint line = __builtin_LINE()) {
    return exchanged(x, "simd_broadcast", line).of[lane % 32];
}
template <typename T>
UNCHECKED T simd_shuffle(T x, ushort lane, uint line = __builtin_LINE()) {
    return exchanged(x, "simd_shuffle", line).of[lane % 32];
}
template <typename T>
UNCHECKED T simd_shuffle_xor(T x, ushort mask, uint line = __builtin_LINE()) {
    return exchanged(x, "simd_shuffle_xor", line).of[(emulation_lane() ^ mask) % 32];
}
}  // namespace metal
