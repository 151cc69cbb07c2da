// What records are multiplied with, as lanes read it from shared memory, and how records come there.
//
// Of each group of two superblocks the input has four float4 a lane, each for 32 lanes side by side, then the sums of a
// lane's two halves, which the minima are multiplied with.
//
//     input     | group 0: [4][32] float4 | group 1 | .. GROUPS - 1 | group 0: [32] float2 | .. |    for each sequence
//
// Macros: INPUTS sequences; GROUPS of two superblocks; BULK 0: as before sm_90, without bulk copies

#pragma once

#include "common/bulk.cuh"
#include "neurons/neuron_record.cuh"

static constexpr int INPUT_FLOATS = GROUPS * (GROUP_CHANNELS + 64);  // of a sequence
static_assert(INPUT_FLOATS * 4 % 128 == 0, "the ring begins at a multiple of 128 bytes");

// Where a sequence's input, and the sums of it, lie.
__device__ __forceinline__ float4* values_of(float* input, int group) {
    return (float4*)(input + group * GROUP_CHANNELS) + threadIdx.x % 32;
}
__device__ __forceinline__ float2* sums_of(float* input, int group) {
    return (float2*)(input + GROUPS * GROUP_CHANNELS + group * 64) + threadIdx.x % 32;
}

__device__ __forceinline__ float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ __forceinline__ float dot4(const float* q, float4 v) {
    return (q[0] * v.x + q[1] * v.y) + (q[2] * v.z + q[3] * v.w);
}

// By all warps: x float32 [INPUTS][256 bands].
__device__ __forceinline__ void fill_input(float* input, const float* x, int bands, int warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden = 256 * bands;
#pragma unroll 1
    for (int unit = warp; unit < INPUTS * GROUPS; unit += warps) {
        const int b = unit / GROUPS, group = unit % GROUPS;
        float* const of = input + b * INPUT_FLOATS;
        float4 v[4] = {};
        if (2 * group + lane / 16 < bands) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = load_l2((const float4*)(x + b * hidden + lane_channel(group, j / 2) + 4 * (j % 2)));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) values_of(of, group)[32 * j] = v[j];
        *sums_of(of, group) = make_float2(sum4(v[0]) + sum4(v[1]), sum4(v[2]) + sum4(v[3]));
    }
}

// dot[b] += a lane's part of the products of a group of a row with each sequence.
__device__ __forceinline__ void add_products(float (&dot)[INPUTS], const Piece& piece, float* input, int group) {
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        float* const of = input + b * INPUT_FLOATS;
        const float4* v = values_of(of, group);
        const float2 sums = *sums_of(of, group);
        const float low = dot4(piece.q[0], v[0]) + dot4(piece.q[0] + 4, v[32]);
        const float high = dot4(piece.q[1], v[64]) + dot4(piece.q[1] + 4, v[96]);
        dot[b] += piece.factor[0] * low - piece.rest[0] * sums.x;
        dot[b] += piece.factor[1] * high - piece.rest[1] * sums.y;
    }
}

// How many arrivals a barrier of `fetch_bytes` waits for.
static constexpr int FETCH_ARRIVALS = BULK ? 1 : 32;

// By a warp: bytes, a multiple of 16 as both addresses are, come to shared memory, and to the barrier when they are there.
__device__ __forceinline__ void fetch_bytes(u8* to, const u8* from, int bytes, u64* barrier) {
    const int lane = threadIdx.x % 32;
    const u32 arrived = shared_address(barrier);
#if BULK
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(bytes), "r"(arrived)
                     : "memory");
    }
#else
    for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_async(to + at, from + at);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrived) : "memory");
#endif
}

// By all threads, before a barrier of the block: what comes by `fetch_bytes` announces itself at these barriers.
__device__ __forceinline__ void init_fetches(u64* barriers, u32 count) {
    if (threadIdx.x < count) barrier_init(barriers + threadIdx.x, FETCH_ARRIVALS);
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
