// What the listed neurons add up to: of each the record is read once, up . x multiplied by its gate, and so much of the
// column of down added (KAIROX, section 8). A PLAIN record is the column alone, of which as much is added as the gate is.
//
//     entries   e = block, block + blocks, ..     the first counts[0] of a list have their records in `slots`, at
//               index[e], those up to counts[1] in `host`
//     ring      | slot 0: a record | slot 1 | .. SLOTS - 1 |    entry i of a block travels to slot i % SLOTS
//     partial   float32 [blocks][sequences][hidden]                  sums of each block, in the order of its entries
//
// A block takes BATCH of its entries at a time. First each is multiplied with the input, by PARTS warps, each of which
// has every PARTS-th group; then all of them are added up: a warp has group w % SLICE_WARPS of the channels, and
// SLICE_WARPS further those of the next round, from every SLICES-th entry. Blocks without an entry write nothing
// (neuron_sum.cu knows).
//
// The input lies in shared memory as neuron_input.cuh draws it.
//
// Launch: grid (blocks), 32 WARPS threads; shared memory: see products/neurons.py.
//
// Macros: INPUTS sequences; GROUPS of two superblocks; ROUNDS, SLICES: WARPS = SLICES * ceil(GROUPS / ROUNDS); SLOTS, BATCH,
//         PARTS; PLAIN; BULK 0: as before sm_90, without bulk copies

#ifndef INPUTS
#define INPUTS 1
#define GROUPS 10
#define ROUNDS 1
#define SLICES 2
#define SLOTS 32
#define BATCH 10
#define PARTS 2
#endif
#ifndef PLAIN
#define PLAIN 0
#endif
#include "neurons/neuron_input.cuh"

static constexpr int SLICE_WARPS = (GROUPS + ROUNDS - 1) / ROUNDS, WARPS = SLICES * SLICE_WARPS;
static_assert(BATCH * PARTS <= WARPS && BATCH <= SLOTS, "warps for each entry, which has a slot");

// index [counts[1]]; gates [INPUTS][stride]; x [INPUTS][256 bands]; partial: of block 0, `pitch` floats apart
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    neuron_ffn(const u8* slots, const u8* host, int bands, const int* counts, const int* index, const float* gates,
               int stride, const float* x, float* partial, int pitch) {
    // A bulk copy whose two ends are not alike modulo 128 bytes asks for pieces of lines: over the bus 35 GB/s, not 49.
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ u64 full[SLOTS];
    __shared__ float inner[INPUTS][BATCH][PARTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden = 256 * bands;
    const int record_bytes = (PLAIN ? 1 : 2) * bands * BLOCK_BYTES;
    float* const input = (float*)memory;
    u8* const ring = (u8*)(input + INPUTS * INPUT_FLOATS);

    launch_dependents();
    init_fetches(full, SLOTS);
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
        fetch_bytes(ring + i % SLOTS * record_bytes, from, record_bytes, full + i % SLOTS);
    };
    for (int i = warp; i < min(own, SLOTS); i += WARPS) fetch(i, i == warp ? its_index : load_l2(index + entry(i)));

    // The input, while the records travel.
    if (!PLAIN) fill_input(input, x, bands, WARPS);
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
            if (!PLAIN) barrier_wait(full + i % SLOTS, i / SLOTS & 1);
#pragma unroll 2
            for (int group = part; !PLAIN && group < GROUPS; group += PARTS) {
                if (2 * group + lane / 16 < bands) {
                    const Piece piece(up + (2 * group + lane / 16) * BLOCK_BYTES);
                    add_products(dot, piece, input, group);
                }
            }
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) {
                const float all_of = PLAIN ? part == 0 : warp_sum(dot[b]);
                if (lane == 0) inner[b][mine][part] = gate[b] * all_of;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int j = slice; j < here; j += SLICES) {
            const int i = first + j;
            // Passes at once, unless PLAIN: who reads has seen that the record is there.
            barrier_wait(full + i % SLOTS, i / SLOTS & 1);
            const u8* down = ring + i % SLOTS * record_bytes + (PLAIN ? 0 : bands * BLOCK_BYTES);
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
