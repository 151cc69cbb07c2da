// y = residual + the sums that the blocks of neuron_ffn left, in the order of the blocks' numbers within a warp, then of
// the warps, + the processor's answer: the same bits every run.
//
//     partial   float32 [blocks][sequences][hidden], of which the first min(blocks, counts[1]) were written
//     warp w    takes blocks w, w + WARPS, ..; a lane has a channel
//
// Launch: grid (hidden / 32, sequences), 32 WARPS threads.

#include "neurons/mailbox.cuh"

static constexpr int WARPS = 8, AT_ONCE = 17;

// residual, y  float32 [sequences][hidden], maybe the same
// answer       float32 [sequences][hidden] in the host's memory, there where counts[2] neurons were asked for; or null
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    neuron_sum(const float* partial, int blocks, const int* counts, int hidden, const float* residual, float* y,
               const float* answer) {
    __shared__ float sums[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int channel = blockIdx.x * 32 + lane, sequences = gridDim.y, at = blockIdx.y * hidden + channel;
    launch_dependents();
    wait_for_previous();
    // All is asked for at a time, also what was not written.
    const int written = min(blocks, load_l2(counts + 1)), asked = load_l2(counts + 2);
    const float before = warp ? 0 : load_l2(residual + at);
    const float* from = partial + (u64)blockIdx.y * hidden + channel;
    float sum = 0;
#pragma unroll 1
    for (int first = warp; first < blocks; first += WARPS * AT_ONCE) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int block = first + i * WARPS;
            v[i] = block < blocks ? load_l2(from + (u64)block * sequences * hidden) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum += first + i * WARPS < written ? v[i] : 0;
    }
    const float answered = !warp && answer && asked ? load_system(answer + at) : 0;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[w][lane];
    y[at] = before + total + answered;
}
