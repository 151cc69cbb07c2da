// Y = X[:, active] W[:, active]^T for BATCH inputs that share their active columns: those that are active in any of
// them. The matrix lies as zigzag.cuh shows, and is read once for all.
//
// Grid: (SPLITS, groups); union.cuh says how they share the columns. On the tensor
// cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = q * scale, exact: up to 15 * 63, times 2^-24
//                    B [16 columns, 8]       = x d, n = input, as the sum of two float16
//
// Lane (g, t) = (lane / 4, lane % 4) holds bytes 16 g .. 16 g + 15 of four columns, which are rows of the sub-blocks 2
// (g / 2) and 2 (g / 2) + 1, and computes B for input g. Minima are a product of their own: A [sub-block, column] =
// min, B = x dmin. Sums: over the columns of a warp, the warps of a block, the blocks of a group, each in order.
//
// Macros: those of zigzag.cuh; BATCH 1 to 8

#ifndef WARPS
#define WARPS 8
#define STAGES 16
#define GROUP 2
#define DENSE 0
#define PRODUCERS 4
#define BATCH 8
#endif

#include "union.cuh"
#include "zigzag.cuh"

struct BatchSums {
    float low[8][4], high[8][4];  // of two bytes' nibbles
    float minimum[4];
};

// Two float16 of small integers: exact as they are, times 2^-24.
__device__ __forceinline__ u32 pair(u32 first, u32 second) { return first | second << 16; }

// The same as float16 of their value: such a one times a nibble in the lowest bits is exact, too.
__device__ __forceinline__ u32 numbers(u32 first, u32 second) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(pair(first, second) | 0x64006400), "r"(0x64006400));
    return c;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Add 16 columns. value: of the lane's input; scale: a power of two that brings x d into the range of float16.
__device__ __forceinline__ void multiply(BatchSums& sums, const u8* stage, const float* value, float scale) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, p = g / 2;
    uint4 q[4];
    u32 bits[4];
    float xd[4], xm[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + (i & 1) + 8 * (i >> 1);
        const uint4 h = *(const uint4*)(stage + column * PITCH);
        q[i] = *(const uint4*)(stage + column * PITCH + 16 + 16 * g);
        // Scale and minimum of sub-block 2 p, then of 2 p + 1: 24 bits at 24 p.
        bits[i] = __funnelshift_r(p == 0 ? h.y : p == 1 ? h.y : p == 2 ? h.z : h.w, p < 2 ? h.z : h.w, 24 * p & 31);
        const float x = value ? value[column] * scale : 0;
        xd[i] = x * half_to_float(h.x & 0xffff);
        xm[i] = x * half_to_float(h.x >> 16);
    }
    u32 b[2][2], m[2][2], scales[2][2], minima[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* d = xd + 2 * i;
        const float* e = xm + 2 * i;
        b[0][i] = two_halves(d[0], d[1]);
        b[1][i] = two_halves(d[0] - half_to_float(b[0][i] & 0xffff), d[1] - half_to_float(b[0][i] >> 16));
        m[0][i] = two_halves(e[0], e[1]);
        m[1][i] = two_halves(e[0] - half_to_float(m[0][i] & 0xffff), e[1] - half_to_float(m[0][i] >> 16));
        const u32 first = bits[2 * i], second = bits[2 * i + 1];
        scales[0][i] = numbers(first & 63, second & 63);
        scales[1][i] = numbers(first >> 12 & 63, second >> 12 & 63);
        minima[2 * i] = pair(first >> (6 + 12 * (g & 1)) & 63, second >> (6 + 12 * (g & 1)) & 63);
    }
    mma(sums.minimum, minima, m[0]);
    mma(sums.minimum, minima, m[1]);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4& one = q[i / 2 * 2];
            const uint4& two = q[i / 2 * 2 + 1];
            const int word = tile / 2, byte = tile % 2 * 2 + i % 2;
            const u32 first = word == 0 ? one.x : word == 1 ? one.y : word == 2 ? one.z : one.w;
            const u32 second = word == 0 ? two.x : word == 1 ? two.y : word == 2 ? two.z : two.w;
            const u32 both = __byte_perm(first, second, byte | (4 + byte) << 8 | byte << 4 | (4 + byte) << 12);
            low[i] = times(both & 0x000f000f, scales[0][i / 2]);
            high[i] = times(both & 0x00f000f0, scales[1][i / 2]);
        }
        mma(sums.low[tile], low, b[0]);
        mma(sums.high[tile], high, b[0]);
        mma(sums.low[tile], low, b[1]);
        mma(sums.high[tile], high, b[1]);
    }
}

// The 256 rows of a warp's band for each input into shared memory: [BATCH][256]. inverses: of the scales.
__device__ __forceinline__ void deposit(const BatchSums& sums, const float* inverses, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int input = 2 * t + i;
        // minimum[i]: sub-block g. This lane's rows are of the two of its pair.
        const float mine = sums.minimum[i] * NIBBLE;
        const float low = __shfl_sync(ALL_LANES, mine, (g & ~1) * 4 + t);
        const float high = __shfl_sync(ALL_LANES, mine, (g | 1) * 4 + t);
        if (input >= BATCH) continue;
        float* at = rows + input * BAND_ROWS + 64 * (g / 2) + 16 * (g & 1);
        const float inverse = inverses[input];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            *(float2*)(at + 2 * j) = make_float2(
                (sums.low[j][i] * NIBBLE - low) * inverse, (sums.low[j][2 + i] * NIBBLE - low) * inverse);
            *(float2*)(at + 32 + 2 * j) = make_float2(
                (sums.high[j][i] * (NIBBLE / 16) - high) * inverse,
                (sums.high[j][2 + i] * (NIBBLE / 16) - high) * inverse);
        }
    }
}

// The output row of a group's row, or -1 for padding. half: bands of gate, where each group has as many of gate as of
// up.
__device__ __forceinline__ int row_of(int group, int r, int half, int rows) {
    if (!half) return group * ROWS + r < rows ? group * ROWS + r : -1;
    const int slot = r / BAND_ROWS, each = GROUP / 2, band = group * each + slot % each;
    return band < half ? (band + slot / each * half) * BAND_ROWS + r % BAND_ROWS : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * PRODUCERS, 1) zigzag_batch(
    const u8* __restrict__ blocks, int columns, int rows, int half, float largest_d,
    // x [BATCH][columns]; counts [columns / 256, rounded up], of columns that are active in any of them
    const float* x, const float* threshold, int per_channel, const float* offset, const int* counts,
    // y [BATCH][rows] = product + constant + added
    float* y, const float* constant, const float* added,
    // sums of active columns; where blocks meet: [groups][splits][BATCH][ROWS], zeros [groups]
    u64* active, float* partials, u32* tickets) {
    extern __shared__ uint4 memory[];
    __shared__ float peaks[WARPS], scales[8], inverses[8];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ int plan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % GROUP, set = warp / GROUP;
    const int split = blockIdx.x, splits = gridDim.x, group = blockIdx.y;
    const bool brings = warp >= WARPS;

    // ring [STAGES], later sums [WARPS][BATCH][256]; values [BATCH]; indices
    u8* ring = (u8*)memory;
    float* own = (float*)memory;
    constexpr int RING = STAGES * STAGE_BYTES, OWN = WARPS * BATCH * BAND_ROWS * 4, FIRST = RING > OWN ? RING : OWN;
    Part part;
    part.stride = ((columns + COLUMNS - 1) / COLUMNS + splits - 1) / splits * COLUMNS;
    part.value = (float*)(ring + FIRST);
    part.index = (u32*)(part.value + BATCH * part.stride);

    let_next_begin();
    const Site site{x, columns, threshold, per_channel, offset};
    Stream stream{blocks + (u64)group * columns * COLUMN_BYTES, ring, full, empty, (int*)part.index};
    if (brings) stream.set_up();
    __syncthreads();
#if DENSE
    part.divide(columns);
    stream.column = part.first;
    stream.step = 32;
    stream.last = columns - 1;
    stream.units = part.units;
#endif
    if (!brings) {
        const float limit = threshold && !per_channel ? *threshold : 0;
        after_previous();
#if DENSE
        float peak = every<WARPS, BATCH>(site, part);
#else
        float peak = counted<WARPS, BATCH>(site, limit, counts, part);
#endif
        part.fill_up(BATCH);
        peak = warp_max(peak);
        if (lane == 0) peaks[warp] = peak;
        if (threadIdx.x == 0) plan = part.units;
    }
#if DENSE
    if (!brings) sync_first<THREADS>();
#else
    __syncthreads();
    stream.units = plan;
#endif
    if (brings) {
        stream.run();
        return;
    }

    // Each input has a scale of its own: the largest of them must not cost the others their precision.
    if (warp < BATCH) {
        for (int b = warp; b < BATCH; b += WARPS) {
            float largest = 0;
            for (int i = lane; i < part.units * COLUMNS; i += 32)
                largest = fmaxf(largest, fabsf(part.value[b * part.stride + i]));
            const int exponent = exponent_for(warp_max(largest) * largest_d);
            if (lane == 0) {
                scales[b] = power_of_two(exponent);
                inverses[b] = power_of_two(-exponent);
            }
        }
    }
    sync_first<THREADS>();
    const int input = lane / 4;
    const float scale = input < BATCH ? scales[input] : 0;
    BatchSums sums = {};
#pragma unroll 1
    for (int i = set; i < part.units; i += SETS) {
        const int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        multiply(sums, ring + stage * STAGE_BYTES + band * BLOCK_BYTES,
            input < BATCH ? part.value + input * part.stride + i * COLUMNS : nullptr, scale);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
    }
    sync_first<THREADS>();  // the ring is read
    deposit(sums, inverses, own + warp * BATCH * BAND_ROWS);
    sync_first<THREADS>();

    for (int i = threadIdx.x; i < BATCH * ROWS; i += THREADS) {
        const int b = i / ROWS, r = i % ROWS, row = row_of(group, r, half, rows);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < SETS; ++w)
            sum += own[((w * GROUP + r / BAND_ROWS) * BATCH + b) * BAND_ROWS + r % BAND_ROWS];
        if (splits > 1) {
            partials[((u64)group * splits + split) * BATCH * ROWS + i] = sum;
        } else if (row >= 0) {
            if (constant) sum += constant[row];
            y[(u64)b * rows + row] = added ? sum + fresh(added + (u64)b * rows + row) : sum;
        }
    }
    if (active && split + group == 0 && threadIdx.x == 0) *active += part.count;
    if (splits == 1) return;
    __shared__ int last;
    sync_first<THREADS>();
    if (threadIdx.x == 0) {
        last = arrive_at(tickets + group) == splits - 1;
        if (last) tickets[group] = 0;
    }
    sync_first<THREADS>();
    if (!last) return;
    for (int i = threadIdx.x; i < BATCH * ROWS; i += THREADS) {
        const int b = i / ROWS, row = row_of(group, i % ROWS, half, rows);
        if (row < 0) continue;
        float sum = 0;
#pragma unroll 8
        for (int s = 0; s < splits; ++s) sum += fresh(partials + ((u64)group * splits + s) * BATCH * ROWS + i);
        if (constant) sum += constant[row];
        y[(u64)b * rows + row] = added ? sum + fresh(added + (u64)b * rows + row) : sum;
    }
}
