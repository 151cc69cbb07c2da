// Hopper's products of a warpgroup, 128 threads, with 8-bit values: wgmma.mma_async.sp (PTX ISA, 9.7.15.6).
//
//     D [64, N]   += A [64, 64] x B [64, N]      A has two nonzeros in each four along its 64 columns
//
//     A  in shared memory: its nonzeros alone, 32 bytes a row, rows 64 bytes apart, swizzled by 64 bytes
//     B  in shared memory: N rows of 64 bytes, 128 bytes apart, swizzled by 128 bytes
//     D  in registers, int32 or float32: thread t has rows 16 (t / 32) + t % 32 / 4 and 8 further down, and of each 8
//        columns those from 2 (t % 4) on: d[4 j], d[4 j + 1], and for the lower row d[4 j + 2], d[4 j + 3]
//     metadata  32 bits of each thread: where 16 values stand among their four, two bits each
//
// Macros: FP8 0 for int8, 1 for float8_e4m3fn; TOKENS: N, 64, 128, 192 or 256

#pragma once

#include "common/common.cuh"

#if FP8
typedef float Sum;
#define SUM "+f"
#define TYPES "f32.e4m3.e4m3"
#define SIGNS ", 1, 1"
#else
typedef int Sum;
#define SUM "+r"
#define TYPES "s32.s8.s8"
#define SIGNS ""
#endif

static constexpr int SUMS = TOKENS / 2;  // of a thread

// Descriptors of operands whose rows are 64 or 128 bytes apart, swizzled by as much: 8 of them lie together.
__device__ __forceinline__ u64 operand(u32 address, int row_bytes) {
    const u64 layout = row_bytes == 128 ? 1 : 2;
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(8 * row_bytes >> 4) << 32 | layout << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING groups of this warpgroup are on their way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FIRST_TEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define EIGHT(i) \
    SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), SUM(d[i + 7])
#define EIGHTS(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)
#define WGMMA(n, list, a, b, e, p, ...)                                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\nwgmma.mma_async.sp.sync.aligned.m64n" #n "k64." TYPES \
                 " {" list "}, " a ", " b ", " e ", 0, p" SIGNS ";\n}"                                              \
                 : __VA_ARGS__                                                                                      \
                 : "l"(weights), "l"(inputs), "r"(metadata), "r"(add))

// D = A x B, added to D if `add`.
__device__ __forceinline__ void wgmma(Sum (&d)[SUMS], u64 weights, u64 inputs, u32 metadata, int add) {
#if TOKENS == 256
    WGMMA(256,
          FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10)
              TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
          "%128", "%129", "%130", "%131", EIGHTS(0), EIGHTS(32), EIGHTS(64), EIGHTS(96));
#elif TOKENS == 192
    WGMMA(192, FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95", "%96",
          "%97", "%98", "%99", EIGHTS(0), EIGHTS(32), EIGHTS(64));
#elif TOKENS == 128
    WGMMA(128, FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", "%67", EIGHTS(0),
          EIGHTS(32));
#else
    static_assert(TOKENS == 64, "");
    WGMMA(64, FIRST_TEN TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", EIGHTS(0));
#endif
}
