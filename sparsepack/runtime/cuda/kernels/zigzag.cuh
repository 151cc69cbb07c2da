// How products with zigzag matrices read them. Bands of 256 rows lie together in groups, column by column, so that what
// an active column needs is read in longer pieces (SpQt, section 4.1.2):
//
//                 column 0                         column 1                               column K - 1
//     group 0   | band 0 | band 1 | .. GROUP - 1 | band 0 | band 1 | .. GROUP - 1 | ... |
//     group 1   | band 0 | ...
//
// A band's piece of a column is a superblock of 144 bytes, its scales and minima in an order that a lane can take apart
// faster than the stored one:
//
//     byte      0 .. 3     4 .. 15                        16 .. 143
//             | d, dmin  | bits 12 s .. 12 s + 5: scale | 32 p + l: row 64 p + l (low nibble), 64 p + 32 + l (high)  |
//             |          |      12 s + 6 .. 12 s + 11: min |
//
//     weight = d * scale[s] * q - dmin * min[s],  s = row / 32
//
// The columns of a block travel into a ring of STAGES in shared memory, 16 at a time. All warps fill it once; the last
// PRODUCERS warps go on, while the other WARPS multiply: warp w has band w % GROUP, and every (WARPS / GROUP)-th stage.
// From sm_90 on the copy engine takes a column in one piece.
//
// Macros: WARPS, STAGES, GROUP, PRODUCERS; DENSE 1: every column is active, and weights begin to travel before
//         the input is there; BULK 0, CLUSTERS 0: as before sm_90

#pragma once

#include "active.cuh"

#ifndef CLUSTERS
#define CLUSTERS 1
#endif
#if __CUDA_ARCH__ < 900
#undef CLUSTERS
#define CLUSTERS 0
#endif
#ifndef BULK
#define BULK 1
#endif
#if __CUDA_ARCH__ < 900
#undef BULK
#define BULK 0
#endif

static constexpr int THREADS = WARPS * 32;  // that multiply
static constexpr int SETS = WARPS / GROUP;
static_assert(STAGES % SETS == 0 && STAGES % PRODUCERS == 0, "a stage is always brought and taken by the same warps");
static constexpr int BAND_ROWS = 256;
static constexpr int ROWS = GROUP * BAND_ROWS;
static constexpr int BLOCK_BYTES = 144;
static constexpr int PIECES = GROUP * BLOCK_BYTES / 16;                // of 16 bytes in a column
static constexpr int PITCH = (PIECES + (PIECES % 2 ? 0 : 1)) * 16;     // odd, so that columns fall on different banks
static constexpr int STAGE_BYTES = COLUMNS * PITCH;
static constexpr float NIBBLE = 16777216.0f;  // 2^24: what a nibble in the lowest bits of a float16 lacks

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// What brings columns into the ring.
struct Stream {
    const u8* base;     // of the group, column 0
    u8* ring;
    u64 *full, *empty;  // [STAGES]
    const u32* index;   // of the block's columns
    int column, last;   // DENSE: the block's first column; the matrix's last
    int units;

    __device__ __forceinline__ u32 number(int entry) const { return DENSE ? min(column + entry, last) : index[entry]; }

    // All warps of the block fill the ring for the first time, a unit each.
    __device__ __forceinline__ void begin() const {
        for (int i = threadIdx.x / 32; i < min(units, STAGES); i += WARPS + PRODUCERS) fetch(i);
    }

    // What the last warps do from then on: every PRODUCERS-th unit.
    __device__ __forceinline__ void run() const {
        for (int i = STAGES + threadIdx.x / 32 - WARPS; i < units; i += PRODUCERS) {
            barrier_wait(empty + i % STAGES, (i / STAGES - 1) & 1);
            fetch(i);
        }
    }

    __device__ __forceinline__ void fetch(int i) const {
        const int lane = threadIdx.x % 32;
        u8* to = ring + i % STAGES * STAGE_BYTES;
        u64* arrived = full + i % STAGES;
#if BULK
        const u32 barrier = shared_address(arrived);
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                         "n"(COLUMNS * GROUP * BLOCK_BYTES)
                         : "memory");
        __syncwarp();
        if (lane < COLUMNS)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    shared_address(to + lane * PITCH)),
                "l"(base + (u64)number(i * COLUMNS + lane) * (GROUP * BLOCK_BYTES)), "n"(GROUP * BLOCK_BYTES),
                "r"(barrier)
                : "memory");
#else
        for (int piece = lane; piece < COLUMNS * PIECES; piece += 32) {
            const int c = piece / PIECES, part = piece % PIECES;
            copy_async(to + c * PITCH + part * 16,
                base + (u64)number(i * COLUMNS + c) * (GROUP * BLOCK_BYTES) + part * 16);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(arrived)) : "memory");
#endif
    }
};

// A power of two that leaves `bound` below 2^15.
__device__ __forceinline__ int exponent_for(float bound) {
    const int e = (int)(__float_as_uint(bound) >> 23 & 0xff) - 126;  // bound < 2^e
    return min(max(15 - e, -100), 100);
}
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(127 + e) << 23); }
