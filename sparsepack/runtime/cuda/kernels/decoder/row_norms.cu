// RMSNorm of the queries of all heads together, and of the keys, in models that have it; values stay as they are.
//
//     x   float32 [B, queries + 2 keys]      what attn_in left: q, then k, then v
//     y   float32 [B, queries + 2 keys]      x * factor * inverse + bias, of it q and k normed
//
// Launch: grid (3, B): a block has the queries, the keys or the values of a row; thread t its columns t, t + THREADS, ..
//
// Macros: ROUNDS: width of the widest of the three / THREADS, rounded up; FLAG_IN_DATA 1: x is read as soon as it is
//         stored (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/flag_in_data.cuh"

#ifndef ROUNDS
#define ROUNDS 4
#define FLAG_IN_DATA 1
#endif

static constexpr int THREADS = 1024, WARPS = THREADS / 32;

// factor: float32 [B], null for ones; bias: float32 [queries + 2 keys], null for none; q_norm, k_norm: float32 [queries],
// [keys].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_norms(const float* x, const float* factor, float inverse, const float* bias, const float* q_norm,
              const float* k_norm, int queries, int keys, float eps, float* y) {
    __shared__ float of_warps[WARPS];
    const int part = blockIdx.x, width = part ? keys : queries;
    const int first = part ? queries + (part - 1) * keys : 0;  // column of the part
    const float* norm = part == 0 ? q_norm : part == 1 ? k_norm : nullptr;
    const u64 at = (u64)blockIdx.y * (queries + 2 * keys) + first;
    const auto column = [](int r) { return r * THREADS + (int)threadIdx.x; };
    float weight[ROUNDS], v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) weight[r] = norm && column(r) < width ? norm[column(r)] : 1;
    if (!FLAG_IN_DATA) wait_for_previous();
    const auto from = [&](int r) { return column(r) < width ? x + at + column(r) : nullptr; };
    if (FLAG_IN_DATA) {
        ll_wait(v, from);
    } else {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) v[r] = from(r) ? load_l2(from(r)) : 0;
    }
    launch_dependents();  // not before: see common/flag_in_data.cuh
    const float scale = factor ? load_l2(factor + blockIdx.y) * inverse : inverse;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        v[r] *= scale;
        if (bias && column(r) < width) v[r] += bias[first + column(r)];
        sum += v[r] * v[r];
    }
    float normed = 1;
    if (norm) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
        __syncthreads();
        normed = rsqrtf(warp_sum(of_warps[threadIdx.x % WARPS]) / width + eps);
    }
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (column(r) < width) ll_store(y + at + column(r), v[r] * normed * weight[r]);
}
