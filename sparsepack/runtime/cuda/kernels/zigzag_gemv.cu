// y = W[:, active] x[active] for a matrix in zigzag Q4_K (SpQt, section 4.2.2), which lies as zigzag.cuh shows.
//
// Grid: (SPLITS, groups), as many blocks as run at once; active.cuh says how they share the columns. On the tensor
// cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = the nibbles, as float16 with nothing but their lowest bits: q 2^-24
//                    B [16 columns, 8]       = x d scale[n], n = sub-block
//
// Lane (g, t) = (lane / 4, lane % 4) holds bytes 16 g .. 16 g + 15 of four columns; they belong to the sub-blocks 2 (g
// / 2) and 2 (g / 2) + 1, and the result counts for these two n, that is, in the lanes with t = g / 2. B holds even
// sub-blocks for low nibbles and odd ones for high nibbles, so that both add up in the same registers. x d scale is the
// sum of two float16, so that the product is as exact as float32.
//
// Sums: over the columns of a warp, then over the warps of a block, then over the blocks that share a group, each in
// order: the same bits every run. From sm_90 on these blocks are a cluster and send their sums to its first one;
// before, or where CLUSTERS is 0, they leave them in `partials`, and the last to come adds them up.
//
// Macros: those of zigzag.cuh
//         GATE 1: the first half of a group's bands is of gate, the second of up; activation(gate) * up is written
//         SOURCE: where the active columns come from; ROUNDS, ALIGNED, OFFSET, PER_CHANNEL: see active.cuh

#include "activations.cuh"

#define WHOLE 0    // each block compares the whole input
#define COUNTED 1  // the kernel before has counted them in chunks of 256
#define LISTED 2   // they are listed

#ifndef WARPS
#define WARPS 8
#define STAGES 4
#define GROUP 4
#define GATE 0
#define DENSE 0
#define SOURCE WHOLE
#define ROUNDS 4
#define PRODUCERS 4
#endif

#include "zigzag.cuh"

struct Sums {
    float c[8][4];
    float minimum;
};

// Where a header has a lane's sub-block.
struct Bits {
    int shift;
    bool second, third;  // the word in which its twelve bits begin

    __device__ __forceinline__ explicit Bits(int sub) : shift(12 * sub & 31), second(sub >= 3), third(sub >= 6) {}

    // As float, exactly.
    __device__ __forceinline__ static float number(u32 bits) { return __uint_as_float(bits | 0x4b000000) - 8388608.0f; }

    __device__ __forceinline__ void take(const uint4& h, float& scale, float& minimum) const {
        const u32 both = __funnelshift_r(third ? h.w : second ? h.z : h.y, second ? h.w : h.z, shift);
        scale = number(both & 63);
        minimum = number(both >> 6 & 63);
    }
};

// Two words of each column's 16 bytes: four tiles of 16 rows, each in the low and in the high nibbles. Products into
// the same sums stand four apart, since each waits for the one before.
__device__ __forceinline__ void tiles(
    float (*c)[4], const u32 (&q)[2][4], const u32 (&even)[2][2], const u32 (&odd)[2][2]) {
    u32 low[4][4], high[4][4];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Column pair i / 2, row i % 2 of the tile's two.
                const u32 first = q[w][i / 2 * 2], second = q[w][i / 2 * 2 + 1];
                const int byte = 2 * half + i % 2;
                const u32 both = __byte_perm(first, second, byte | (4 + byte) << 8 | byte << 4 | (4 + byte) << 12);
                low[2 * w + half][i] = both & 0x000f000f;
                high[2 * w + half][i] = both & 0x00f000f0;
            }
        }
    }
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mma(c[i], low[i], even[term]);
#pragma unroll
        for (int i = 0; i < 4; ++i) mma(c[i], high[i], odd[term]);
    }
}

// Add 16 columns. scale: a power of two that brings x d scale into the range of float16.
__device__ __forceinline__ void multiply(
    Sums& sums, const u8* stage, const float* value, float scale, const Bits& bits) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint4 q[4];
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + (i & 1) + 8 * (i >> 1);
        const uint4 h = *(const uint4*)(stage + column * PITCH);
        q[i] = *(const uint4*)(stage + column * PITCH + 16 + 16 * g);
        const float x = value[column] * scale;
        float sub, minimum;
        bits.take(h, sub, minimum);
        factor[i] = x * half_to_float(h.x & 0xffff) * sub;
        sums.minimum += x * half_to_float(h.x >> 16) * minimum;
    }
    u32 even[2][2], odd[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 high = two_halves(factor[2 * i], factor[2 * i + 1]);
        const u32 low = two_halves(
            factor[2 * i] - half_to_float(high & 0xffff), factor[2 * i + 1] - half_to_float(high >> 16));
        even[0][i] = g & 1 ? 0 : high;
        even[1][i] = g & 1 ? 0 : low;
        odd[0][i] = g & 1 ? high : 0;
        odd[1][i] = g & 1 ? low : 0;
    }
    const u32 first[2][4] = {{q[0].x, q[1].x, q[2].x, q[3].x}, {q[0].y, q[1].y, q[2].y, q[3].y}};
    const u32 second[2][4] = {{q[0].z, q[1].z, q[2].z, q[3].z}, {q[0].w, q[1].w, q[2].w, q[3].w}};
    tiles(sums.c, first, even, odd);
    tiles(sums.c + 4, second, even, odd);
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void deposit(const Sums& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float minimum = sums.minimum;
    minimum += __shfl_xor_sync(ALL_LANES, minimum, 1);
    minimum += __shfl_xor_sync(ALL_LANES, minimum, 2);
    const float low = __shfl_sync(ALL_LANES, minimum, 8 * t), high = __shfl_sync(ALL_LANES, minimum, 8 * t + 4);
    if (t != g / 2) return;
    float* at = rows + 64 * t + 16 * (g & 1);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float* c = sums.c[j];
        *(float2*)(at + 2 * j) = make_float2((c[0] * NIBBLE - low) * inverse, (c[2] * NIBBLE - low) * inverse);
        *(float2*)(at + 32 + 2 * j) =
            make_float2((c[1] * (NIBBLE / 16) - high) * inverse, (c[3] * (NIBBLE / 16) - high) * inverse);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * PRODUCERS, 1) zigzag_gemv(
    const u8* __restrict__ blocks, int columns, int rows, float largest_scale, int ahead,
    // what comes in
    const float* x, const float* norm, float eps, const float* threshold, int per_channel, const float* offset,
    const int* counts, const int* indices, const int* count,
    // what goes out: y [rows] = product + constant + added
    float* y, const float* constant, const float* added,
    // GATE: y [rows / 2] = activation(gate) * up, and how many of each 256 lie beyond a threshold
    int activation, const float* next_threshold, int next_per_channel, const float* next_offset, int* next_counts,
    // sums of active columns; where blocks meet: [groups][splits][ROWS], zeros [groups]
    u64* active, float* partials, u32* tickets) {
    extern __shared__ uint4 memory[];
    __shared__ __align__(16) float total[ROWS];
    __shared__ float norms[WARPS], peaks[WARPS];
    __shared__ int found[ROUNDS * WARPS];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ u64 mailbox;
    __shared__ int plan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % GROUP, set = warp / GROUP;
    const int split = blockIdx.x, splits = gridDim.x, group = blockIdx.y;
    const bool brings = warp >= WARPS;

    // ring [STAGES]; sums [WARPS][256]; CLUSTERS: what the blocks send to the first one [SPLITS][ROWS]; values; indices
    u8* ring = (u8*)memory;
    float* own = (float*)(ring + STAGES * STAGE_BYTES);
    Part part;
    float* received = own + WARPS * BAND_ROWS;
    part.value = received + (CLUSTERS && splits > 1 ? splits * ROWS : 0);
    part.stride = 0;
    part.index = (u32*)(part.value + ((columns + COLUMNS - 1) / COLUMNS + splits - 1) / splits * COLUMNS);

    let_next_begin();
    const Site site{x, columns, norm, eps, threshold, per_channel, offset};
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i, BULK ? 1 : 32);
            barrier_init(empty + i, GROUP);
        }
#if CLUSTERS
        barrier_expect(&mailbox, splits * ROWS * 4);
#endif
    }
#if __CUDA_ARCH__ >= 900
    cluster_begun();
#endif
    Stream stream{blocks + (u64)group * columns * (GROUP * BLOCK_BYTES), ring, full, empty, part.index};
#if DENSE
    part.divide(columns);
    stream.column = part.first;
    stream.last = columns - 1;
    stream.units = part.units;
    __syncthreads();
    stream.begin();
#endif
#if !DENSE && __CUDA_ARCH__ >= 900
    // The memory has little to do until the active columns are known: some of those that they may be come nearer.
    if (threadIdx.x == THREADS + 32) {
        const u8* from = stream.base + (u64)columns * split / splits * (GROUP * BLOCK_BYTES);
        for (int left = ahead * (GROUP * BLOCK_BYTES); left > 0; left -= 8192, from += 8192)
            prefetch_bytes(from, min(left, 8192));
    }
#endif
    if (!brings) {
        // Constants that are needed later.
        const float limit = threshold && !per_channel ? *threshold : 0;
        const int row = group * ROWS + threadIdx.x * 32;
        if (constant && threadIdx.x * 32 < ROWS && row < rows) prefetch(constant + row);
#if SOURCE == WHOLE
        Whole<WARPS, ROUNDS> whole;
        whole.prepare(site);
#endif
        after_previous();
#if SOURCE == WHOLE
        whole.load(site, norms);
        float peak = whole.peak();
#if DENSE
        whole.all(site, part);
#else
        whole.active(site, limit, part, found);
#endif
#elif SOURCE == LISTED
        float peak = listed<WARPS>(site, indices, count, part);
#elif DENSE
        float peak = every<WARPS>(site, part);
#else
        float peak = counted<WARPS>(site, limit, counts, part);
#endif
        part.fill_up();
        peak = warp_max(peak);
        if (lane == 0) peaks[warp] = peak;
        if (threadIdx.x == 0) plan = part.units;
    }
#if DENSE
    if (!brings) sync_first<THREADS>();
#else
    __syncthreads();
    stream.units = plan;
    stream.begin();
#endif
    if (brings) {
        stream.run();
        return;
    }

#if GATE
    if (threadIdx.x == 0 && next_threshold) prefetch(next_threshold);
#endif
    float largest = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, peaks[w]);
    const int exponent = exponent_for(largest * largest_scale);
    const float scale = power_of_two(exponent);
    const Bits bits(lane / 4);
    Sums sums = {};
#pragma unroll 1
    for (int i = set; i < part.units; i += SETS) {
        const int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        multiply(sums, ring + stage * STAGE_BYTES + band * BLOCK_BYTES, part.value + i * COLUMNS, scale, bits);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
    }
    deposit(sums, power_of_two(-exponent), own + warp * BAND_ROWS);
    sync_first<THREADS>();

    // What the result needs besides, while the sums are on their way.
#if GATE
    const float next_limit = next_threshold && !next_per_channel ? *next_threshold : 0;
#else
    float before[(ROWS + THREADS - 1) / THREADS];
#pragma unroll
    for (int i = 0; i < (ROWS + THREADS - 1) / THREADS; ++i) {
        const int r = i * THREADS + threadIdx.x, row = group * ROWS + r;
        before[i] = added && r < ROWS && row < rows ? fresh(added + row) : 0;
        if (constant && r < ROWS && row < rows) before[i] += constant[row];
    }
#endif

    // The warps' sums; then the blocks', in the first or the last of them.
#if __CUDA_ARCH__ >= 900
    cluster_wait();
#endif
    for (int r = threadIdx.x * 4; r < ROWS; r += THREADS * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < SETS; ++w) {
            const float4 v = *(const float4*)(own + (w * GROUP + r / BAND_ROWS) * BAND_ROWS + r % BAND_ROWS);
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
        if (splits == 1) {
            *(float4*)(total + r) = sum;
        } else {
#if CLUSTERS
            send(in_block(received + split * ROWS + r, 0), sum, in_block(&mailbox, 0));
#else
            *(float4*)(partials + (group * splits + split) * ROWS + r) = sum;
#endif
        }
    }
    if (active && split + group == 0 && threadIdx.x == 0) *active += part.count;
    if (splits > 1) {
#if CLUSTERS
        if (split) return;
        barrier_received(&mailbox);
        const float* from = received;
#else
        __shared__ int last;
        sync_first<THREADS>();
        if (threadIdx.x == 0) {
            last = arrive_at(tickets + group) == splits - 1;
            if (last) tickets[group] = 0;
        }
        sync_first<THREADS>();
        if (!last) return;
        const float* from = partials + group * splits * ROWS;
#endif
        for (int r = threadIdx.x; r < ROWS; r += THREADS) {
            float sum = 0;
#pragma unroll 8
            for (int s = 0; s < splits; ++s) sum += CLUSTERS ? from[s * ROWS + r] : fresh(from + s * ROWS + r);
            total[r] = sum;
        }
    }
    sync_first<THREADS>();

#if GATE
    for (int half = 0; half < GROUP / 2; ++half) {
        const int chunk = group * (GROUP / 2) + half;
        int beyond = 0;
        for (int r = threadIdx.x; r < BAND_ROWS; r += THREADS) {
            const int row = chunk * BAND_ROWS + r;
            if (row >= rows / 2) break;
            float gate = total[half * BAND_ROWS + r], up = total[(GROUP / 2 + half) * BAND_ROWS + r];
            if (constant) {
                gate += constant[row];
                up += constant[rows / 2 + row];
            }
            // Rounded here, as the next kernel will read it.
            const float v = __fmul_rn(activated(activation, gate), up);
            y[row] = v;
            if (next_threshold) {
                const float d = next_offset ? v - next_offset[row] : v;
                beyond += fabsf(d) > (next_per_channel ? next_threshold[row] : next_limit);
            }
        }
        if (next_counts) {
            beyond = (int)__reduce_add_sync(ALL_LANES, (u32)beyond);
            __shared__ int here[WARPS];
            if (lane == 0) here[warp] = beyond;
            sync_first<THREADS>();
            if (threadIdx.x == 0 && chunk * BAND_ROWS < rows / 2) {
                int sum = 0;
                for (int w = 0; w < WARPS; ++w) sum += here[w];
                next_counts[chunk] = sum;
            }
            sync_first<THREADS>();
        }
    }
#else
#pragma unroll
    for (int i = 0; i < (ROWS + THREADS - 1) / THREADS; ++i) {
        const int r = i * THREADS + threadIdx.x, row = group * ROWS + r;
        if (r < ROWS && row < rows) y[row] = total[r] + before[i];
    }
#endif
}
