// What calibrating counts of the vectors that enter a site, all in one read of them.
//
//     x        [tokens, columns]     F32, F16 or BF16; token t is row t % SEEN of window t / SEEN, whose rows lie
//                                    `window` rows behind those of the one before
//     norms    float32 [columns]     c of the criterion column-norm
//     counts   u64 [2, BINS]         added to: histograms of |x| and of |x| * c, by the bins of
//                                    calibrate/histogram.py
//     squares  float64 [ceil(tokens / ROWS), columns]   sums of x * x over ROWS tokens
//     active   u64 [columns]         added to, or null: tokens for which a column is not zero
//     each     u32 [tokens]          added to, or null: columns that are not zero for a token
//
// Launch: as many blocks as run at once, in y one for each set of CRITERIA. A block goes through tiles of ROWS tokens and
// STRIP columns; a warp takes every WARPS-th token of a tile, a lane eight columns of it. Histograms lie in shared memory
// and are added to those of all blocks at the end. Zeros are not counted: they are what the other bins lack of all values.
// Sums of squares are added in the same order whatever the GPU.
//
// Macros: INPUT (common/eight.cuh); CRITERIA: histograms of a block, 2 or 1; ACTIVE: whether active and each are counted

#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int WARPS = 32, STRIP = 256, ROWS = 256;
// A value's bits, from those of the second bin's lower edge on, are cut after eight bits behind the first one.
static constexpr int CUT = 23 - 8, PLACES = 64 << 8, BINS = 1 + PLACES;
static constexpr u32 FIRST = (127 - 40) << 23, SPAN = PLACES << CUT;
// A value of BF16 has seven such bits: every second place stays empty and has no word, but for the last one, where all
// that is larger is counted. Where a block has one criterion, its only histogram has a word for each place.
static constexpr bool HALVES = INPUT == 2 && CRITERIA == 2;
static constexpr int SIZES = CRITERIA == 1 ? 0 : HALVES ? PLACES / 2 + 4 : PLACES;
static constexpr int WORDS = SIZES + PLACES;
static_assert(ROWS / WARPS < 16, "how many of a warp's tokens have a column fits in four bits");

// Count what lies within the span, so far from FIRST.
template <bool OF_HALVES>
__device__ __forceinline__ void count(u32* histogram, u32 distance) {
    const u32 bytes = OF_HALVES ? distance >> CUT - 1 : distance >> CUT - 2 & ~3u;  // of halves, the last bits are zero
    atomicAdd((u32*)((u8*)histogram + bytes), 1u);
}
// Count anything that is not a zero, or a number that float32 barely tells from it.
template <bool OF_HALVES>
__device__ __forceinline__ void count_any(u32* histogram, u32 distance) {
    const u32 bits = distance + FIRST;
    const u32 place = min(max(bits, FIRST) - FIRST, SPAN - 1) >> CUT;
    if (bits >> CUT) atomicAdd(histogram + (OF_HALVES ? (place + 1) / 2 : place), 1u);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    site_counts(const u8* __restrict__ x, int tokens, int columns, int seen, int window,
                const float* __restrict__ norms, u64* __restrict__ counts, double* __restrict__ squares,
                u64* __restrict__ active, u32* __restrict__ each) {
    extern __shared__ __align__(16) u32 shared[];  // WORDS, then WARPS * STRIP
    u32 *const of_sizes = shared, *const of_scores = shared + SIZES, *const staged = shared + WORDS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < WORDS; i += WARPS * 32) shared[i] = 0;
    __syncthreads();
    wait_for_previous();

    constexpr int ELEMENT = INPUT == 0 ? 4 : 2;
    const bool aligned = ((u64)x | (u64)columns * ELEMENT) % 16 == 0;
    const bool first_set = blockIdx.y == 0;
    const int strips = (columns + STRIP - 1) / STRIP, chunks = (tokens + ROWS - 1) / ROWS;
    const long long row = (long long)columns * ELEMENT;
    u32 values = 0;
    for (int tile = blockIdx.x; tile < strips * chunks; tile += gridDim.x) {
        const int chunk = tile / strips, left = tile % strips * STRIP, column = left + lane * 8;
        const int first = chunk * ROWS, last = min(first + ROWS, tokens);
        values += (u32)(last - first) * min(STRIP, columns - left);
        float c[8], square[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            c[i] = column + i >= columns ? 0 : CRITERIA == 1 && first_set ? 1 : __ldg(norms + column + i);
            square[i] = 0;
        }
        u32 nonzero = 0;  // tokens, four bits for each column
        int token = first + warp, within = token % seen;
        const u8* at = x + ((long long)(token / seen) * window + within) * row;
        Eight next;
        if (token < last) next.load(at, column, columns, aligned);
        for (; token < last; token += WARPS) {
            Eight v = next;
#pragma unroll
            for (u32& word : v.word) word &= INPUT == 0 ? 0x7fffffff : 0x7fff7fff;  // without signs
            at += WARPS * row;
            for (within += WARPS; within >= seen; within -= seen) at += (window - seen) * row;
            if (token + WARPS < last) next.load(at, column, columns, aligned);
            u32 size[8], score[8], all = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float magnitude = v[i];
                size[i] = __float_as_uint(magnitude) - FIRST;
                score[i] = __float_as_uint(__fmul_rn(magnitude, c[i])) - FIRST;
                all |= score[i] | (CRITERIA == 2 ? size[i] : 0);
                square[i] = __fmaf_rn(magnitude, magnitude, square[i]);
            }
            u32 alive = 8;
            if (all < SPAN) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (CRITERIA == 2) count<HALVES>(of_sizes, size[i]);
                    count<false>(of_scores, score[i]);
                }
                nonzero += 0x11111111;
            } else {
                alive = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (CRITERIA == 2) count_any<HALVES>(of_sizes, size[i]);
                    count_any<false>(of_scores, score[i]);
                    if (ACTIVE && size[i] + FIRST) ++alive, nonzero += 1 << 4 * i;
                }
            }
            if (ACTIVE && first_set) {
                alive = __reduce_add_sync(ALL_LANES, alive);
                if (lane == 0 && alive) atomicAdd(each + token, alive);
            }
        }
        if (first_set) {
            const int to = left + threadIdx.x;
            const bool mine = threadIdx.x < STRIP && to < columns;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                ((float4*)staged)[(warp * STRIP + lane * 8 + i) / 4] =
                    make_float4(square[i], square[i + 1], square[i + 2], square[i + 3]);
            __syncthreads();
            if (mine) {
                double sum = 0;
#pragma unroll 8
                for (int w = 0; w < WARPS; ++w) sum += ((const float*)staged)[w * STRIP + threadIdx.x];
                squares[(u64)chunk * columns + to] = sum;
            }
            if (ACTIVE) {
                __syncthreads();
                staged[threadIdx.x] = nonzero;
                __syncthreads();
                u32 found = 0;
                if (mine) {
#pragma unroll 8
                    for (int w = 0; w < WARPS; ++w)
                        found += staged[w * 32 + threadIdx.x / 8] >> 4 * (threadIdx.x % 8) & 15;
                }
                if (found) atomic_add(active + to, found);
            }
        }
    }
    __syncthreads();
    u64* const to = counts + (u64)blockIdx.y * BINS;
    u32 missing[CRITERIA] = {};
    for (int i = threadIdx.x; i < WORDS; i += WARPS * 32) {
        const u32 found = shared[i];
        if (!found) continue;
        if (i < SIZES)
            atomic_add(to + 1 + (HALVES ? min(2 * i, PLACES - 1) : i), found), missing[0] -= found;
        else
            atomic_add(to + (CRITERIA - 1) * BINS + 1 + i - SIZES, found), missing[CRITERIA - 1] -= found;
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int n = 0; n < CRITERIA; ++n) missing[n] += values;
    }
#pragma unroll
    for (int n = 0; n < CRITERIA; ++n) {
        const u32 all = __reduce_add_sync(ALL_LANES, missing[n]);
        // Modulo 2^64 the warps' shares add up, whichever is below zero.
        if (lane == 0 && all) atomic_add(to + n * BINS, (u64)(long long)(int)all);
    }
}
