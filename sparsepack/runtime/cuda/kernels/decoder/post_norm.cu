// What attention or an MLP adds to the residual stream in models that norm it first: y = scale (residual + RMSNorm(u)).
// u is what one product left, or with SUMS 2 RMSNorm(update) + RMSNorm(other), of the experts that were chosen and of those
// that every token has.
//
//     update    float32 [B, width]      what a product left; other likewise
//     residual  float32 [B, width]      may be y itself; not of the kernel just before
//     y         float32 [B, width]      ->  squares float32 [B]: the sums of y^2, which the next norm needs
//
// Launch: grid (B), a block a row; thread t has the columns t, t + THREADS, ..
//
// Macros: ROUNDS: width / THREADS, rounded up; SUMS; FLAG_IN_DATA 1: updates are read as soon as it is stored
//         (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/block_sum.cuh"
#include "common/flag_in_data.cuh"

#ifndef ROUNDS
#define ROUNDS 4
#define FLAG_IN_DATA 1
#endif
#ifndef SUMS
#define SUMS 1
#endif

static constexpr int THREADS = 1024, WARPS = THREADS / 32;

// squares: null where nobody asks for them. of_update, of_other: norms of these, where SUMS 2
extern "C" __global__ void __launch_bounds__(THREADS)
    post_norm(const float* update, const float* residual, const float* norm, int width, float eps, float* y,
              float* squares, float scale_of_sum, const float* other, const float* of_update, const float* of_other) {
    __shared__ float scratch[2 + 2 * (SUMS > 1)][WARPS];
    const auto column = [](int r) { return r * THREADS + (int)threadIdx.x; };
    const u64 at = (u64)blockIdx.x * width;
    float weight[ROUNDS], v[ROUNDS], before[ROUNDS];
    float second[SUMS > 1 ? ROUNDS : 1], norms[2][SUMS > 1 ? ROUNDS : 1];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const bool real = column(r) < width;
        weight[r] = real ? norm[column(r)] : 0;
        if (SUMS > 1) norms[0][r] = real ? of_update[column(r)] : 0, norms[1][r] = real ? of_other[column(r)] : 0;
    }
    if (!FLAG_IN_DATA) wait_for_previous();
    const auto receive = [&](const float* all, float (&x)[ROUNDS]) {
        const auto from = [&](int r) { return column(r) < width ? all + at + column(r) : nullptr; };
        ll_receive<FLAG_IN_DATA>(x, from);
    };
    receive(update, v);
#if SUMS > 1
    receive(other, second);
#endif
    launch_dependents();  // not before: see common/flag_in_data.cuh
#if SUMS > 1
    float of_first = 0, of_second = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) of_first += v[r] * v[r], of_second += second[r] * second[r];
    of_first = rsqrtf(block_sum<WARPS>(of_first, scratch[2]) / width + eps);
    of_second = rsqrtf(block_sum<WARPS>(of_second, scratch[3]) / width + eps);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) v[r] = v[r] * of_first * norms[0][r] + second[r] * of_second * norms[1][r];
#endif
    float sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        before[r] = column(r) < width ? load_l2(residual + at + column(r)) : 0;
        sum += v[r] * v[r];
    }
    const float scale = rsqrtf(block_sum<WARPS>(sum, scratch[0]) / width + eps);
    sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        v[r] = (before[r] + v[r] * scale * weight[r]) * scale_of_sum;
        sum += v[r] * v[r];
    }
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (column(r) < width) ll_store(y + at + column(r), v[r]);
    if (!squares) return;
    sum = block_sum<WARPS>(sum, scratch[1]);
    if (threadIdx.x == 0) ll_store(squares + blockIdx.x, sum);
}
