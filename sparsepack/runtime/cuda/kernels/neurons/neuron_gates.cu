// The exact gates of listed neurons, after the activation: of each one row of the gate is read, in superblocks of 144
// bytes as those of records (neuron_record.cuh).
//
//     entries   e = block + blocks * w, + blocks * WARPS, ..    of warp w; the first counts[0] have their rows in `slots`,
//               at index[e], those up to counts[1] in `host`
//     ring      | warp 0: slot 0 | .. SLOTS - 1 | warp 1 | .. |    entry i of a warp travels to its slot i % SLOTS, with
//               the same address modulo 128 as it has, or the bus would carry pieces of lines
//
// Launch: grid (blocks), 32 WARPS threads; shared memory: see products/gate_copies.py.
//
// Macros: INPUTS sequences; GROUPS of two superblocks; WARPS; SLOTS; ACTIVATION: number of the function (activations.cuh);
//         BULK 0: as before sm_90, without bulk copies

#ifndef INPUTS
#define INPUTS 1
#define GROUPS 10
#define WARPS 16
#define SLOTS 2
#define ACTIVATION 1
#endif
#include "common/activations.cuh"
#include "neurons/neuron_input.cuh"

// counts, index as neuron_list leaves them; x [INPUTS][256 bands]; gates [INPUTS][stride], which are written
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    neuron_gates(const u8* slots, const u8* host, int bands, const int* counts, const int* index, const float* x,
                 float* gates, int stride) {
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ u64 full[WARPS * SLOTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_bytes = bands * BLOCK_BYTES, slot_bytes = (row_bytes + 112 + 127) / 128 * 128;
    float* const input = (float*)memory;
    u8* const ring = (u8*)(input + INPUTS * INPUT_FLOATS) + warp * SLOTS * slot_bytes;
    u64* const arrived = full + warp * SLOTS;

    launch_dependents();
    init_fetches(full, WARPS * SLOTS);
    __syncthreads();
    wait_for_previous();
    const int resident = load_l2(counts), all = load_l2(counts + 1);
    if ((int)blockIdx.x >= all) return;
    const auto entry = [&](int i) { return (int)blockIdx.x + (warp + i * WARPS) * (int)gridDim.x; };
    const auto row_of = [&](int i) {
        return (entry(i) < resident ? slots : host) + (u64)load_l2(index + entry(i)) * row_bytes;
    };
    const auto place = [&](int i, const u8* row) { return ring + i % SLOTS * slot_bytes + ((u64)row & 127); };
    const auto fetch = [&](int i) {
        if (entry(i) >= all) return;
        const u8* row = row_of(i);
        fetch_bytes(place(i, row), row, row_bytes, arrived + i % SLOTS);
    };
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) fetch(i);
    fill_input(input, x, bands, WARPS);
    __syncthreads();

#pragma unroll 1
    for (int i = 0; entry(i) < all; ++i) {
        const u8* row = place(i, row_of(i));
        barrier_wait(arrived + i % SLOTS, i / SLOTS & 1);
        float dot[INPUTS] = {};
#pragma unroll 2
        for (int group = 0; group < GROUPS; ++group) {
            if (2 * group + lane / 16 < bands)
                add_products(dot, Piece(row + (2 * group + lane / 16) * BLOCK_BYTES), input, group);
        }
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            const float gate = warp_sum(dot[b]);
            if (lane == 0) gates[b * stride + entry(i)] = activated(ACTIVATION, gate);
        }
        __syncwarp();  // all lanes have read the slot
        fetch(i + SLOTS);
    }
}
