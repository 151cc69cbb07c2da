// logits = router RMSNorm(x) + bias, from which experts are chosen (choose.cuh), for several inputs.
//
//     router  float32 [experts, hidden]
//     x       float32 [inputs, hidden], with partial sums of x^2 [inputs, parts]  ->  logits float32 [inputs, experts]
//
// Launch: grid (experts, inputs), THREADS threads: a block has an expert, whose weights it loads before the input is
// there. Sums in the same order every time.
//
// Macros: ROUNDS: columns of a thread; PARTS: partial sums of a thread; FLAG_IN_DATA 1: x and its squares are read as
//         soon as they are stored, of one input (common/flag_in_data.cuh)

#ifndef ROUNDS
#define ROUNDS 8
#define PARTS 1
#define FLAG_IN_DATA 1
#endif

#include "common/flag_in_data.cuh"

static constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    route(const float* __restrict__ router, int hidden, const float* x, const float* norm, float eps,
          const float* squares, int parts, const float* bias, float* logits) {
    __shared__ float of_products[THREADS / 32], of_squares[THREADS / 32];
    const int expert = blockIdx.x, input = blockIdx.y;
    const auto column = [](int i) { return i * THREADS + (int)threadIdx.x; };
    float weight[ROUNDS], values[ROUNDS + PARTS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int k = column(i);
        weight[i] = k < hidden ? router[(u64)expert * hidden + k] * norm[k] : 0;
    }
    const float of_bias = bias ? bias[expert] : 0;
    const auto at = [&](int i) {
        const int k = column(i), part = column(i - ROUNDS);
        if (i < ROUNDS) return k < hidden ? x + (u64)input * hidden + k : nullptr;
        return part < parts ? squares + input * parts + part : nullptr;
    };
    if (!FLAG_IN_DATA) wait_for_previous();
    ll_receive<FLAG_IN_DATA>(values, at);
    launch_dependents();  // not before: see common/flag_in_data.cuh
    float product = 0, square = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) product += weight[i] * values[i];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) square += values[ROUNDS + i];
    product = warp_sum(product), square = warp_sum(square);
    if (threadIdx.x % 32 == 0) of_products[threadIdx.x / 32] = product, of_squares[threadIdx.x / 32] = square;
    __syncthreads();
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    if (threadIdx.x) return;
    product = square = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) product += of_products[w], square += of_squares[w];
    ll_store(logits + input * gridDim.x + expert, product * rsqrtf(square / hidden + eps) + of_bias);
}
