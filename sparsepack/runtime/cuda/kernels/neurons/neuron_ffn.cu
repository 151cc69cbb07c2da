// What the listed neurons add up to: of each the record is read once, up . x multiplied by its gate, and so much of the
// column of down added (KAIROX, section 8).
//
//     entries   e = block, block + blocks, ..     the first counts[0] of a list have their records in `slots`, at
//               index[e], those up to counts[1] in `host`
//     ring      | slot 0: a record | slot 1 | .. SLOTS - 1 |    entry i of a block travels to slot i % SLOTS
//     partial   float32 [blocks][texts][hidden]                  sums of each block, in the order of its entries
//
// A block takes BATCH of its entries at a time. First each is multiplied with the input, by PARTS warps, each of which
// has every PARTS-th group; then all of them are added up: a warp has group w % SLICE_WARPS of the channels, and
// SLICE_WARPS further those of the next round, from every SLICES-th entry. Blocks without an entry write nothing
// (neuron_sum.cu knows).
//
// The input lies in shared memory as lanes read it: of each group four float4 a lane, each for 32 lanes side by side,
// then the sums of a lane's two halves, which the minima are multiplied with.
//
//     input     | group 0: [4][32] float4 | group 1 | .. GROUPS - 1 | group 0: [32] float2 | .. |    for each text
//
// Launch: grid (blocks), 32 WARPS threads; shared memory: see products/neurons.py.
//
// Macros: INPUTS texts; GROUPS of two superblocks; ROUNDS, SLICES: WARPS = SLICES * ceil(GROUPS / ROUNDS); SLOTS, BATCH,
//         PARTS; BULK 0: as before sm_90, without bulk copies

#include "neurons/neuron_record.cuh"

#ifndef INPUTS
#define INPUTS 1
#define GROUPS 10
#define ROUNDS 1
#define SLICES 2
#define SLOTS 32
#define BATCH 10
#define PARTS 2
#endif
#ifndef BULK
#define BULK 1
#endif
#if __CUDA_ARCH__ < 900
#undef BULK
#define BULK 0
#endif

static constexpr int SLICE_WARPS = (GROUPS + ROUNDS - 1) / ROUNDS, WARPS = SLICES * SLICE_WARPS;
static constexpr int INPUT_FLOATS = GROUPS * (GROUP_CHANNELS + 64);  // of a text
static_assert(INPUT_FLOATS * 4 % 128 == 0, "the ring begins at a multiple of 128 bytes");
static_assert(BATCH * PARTS <= WARPS && BATCH <= SLOTS, "warps for each entry, which has a slot");

// Where a text's input, and the sums of it, lie.
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

// index [counts[1]]; gates [INPUTS][stride]; x [INPUTS][256 bands]; partial: of block 0, `pitch` floats apart
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    neuron_ffn(const u8* slots, const u8* host, int bands, const int* counts, const int* index, const float* gates,
               int stride, const float* x, float* partial, int pitch) {
    // A bulk copy whose two ends are not alike modulo 128 bytes asks for pieces of lines: over the bus 35 GB/s, not 49.
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ u64 full[SLOTS];
    __shared__ float inner[INPUTS][BATCH][PARTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden = 256 * bands;
    const int record_bytes = 2 * bands * BLOCK_BYTES;
    float* const input = (float*)memory;
    u8* const ring = (u8*)(input + INPUTS * INPUT_FLOATS);

    launch_dependents();
    if (threadIdx.x < SLOTS) barrier_init(full + threadIdx.x, BULK ? 1 : 32);
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
    wait_for_previous();
    // Who comes first is read beside the counts, there or not.
    const int maybe = (int)blockIdx.x + warp * (int)gridDim.x, its_index = maybe < stride ? load_l2(index + maybe) : 0;
    const int resident = load_l2(counts), all = load_l2(counts + 1);
    const int own = all > (int)blockIdx.x ? (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x : 0;
    if (!own) return;
    const auto entry = [&](int i) { return (int)blockIdx.x + i * (int)gridDim.x; };

    const auto fetch = [&](int i, int which) {  // by a warp
        const u8* from = (entry(i) < resident ? slots : host) + (u64)which * record_bytes;
        u8* to = ring + i % SLOTS * record_bytes;
        const u32 arrived = shared_address(full + i % SLOTS);
#if BULK
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(record_bytes)
                         : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    shared_address(to)),
                "l"(from), "r"(record_bytes), "r"(arrived)
                : "memory");
        }
#else
        for (int at = 16 * lane; at < record_bytes; at += 16 * 32) copy_async(to + at, from + at);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrived) : "memory");
#endif
    };
    for (int i = warp; i < min(own, SLOTS); i += WARPS) fetch(i, i == warp ? its_index : load_l2(index + entry(i)));

    // The input, while the records travel.
#pragma unroll 1
    for (int unit = warp; unit < INPUTS * GROUPS; unit += WARPS) {
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
    __syncthreads();

    const int slice = warp / SLICE_WARPS;
    float sum[ROUNDS][INPUTS][2][8] = {}, rest[ROUNDS][INPUTS][2] = {};
#pragma unroll 1
    for (int first = 0; first < own; first += BATCH) {
        const int here = min(BATCH, own - first);
        const int mine = warp / PARTS, part = warp % PARTS;  // entry of the batch, and part of it
        if (mine < here) {
            const int i = first + mine;
            const u8* up = ring + i % SLOTS * record_bytes;
            float dot[INPUTS] = {}, gate[INPUTS];
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) gate[b] = load_l2(gates + b * stride + entry(i));
            barrier_wait(full + i % SLOTS, i / SLOTS & 1);
#pragma unroll 2
            for (int group = part; group < GROUPS; group += PARTS) {
                if (2 * group + lane / 16 < bands) {
                    const Piece piece(up + (2 * group + lane / 16) * BLOCK_BYTES);
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
            }
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) {
                const float all_of = warp_sum(dot[b]);
                if (lane == 0) inner[b][mine][part] = gate[b] * all_of;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int j = slice; j < here; j += SLICES) {
            const int i = first + j;
            barrier_wait(full + i % SLOTS,
                         i / SLOTS & 1);  // passes at once: who reads has seen that the record is there
            const u8* down = ring + i % SLOTS * record_bytes + bands * BLOCK_BYTES;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int group = r * SLICE_WARPS + warp % SLICE_WARPS;
                if (group >= GROUPS || 2 * group + lane / 16 >= bands) continue;
                const Piece piece(down + (2 * group + lane / 16) * BLOCK_BYTES);
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) {
                    float times = 0;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) times += inner[b][j][part];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float factor = times * piece.factor[half];
                        rest[r][b][half] += times * piece.rest[half];
#pragma unroll
                        for (int k = 0; k < 8; ++k) sum[r][b][half][k] += factor * piece.q[half][k];
                    }
                }
            }
        }
        __syncthreads();
        for (int i = first + SLOTS + warp; i < min(own, first + SLOTS + BATCH); i += WARPS)
            fetch(i, load_l2(index + entry(i)));
    }

    // The sums of slices come to the first slice, one after the other, through the place of the input.
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int k = 0; k < 8; ++k) sum[r][b][half][k] -= rest[r][b][half];
            }
        }
    }
#pragma unroll 1
    for (int s = SLICES - 1; s >= 0; --s) {
        if (slice == s) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int group = r * SLICE_WARPS + warp % SLICE_WARPS;
                if (group >= GROUPS || 2 * group + lane / 16 >= bands) continue;
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) {
                    float4* const of = values_of(input + b * INPUT_FLOATS, group);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float* own_sum = sum[r][b][j / 2] + 4 * (j % 2);
                        float4 v = make_float4(own_sum[0], own_sum[1], own_sum[2], own_sum[3]);
                        if (s < SLICES - 1) {
                            const float4 more = of[32 * j];
                            v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
                        }
                        if (s) {
                            of[32 * j] = v;
                        } else {
                            float* to = partial + (u64)blockIdx.x * pitch + b * hidden;
                            *(float4*)(to + lane_channel(group, j / 2) + 4 * (j % 2)) = v;
                        }
                    }
                }
            }
        }
        if (s) __syncthreads();
    }
}
