// Of a list the entries whose gate is not zero in any of the sequences, in their order.
//
//     counts   int32 [3] | index [counts[1]] | gates float32 [INPUTS][stride]       as neuron_list leaves them
//     kept     the same of those that are kept; of counts the last, what the processor is asked for, stays
//
// Launch: one block of 1024 threads, each of which has an entry at a time.
//
// Macros: INPUTS sequences

#include "common/common.cuh"

#ifndef INPUTS
#define INPUTS 1
#endif

static constexpr int WARPS = 32, THREADS = 32 * WARPS;

// read: u64, to which columns are added for each neuron of `neurons` that is listed or asked for, as a share of them
extern "C" __global__ void __launch_bounds__(THREADS)
    neuron_keep(const int* counts, const int* index, const float* gates, int stride, int* kept_counts, int* kept_index,
                float* kept_gates, u64* read, int columns, int neurons) {
    __shared__ int found[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    wait_for_previous();
    const int resident = load_l2(counts), all = load_l2(counts + 1), asked = load_l2(counts + 2);
    int kept = 0, kept_resident = 0;
#pragma unroll 1
    for (int first = 0; first < all; first += THREADS) {
        const int e = first + threadIdx.x;
        float gate[INPUTS];
        bool is = false;
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            gate[b] = e < all ? load_l2(gates + b * stride + e) : 0;
            is |= gate[b] != 0;  // NaN is kept, so that it is seen
        }
        const int which = e < all ? load_l2(index + e) : 0;
        const u32 mask = __ballot_sync(ALL_LANES, is);
        const int residents = __popc(__ballot_sync(ALL_LANES, is && e < resident));
        if (lane == 0) found[warp] = __popc(mask) | residents << 16;
        __syncthreads();
        const int of_lane = found[lane];  // both counts are at most 1024
        const int here = __reduce_add_sync(ALL_LANES, of_lane);
        const int before = __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0);
        if (is) {
            const int at = kept + (before & 0xffff) + __popc(mask & (1u << lane) - 1);
            kept_index[at] = which;
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) kept_gates[b * stride + at] = gate[b];
        }
        kept += here & 0xffff;
        kept_resident += here >> 16;
        __syncthreads();
    }
    if (threadIdx.x) return;
    kept_counts[0] = kept_resident;
    kept_counts[1] = kept;
    kept_counts[2] = asked;
    if (read) atomic_add(read, (u64)columns * (all + asked) / neurons);
}
