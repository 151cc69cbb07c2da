// The tokens that score best, by the blocks of a cluster: Double Sparsity's top-k, exact and the same every run.
//
// Each block has the scores of its segment of the tokens in shared memory; segments follow each other in the order of
// the blocks. The lowest score that is read is found bit by bit: BITS of it a round, in which every block counts its
// tokens that reach each candidate. Of tokens with that very score the earliest are read.
//
//     scores  bfloat16, compared as floats; ALWAYS is above all others, NOT_SEEN (a NaN) reaches nothing
//     ranks   their bits in such an order that integers compare as they do; 0 is none of theirs

#pragma once

#include "attention/attention_layout.cuh"
#include "common/cluster.cuh"

static constexpr u16 ALWAYS = 0x7f80, NOT_SEEN = 0xffff;
#ifndef SEARCH_BITS
#define SEARCH_BITS (CLUSTER == 1 ? 2 : 4)  // fewer rounds where each waits for other blocks
#endif
static constexpr int BITS = SEARCH_BITS;
static constexpr int ROUNDS = 16 / BITS;
static constexpr int CANDIDATES = (1 << BITS) - 1;
static constexpr int ABREAST_TOKENS = 8;  // of a thread at a time: 16 bytes of scores

__device__ __forceinline__ u32 rank_of(u32 bits) { return bits & 0x8000 ? bits ^ 0xffff : bits | 0x8000; }
__device__ __forceinline__ u32 bits_of(u32 rank) { return rank & 0x8000 ? rank & 0x7fff : rank ^ 0xffff; }

// The number of the scores in some words that reach a candidate, which is in both halves of `bound`.
struct Reaching {
    u32 counts = 0;
    __device__ __forceinline__ void add(u32 word, u32 bound) {
#if __CUDA_ARCH__ >= 900
        u32 reached;
        asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(reached) : "r"(word), "r"(bound));
        // Exact up to 256 in each half: a thread has 256 pairs of scores at most, of 65,536 tokens and 128 threads.
        asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(counts) : "r"(reached));
#else
        const float limit = bfloat_to_float((u16)bound);
        counts += (bfloat_to_float((u16)word) >= limit) + (__uint_as_float(word & 0xffff0000) >= limit);
#endif
    }
    __device__ __forceinline__ int total() const {
#if __CUDA_ARCH__ >= 900
        return (int)bfloat_to_float((u16)counts) + (int)__uint_as_float(counts & 0xffff0000);
#else
        return (int)counts;
#endif
    }
};

struct TokenSelection {
    int counts[ROUNDS][CANDIDATES];  // of this block
    int block_counts[ROUNDS][CLUSTER][CANDIDATES];
    int warp_above[WARPS], warp_equal[WARPS];
    int block_above[CLUSTER], block_equal[CLUSTER];

    // By all threads, a barrier before `lowest`.
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < ROUNDS * CANDIDATES) counts[0][threadIdx.x] = 0;
    }

    // The rank of the `budget`-th best score of all blocks; 0 where so many are not seen.
    __device__ __forceinline__ u32 lowest(const u16* scores, int padded, int budget) {
        const int lane = threadIdx.x % 32;
        u32 found = 0;
#pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            const int shift = 16 - BITS * (round + 1);
            u32 bounds[CANDIDATES];
            Reaching reaching[CANDIDATES];
#pragma unroll
            for (int j = 0; j < CANDIDATES; ++j) bounds[j] = bits_of(found | (j + 1) << shift) * 0x10001;
#pragma unroll 4
            for (int i = threadIdx.x * ABREAST_TOKENS; i < padded; i += THREADS * ABREAST_TOKENS) {
                const uint4 v = *(const uint4*)(scores + i);
#pragma unroll
                for (int j = 0; j < CANDIDATES; ++j) {
                    reaching[j].add(v.x, bounds[j]), reaching[j].add(v.y, bounds[j]);
                    reaching[j].add(v.z, bounds[j]), reaching[j].add(v.w, bounds[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < CANDIDATES; ++j) {
                const int count = __reduce_add_sync(ALL_LANES, reaching[j].total());
                if (lane == j) atomicAdd(&counts[round][j], count);
            }
            __syncthreads();
#if CLUSTER > 1
            if (threadIdx.x < CLUSTER * CANDIDATES) {
                const int to = threadIdx.x / CANDIDATES, j = threadIdx.x % CANDIDATES;
                store_there(address_of_block(&block_counts[round][block_in_cluster()][j], to), counts[round][j]);
            }
            sync_cluster();
#endif
            int reached = 0;  // candidates that enough tokens reach: the lowest ones
#pragma unroll
            for (int j = 0; j < CANDIDATES; ++j) {
#if CLUSTER > 1
                int count = 0;
#pragma unroll
                for (int r = 0; r < CLUSTER; ++r) count += block_counts[round][r][j];
#else
                const int count = counts[round][j];
#endif
                reached += count >= budget;
            }
            found |= reached << shift;
        }
        return found;
    }

    // The tokens to read, in ascending order: this block's in `list`, numbered within its segment.
    //
    // starts -- where each block's begin among all of them, and behind the last how many there are
    __device__ __forceinline__ void list_tokens(const u16* scores, int padded, u32 found, int budget, u16* list,
                                                int (&starts)[CLUSTER + 1]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = block_in_cluster();
        constexpr int STEP_TOKENS = 32 * ABREAST_TOKENS;
        const int each = (padded + WARPS * STEP_TOKENS - 1) / (WARPS * STEP_TOKENS) * STEP_TOKENS;
        const int begin = min(warp * each, padded), end = min(begin + each, padded);
        // Bits of the tokens of a lane that rank above `found`, and of those that equal it.
        const auto compare = [&](int i, u32& above, u32& equal) {
            above = equal = 0;
            if (i >= end) return;
            const uint4 v = *(const uint4*)(scores + i);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int n = 0; n < ABREAST_TOKENS; ++n) {
                const u32 other = rank_of(words[n / 2] >> 16 * (n % 2) & 0xffff);
                above |= (other > found) << n;
                equal |= (other == found && found) << n;
            }
        };
        int above_here = 0, equal_here = 0;
#pragma unroll 4
        for (int i = begin; i < end; i += STEP_TOKENS) {
            u32 above, equal;
            compare(i + lane * ABREAST_TOKENS, above, equal);
            above_here += __popc(above), equal_here += __popc(equal);
        }
        above_here = __reduce_add_sync(ALL_LANES, above_here);
        equal_here = __reduce_add_sync(ALL_LANES, equal_here);
        if (lane == 0) warp_above[warp] = above_here, warp_equal[warp] = equal_here;
        __syncthreads();
        int block_a = 0, block_e = 0, prefix_a = 0, prefix_e = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w == warp) prefix_a = block_a, prefix_e = block_e;
            block_a += warp_above[w], block_e += warp_equal[w];
        }
#if CLUSTER > 1
        if (threadIdx.x < CLUSTER) {
            store_there(address_of_block(&block_above[rank], threadIdx.x), block_a);
            store_there(address_of_block(&block_equal[rank], threadIdx.x), block_e);
        }
        sync_cluster();
#else
        if (threadIdx.x == 0) block_above[0] = block_a, block_equal[0] = block_e;
        __syncthreads();
#endif
        int all_above = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) all_above += block_above[r];
        const int left = budget - all_above;  // to be taken of those that equal it
        int a = 0, e = 0;
#pragma unroll
        for (int r = 0; r <= CLUSTER; ++r) {
            starts[r] = a + min(e, left);
            if (r == rank) prefix_a += a, prefix_e += e;
            if (r < CLUSTER) a += block_above[r], e += block_equal[r];
        }
        u16* to = list;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            if (r == rank) to -= starts[r];
        }
#pragma unroll 4
        for (int i = begin; i < end; i += STEP_TOKENS) {
            u32 above, equal;
            compare(i + lane * ABREAST_TOKENS, above, equal);
            const u32 own = __popc(above) | __popc(equal) << 16;
            u32 through = own;  // sums over lanes up to this one, of both in one word
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(ALL_LANES, through, step);
                if (lane >= step) through += other;
            }
            const u32 all = __shfl_sync(ALL_LANES, through, 31), before = through - own;
            int at_a = prefix_a + (before & 0xffff), at_e = prefix_e + (before >> 16);
            for (u32 either = above | equal; either; either &= either - 1) {
                const int n = __ffs(either) - 1;
                const bool is_above = above >> n & 1;
                if (is_above || at_e < left) to[at_a + min(at_e, left)] = u16(i + lane * ABREAST_TOKENS + n);
                at_a += is_above, at_e += !is_above;
            }
            prefix_a += all & 0xffff, prefix_e += all >> 16;
        }
    }
};
