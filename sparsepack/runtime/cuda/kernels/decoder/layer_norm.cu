// LayerNorm of what a product then reads: y = (x - mean) / sqrt(variance + eps) * weight + bias.
//
//     x, y  float32 [B, width]
//
// Launch: grid (B), a block a row; thread t has the columns t, t + THREADS, ..
//
// Macros: ROUNDS: width / THREADS, rounded up; FLAG_IN_DATA 1: x is read as soon as it is stored
//         (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/block_sum.cuh"
#include "common/flag_in_data.cuh"

#ifndef ROUNDS
#define ROUNDS 4
#define FLAG_IN_DATA 1
#endif

static constexpr int THREADS = 1024, WARPS = THREADS / 32;

// weight, bias: float32 [width]
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* y) {
    __shared__ float scratch[2][WARPS];
    const auto column = [](int r) { return r * THREADS + (int)threadIdx.x; };
    const u64 at = (u64)blockIdx.x * width;
    float factor[ROUNDS], added[ROUNDS], v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        factor[r] = column(r) < width ? weight[column(r)] : 0;
        added[r] = column(r) < width ? bias[column(r)] : 0;
    }
    if (!FLAG_IN_DATA) wait_for_previous();
    const auto from = [&](int r) { return column(r) < width ? x + at + column(r) : nullptr; };
    ll_receive<FLAG_IN_DATA>(v, from);
    launch_dependents();  // not before: see common/flag_in_data.cuh
    float sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) sum += v[r];
    const float mean = block_sum<WARPS>(sum, scratch[0]) / width;
    sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        v[r] -= mean;
        if (column(r) < width) sum += v[r] * v[r];
    }
    const float scale = rsqrtf(block_sum<WARPS>(sum, scratch[1]) / width + eps);
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (column(r) < width) ll_store(y + at + column(r), v[r] * scale * factor[r] + added[r]);
}
