// y = residual + the sums that the blocks of neuron_ffn left, in the order of the blocks' numbers within a warp, then of
// the warps: the same bits every run.
//
//     partial   float32 [blocks][texts][hidden], of which the first min(blocks, counts[1]) were written
//     warp w    takes blocks w, w + WARPS, ..; a lane has a channel
//
// Launch: grid (hidden / 32, texts), 32 WARPS threads.

#include "common/common.cuh"

static constexpr int WARPS = 8, AT_ONCE = 9;

// residual, y  float32 [texts][hidden], maybe the same
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    neuron_sum(const float* partial, int blocks, const int* counts, int hidden, const float* residual, float* y) {
    __shared__ float sums[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int channel = blockIdx.x * 32 + lane, texts = gridDim.y;
    launch_dependents();
    wait_for_previous();
    const int written = min(blocks, load_l2(counts + 1));
    const float* from = partial + (u64)blockIdx.y * hidden + channel;
    float sum = 0;
#pragma unroll 1
    for (int first = warp; first < written; first += WARPS * AT_ONCE) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int block = first + i * WARPS;
            v[i] = block < written ? load_l2(from + (u64)block * texts * hidden) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum += v[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[w][lane];
    const int at = blockIdx.y * hidden + channel;
    y[at] = load_l2(residual + at) + total;
}
