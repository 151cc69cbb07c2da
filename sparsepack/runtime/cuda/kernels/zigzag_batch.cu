// Y = X[:, active] W[:, active]^T for INPUTS inputs that share their active columns: those that are active in any of
// them. The matrix lies as zigzag.cuh shows, and is read once for all.
//
// Grid: (SPLITS, groups). deal.cuh says which columns a block takes, meet.cuh how blocks come to their sums. On the
// tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = q * scale, exact: up to 15 * 63, times 2^-24
//                    B [16 columns, 8]       = x d, n = input, as the sum of two float16
//
// Lane (g, t) = (lane / 4, lane % 4) holds bytes 16 g .. 16 g + 15 of four columns, which are rows of the sub-blocks 2
// (g / 2) and 2 (g / 2) + 1, and computes B for input g. Minima are a product of their own: A [sub-block, column] =
// min, B = x dmin. Sums: over the columns of a warp, the warps of a block, the blocks of a group, each in order.
//
// Macros: those of zigzag.cuh and deal.cuh; INPUTS 1 to 8, without a norm and not handed on

#ifndef WARPS
#define WARPS 8
#define STAGES 16
#define GROUP 2
#define DENSE 0
#define PRODUCERS 4
#define INPUTS 8
#define SPLITS 2
#define ROUNDS 2
#define TURNS 1
#define OFFSET 1
#define PER_CHANNEL 1
#endif
#define HANDED 0
#define NORM 0
#define SQUARES 0

#include "deal.cuh"
#include "meet.cuh"

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

// The 256 rows of a warp's band for each input into shared memory: [INPUTS][PLACES]. inverse: of the scale of the lane's
// input.
__device__ __forceinline__ void deposit(const BatchSums& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int input = 2 * t + i;
        // minimum[i]: sub-block g. This lane's rows are of the two of its pair.
        const float mine = sums.minimum[i] * NIBBLE;
        const float low = __shfl_sync(ALL_LANES, mine, (g & ~1) * 4 + t);
        const float high = __shfl_sync(ALL_LANES, mine, (g | 1) * 4 + t);
        const float factor = __shfl_sync(ALL_LANES, inverse, input * 4);
        if (input >= INPUTS) continue;
        float* at = rows + place(input * BAND_ROWS + 64 * (g / 2) + 16 * (g & 1));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            *(float2*)(at + 2 * j) = make_float2(
                (sums.low[j][i] * NIBBLE - low) * factor, (sums.low[j][2 + i] * NIBBLE - low) * factor);
            *(float2*)(at + 32 + 2 * j) = make_float2(
                (sums.high[j][i] * (NIBBLE / 16) - high) * factor,
                (sums.high[j][2 + i] * (NIBBLE / 16) - high) * factor);
        }
    }
}

// The output row of row r of a group's band `slot`, or -1 for padding. half: bands of gate, where each group has as
// many of gate as of up.
__device__ __forceinline__ int row_of(int group, int slot, int r, int half, int rows) {
    if (!half) {
        const int row = (group * GROUP + slot) * BAND_ROWS + r;
        return row < rows ? row : -1;
    }
    const int each = GROUP / 2, band = group * each + slot % each;
    return band < half ? (band + slot / each * half) * BAND_ROWS + r : -1;
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) zigzag_batch(
    const u8* __restrict__ blocks, int columns, int rows, int half, float largest_d,
    // x [INPUTS][columns]
    const float* x, const float* threshold, const float* offset,
    // y [INPUTS][rows] = product + constant + added
    float* y, const float* constant, const float* added,
    // sums of active columns; where blocks meet: [groups][SPLITS][GROUP][INPUTS][256]
    u64* active, float* slots) {
    extern __shared__ uint4 memory[];
    __shared__ float peaks[WARPS][INPUTS];
    __shared__ int found[WARPS];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ int listed_units;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % GROUP, set = warp / GROUP;
    const int split = blockIdx.x, group = blockIdx.y;
    const bool brings = warp >= WARPS;
    const Deal deal(columns, split);
    set_up_first<THREADS>();

    // ring [STAGES], later sums [WARPS][INPUTS][PLACES]; list
    u8* ring = (u8*)memory;
    float* own = (float*)memory;
    constexpr int RING = STAGES * STAGE_BYTES, OWN = WARPS * INPUTS * PLACES * 4, FIRST = RING > OWN ? RING : OWN;
    const int most = Deal::most(columns);
    float* values = (float*)(ring + FIRST);
    List list{values, (int*)(values + INPUTS * most), most, 0};

    let_next_begin();
    Stream stream{blocks + (u64)group * columns * COLUMN_BYTES, ring, full, empty, list.index, deal, &listed_units};
    Peaks peak;
    if (brings) {  // while the input is not there yet
        stream.set_up();
    } else {
        const Site site{x, columns, nullptr, 0, nullptr, 0, threshold, offset};
        peak = deal_out<WARPS, DENSE>(site, deal, list, found, nullptr, [] { after_previous(); });
        stream.announce(list.count);
    }
    stream.wait_for_list(brings);
    if (brings) {
        stream.run();
        return;
    }
    // Each input has a scale of its own: the largest of them must not cost the others their precision.
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        const float largest = warp_max(peak.of[b]);
        if (lane == 0) peaks[warp][b] = largest;
    }
    sync_first<THREADS>();
    const int input = lane / 4;
    float largest = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, input < INPUTS ? peaks[w][input] : 0);
    const int exponent = exponent_for(largest * largest_d);
    const float* value = input < INPUTS ? list.value + input * list.stride : nullptr;
    BatchSums sums = {};
#pragma unroll 1
    for (int i = set; i < stream.units; i += SETS) {
        const int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        multiply(sums, ring + stage * STAGE_BYTES + band * BLOCK_BYTES, value ? value + i * COLUMNS : nullptr,
            power_of_two(exponent));
        warp_arrive(empty + stage);
    }
    sync_first<THREADS>();  // the ring is read
    deposit(sums, power_of_two(-exponent), own + warp * INPUTS * PLACES);
    sync_first<THREADS>();

    constexpr int COUNT = INPUTS * ROWS;
    float* shared_slots = slots + group * SPLITS * COUNT;
    add_up<COUNT>(own, shared_slots + split * COUNT);

    // The block's share of the sums, as many of a thread's together as make up to 16 words, since each waits for them.
    const Share<COUNT> share(split);
    constexpr int MINE = (share.EACH + THREADS - 1) / THREADS, MOST = SPLITS < 16 ? 16 / SPLITS : 1;
    constexpr int ONCE = MINE < MOST ? MINE : MOST;
#pragma unroll 1
    for (int first = share.begin + threadIdx.x; first < share.end; first += ONCE * THREADS) {
        const int places = (share.end - first + THREADS - 1) / THREADS;
        float sum[ONCE] = {}, always[ONCE] = {}, before[ONCE] = {};
        int to[ONCE];  // in y
#pragma unroll
        for (int j = 0; j < ONCE; ++j) {
            const int i = first + j * THREADS, slot = i / (INPUTS * BAND_ROWS), b = i / BAND_ROWS % INPUTS;
            const int row = j < places ? row_of(group, slot, i % BAND_ROWS, half, rows) : -1;
            to[j] = row < 0 ? -1 : b * rows + row;
            if (constant && row >= 0) always[j] = constant[row];
            if (added && row >= 0) before[j] = fresh(added + to[j]);
        }
        if (SPLITS > 1) {
            take<COUNT, ONCE, THREADS>(shared_slots + first, sum, places);
        } else {
#pragma unroll
            for (int j = 0; j < ONCE; ++j) {
                if (j < places) sum[j] = own[place(first + j * THREADS)];
            }
        }
#pragma unroll
        for (int j = 0; j < ONCE; ++j) {
            if (to[j] >= 0) y[to[j]] = sum[j] + always[j] + before[j];
        }
    }
    if (active && group == 0 && threadIdx.x == 0) add(active, DENSE ? deal.count() : list.count);
}
