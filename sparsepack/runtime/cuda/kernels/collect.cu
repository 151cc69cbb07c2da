// Lists of active columns and gates as kernels of their own. A decoder's products do both themselves, but for gates
// whose rows do not fill whole bands.
//
//     x [columns]                   -> indices [columns], of which `count` are set: the active columns in order
//     stacked [batch][2 width]      -> out [batch][width]
//           | gate | up |
//
// Launch: collect: 1 block of 1024 threads, each round takes 1024 columns. gate: grid (width / 256, batch), 256 threads
// a block.

#include "activations.cuh"
#include "common.cuh"

// indices[i], count: the active columns of x [columns] in ascending order, as `reference.collect` lists them.
extern "C" __global__ void __launch_bounds__(1024) collect(
    const float* x, int columns, const float* threshold, int per_channel, int* indices, int* count) {
    __shared__ int found[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    wait_for_previous();
    int before = 0;
    for (int from = 0; from < columns; from += 1024) {
        const int k = from + threadIdx.x;
        const bool active = k < columns && fabsf(load_l2(x + k)) > load_l2(threshold + (per_channel ? k : 0));
        const u32 mask = __ballot_sync(ALL_LANES, active);
        if (lane == 0) found[warp] = __popc(mask);
        __syncthreads();
        int total = 0, own = 0;
#pragma unroll
        for (int w = 0; w < 32; ++w) {
            if (w < warp) own += found[w];
            total += found[w];
        }
        if (active) indices[before + own + __popc(mask & ((1u << lane) - 1))] = k;
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) *count = before;
}

// out [batch][width] = activation(gate) * up of stacked [batch][2 width].
extern "C" __global__ void __launch_bounds__(256) gate(const float* stacked, int width, int activation, float* out) {
    launch_dependents();
    wait_for_previous();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= width) return;
    const float* x = stacked + (long long)blockIdx.y * 2 * width;
    out[(long long)blockIdx.y * width + i] = __fmul_rn(activated(activation, load_l2(x + i)), load_l2(x + width + i));
}
