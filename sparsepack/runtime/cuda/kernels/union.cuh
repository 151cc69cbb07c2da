// Which columns are active in any of several inputs, and how each block of their product finds its part of them.
//
// A product has a grid of (SPLITS, groups) blocks: SPLITS of them share the columns of the same rows. The active
// columns, in ascending order, are counted in units of 16, and the units divided evenly among the SPLITS, whatever
// columns they are. A block leaves the columns of its units in shared memory, with their input values; the last unit is
// filled up by some column with value 0. A kernel before has counted the active columns of each 256, so that a block
// reads only what it needs. (Products with one input deal their columns out: deal.cuh.)

#pragma once

#include "units.cuh"

// Macros, so that kernels stay small (a cold one waits for its instructions): ALIGNED 1: inputs and offsets begin at
// multiples of 16 bytes, and 4 divides the columns; OFFSET 0, PER_CHANNEL 0: there is none
#ifndef ALIGNED
#define ALIGNED 0
#endif
#ifndef OFFSET
#define OFFSET 1
#endif
#ifndef PER_CHANNEL
#define PER_CHANNEL 1
#endif

static constexpr int CHUNK = 256;    // columns that are counted together

// What a site does with its inputs, float32 [..][columns].
struct Site {
    const float* x;
    int columns;
    const float* threshold;  // [1] or [columns], or null: every column is active
    int per_channel;
    const float* offset;     // [columns] or null
};

// A block's part of the active columns. Entry i is column index[i]; input b has value[b * stride + i] there.
struct Part {
    u32* index;
    float* value;
    int stride;  // at least units * 16
    int count;   // active columns in all
    int first;   // entry of the list with which the part begins
    int units;

    __device__ __forceinline__ void divide(int active) {
        count = active;
        const int all = (active + COLUMNS - 1) / COLUMNS, split = blockIdx.x, splits = gridDim.x;
        first = all * split / splits;
        units = all * (split + 1) / splits - first;
        first *= COLUMNS;
    }

    // Does it have any of these entries of the list?
    __device__ __forceinline__ bool has(int begin, int end) const {
        return begin < end && end > first && begin < first + units * COLUMNS;
    }

    __device__ __forceinline__ void put(int entry, int k, float v, int b = 0) const {
        const int i = entry - first;
        if (i >= 0 && i < units * COLUMNS) {
            index[i] = k;
            value[b * stride + i] = v;
        }
    }

    // Up to a whole unit.
    __device__ __forceinline__ void fill_up(int inputs = 1) const {
        if (threadIdx.x >= COLUMNS) return;
        for (int b = 0; b < inputs; ++b) put(count + threadIdx.x, 0, 0, b);
    }
};

// Four neighbouring inputs, 0 beyond the last.
__device__ __forceinline__ float4 four(const float* x, int k, int columns) {
#if ALIGNED
    if (k >= columns) return make_float4(0, 0, 0, 0);
    return fresh((const float4*)(x + k));
#else
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = k + j < columns ? fresh(x + k + j) : 0;
    return make_float4(v[0], v[1], v[2], v[3]);
#endif
}

// The active columns of inputs [INPUTS][columns] whose chunks of 256 the kernel before has counted: only the chunks
// that matter are read. A column is active where it is in any of the inputs. Returns the largest magnitude that the
// thread has seen, as the next ones do.
template <int BLOCK_WARPS, int INPUTS = 1> __device__ __forceinline__ float counted(
    const Site& site, float limit, const int* counts, Part& part) {
    static constexpr int EACH = 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = (site.columns + CHUNK - 1) / CHUNK;
    // Every warp adds up all counts, 128 at a time, and remembers where its own chunks begin.
    int total = 0;
    for (int from = 0; from < chunks; from += 32 * EACH) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int c = from + i * 32 + lane;
            if (c < chunks) total += fresh(counts + c);
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
    part.divide(total);
    int start = 0, mine = 0;
    float peak = 0;
    for (int from = 0; from < chunks; from += 32) {
        const int own = from + lane < chunks ? fresh(counts + from + lane) : 0;
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += left;
        }
        const int begin = start + sum - own, end = start + sum;
        u32 touched = __ballot_sync(ALL_LANES, part.has(begin, end));
        start += __shfl_sync(ALL_LANES, sum, 31);
        for (; touched; touched &= touched - 1, ++mine) {
            if (mine % BLOCK_WARPS != warp) continue;
            const int c = __ffs(touched) - 1;
            int at = __shfl_sync(ALL_LANES, begin, c);
#pragma unroll
            for (int r = 0; r < CHUNK / 128; ++r) {
                const int k = (from + c) * CHUNK + r * 128 + 4 * lane;
                float w[INPUTS][4];
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) {
                    const float4 v = four(site.x + (u64)b * site.columns, k, site.columns);
                    w[b][0] = v.x, w[b][1] = v.y, w[b][2] = v.z, w[b][3] = v.w;
                }
                u32 masks[4];
                int sum = 0, i = at;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    bool is = false;
                    if (k + j < site.columns) {
                        const float least = PER_CHANNEL && site.per_channel ? site.threshold[k + j] : limit;
#pragma unroll
                        for (int b = 0; b < INPUTS; ++b) {
                            if (OFFSET && site.offset) w[b][j] -= site.offset[k + j];
                            peak = fmaxf(peak, fabsf(w[b][j]));
                            is |= fabsf(w[b][j]) > least;
                        }
                    }
                    masks[j] = __ballot_sync(ALL_LANES, is);
                    i += before(masks[j]);
                    sum += __popc(masks[j]);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (!(masks[j] >> lane & 1)) continue;
#pragma unroll
                    for (int b = 0; b < INPUTS; ++b) part.put(i, k + j, w[b][j], b);
                    ++i;
                }
                at += sum;
            }
        }
    }
    return peak;
}

// Every column of inputs [INPUTS][columns] that are taken as they are.
template <int BLOCK_WARPS, int INPUTS = 1>
__device__ __forceinline__ float every(const Site& site, const Part& part) {
    float peak = 0;
    for (int i = threadIdx.x; i < part.units * COLUMNS && part.first + i < part.count; i += BLOCK_WARPS * 32) {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            const float v = fresh(site.x + (u64)b * site.columns + part.first + i);
            part.value[b * part.stride + i] = v;
            peak = fmaxf(peak, fabsf(v));
        }
    }
    return peak;
}
