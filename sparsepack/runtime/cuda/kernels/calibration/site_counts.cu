// What calibrating counts of the vectors that enter a site, all in one read of them.
//
//     x        [tokens, columns]     F32, F16 or BF16; token t is row t % SEEN of window t / SEEN, whose rows lie
//                                    `window` rows behind those of the one before
//     norms    float32 [columns]     c of the criterion column-norm
//     counts   u64 [2, BINS]         added to: histograms of |x| and of |x| * c, by the bins of
//                                    calibration/collectors/histogram.py
//     squares  float64 [ceil(tokens / ROWS), columns]   sums of x * x over ROWS tokens
//     active   u64 [columns]         added to, or null: tokens for which a column is not zero
//     each     u32 [tokens]          added to, or null: columns that are not zero for a token
//
// Launch: as many blocks as run at once, in y one for each set of CRITERIA. A block goes through tiles of ROWS tokens and
// STRIP columns; a warp takes every WARPS-th token of a tile, a lane eight columns of it. Histograms lie in shared memory
// and are added to those of all blocks at the end. Zeros are counted in registers: in a ReLU's outputs they are most.
// Sums of squares are added in the same order whatever the GPU.
//
// Macros: INPUT (common/eight.cuh); CRITERIA: histograms of a block, 2 or 1; ACTIVE: whether active and each are counted

#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int WARPS = 32, STRIP = 256, ROWS = 256, STAGED = 8;
static constexpr int PARTS_BITS = 8, BINS = 1 + (64 << PARTS_BITS), OFFSET = (127 - 40) << PARTS_BITS;

// A value of BF16 has seven bits behind the first one: every second bin stays empty, so bins lie in shared memory in
// another order, in which those that are used fall into all banks.
__device__ __forceinline__ int placed(int bin) { return INPUT == 2 ? bin / 2 + bin % 2 * ((BINS + 1) / 2) : bin; }

__device__ __forceinline__ void count(u32* histogram, u32* zeros, float size) {
    const int place = (int)(__float_as_uint(size) >> (23 - PARTS_BITS));
    if (place == 0)
        ++*zeros;
    else
        atomicAdd(histogram + placed(1 + min(max(place - OFFSET, 0), BINS - 2)), 1u);
}

// The sums over a block's warps of what their lanes hold of a strip's columns; thread t < STRIP gets column t's.
template <typename T, typename Total>
__device__ __forceinline__ Total over_warps(const T* own, T* staged) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Total total = 0;
    for (int first = 0; first < WARPS; first += STAGED) {
        __syncthreads();
        if (warp >= first && warp < first + STAGED) {
#pragma unroll
            for (int i = 0; i < 8; ++i) staged[(warp - first) * STRIP + lane * 8 + i] = own[i];
        }
        __syncthreads();
        if (threadIdx.x < STRIP) {
#pragma unroll
            for (int w = 0; w < STAGED; ++w) total += (Total)staged[w * STRIP + threadIdx.x];
        }
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    site_counts(const u8* __restrict__ x, int tokens, int columns, int seen, int window,
                const float* __restrict__ norms, u64* __restrict__ counts, double* __restrict__ squares,
                u64* __restrict__ active, u32* __restrict__ each) {
    extern __shared__ __align__(16) u32 shared[];  // CRITERIA * BINS, then STAGED * STRIP
    u32* const staged = shared + (CRITERIA * BINS + 3) / 4 * 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < CRITERIA * BINS; i += WARPS * 32) shared[i] = 0;
    __syncthreads();
    wait_for_previous();

    constexpr int ELEMENT = INPUT == 0 ? 4 : 2;
    const bool aligned = ((u64)x | (u64)columns * ELEMENT) % 16 == 0;
    const bool first_set = blockIdx.y == 0;
    const int strips = (columns + STRIP - 1) / STRIP, chunks = (tokens + ROWS - 1) / ROWS;
    u32 zeros[2] = {0, 0};
    for (int tile = blockIdx.x; tile < strips * chunks; tile += gridDim.x) {
        const int chunk = tile / strips, column = tile % strips * STRIP + lane * 8;
        const int there = min(max(columns - column, 0), 8), last = min((chunk + 1) * ROWS, tokens);
        float c[8], square[8];
        u32 nonzero[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            c[i] = i < there ? __ldg(norms + column + i) : 0;
            square[i] = 0, nonzero[i] = 0;
        }
#pragma unroll 2
        for (int token = chunk * ROWS + warp; token < last; token += WARPS) {
            const u64 row = (u64)(token / seen) * window + token % seen;
            Eight v;
            v.load(x + row * columns * ELEMENT, column, columns, aligned);
            u32 alive = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < there) {
                    const float size = fabsf(v[i]);
                    if (CRITERIA == 2 || first_set) count(shared, zeros, size);
                    if (CRITERIA == 2)
                        count(shared + BINS, zeros + 1, __fmul_rn(size, c[i]));
                    else if (!first_set)
                        count(shared, zeros, __fmul_rn(size, c[i]));
                    if (first_set) {
                        square[i] = __fmaf_rn(size, size, square[i]);
                        if (ACTIVE) nonzero[i] += size != 0, alive += size != 0;
                    }
                }
            }
            if (ACTIVE && first_set) {
                alive = __reduce_add_sync(ALL_LANES, alive);
                if (lane == 0 && alive) atomicAdd(each + token, alive);
            }
        }
        if (first_set) {
            const int at = tile % strips * STRIP + threadIdx.x;
            const double sum = over_warps<float, double>(square, (float*)staged);
            if (threadIdx.x < STRIP && at < columns) squares[(u64)chunk * columns + at] = sum;
            if (ACTIVE) {
                const u32 found = over_warps<u32, u32>(nonzero, staged);
                if (threadIdx.x < STRIP && at < columns && found) atomic_add(active + at, found);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < CRITERIA; ++n) {
        const u32 all = __reduce_add_sync(ALL_LANES, zeros[n]);
        if (lane == 0 && all) atomicAdd(shared + n * BINS, all);
    }
    __syncthreads();
    u64* const to = counts + (u64)blockIdx.y * BINS;
    for (int i = threadIdx.x; i < CRITERIA * BINS; i += WARPS * 32) {
        const u32 found = shared[i / BINS * BINS + placed(i % BINS)];
        if (found) atomic_add(to + i, found);
    }
}
