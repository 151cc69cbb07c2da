// RMSNorm of the queries of all heads together, and of the keys, in models that have it, or of latents of queries, and of
// keys and values; the rest stays as it is: values, or the part of keys that turns.
//
//     x   float32 [B, queries + keys + rest]   what attn_in left, one after the other
//     y   float32 [B, queries + keys + rest]   x * factor * inverse + bias, of it queries and keys normed; or where APART
//                                              [B, queries], then [B, keys], then [B, rest]
//
// Launch: grid (3, B): a block has the queries, the keys or the rest of a row; thread t its columns t, t + THREADS, ..
//
// Macros: ROUNDS: width of the widest of the three / THREADS, rounded up; FLAG_IN_DATA 1: x is read as soon as it is
//         stored (common/flag_in_data.cuh), not when the kernel before has ended; APART

#include "common/flag_in_data.cuh"

#ifndef ROUNDS
#define ROUNDS 4
#define FLAG_IN_DATA 1
#endif
#ifndef APART
#define APART 0
#endif

static constexpr int THREADS = 1024, WARPS = THREADS / 32;

// factor: float32 [B], null for ones; bias: float32 [queries + keys + rest], null for none; q_norm: float32 [queries], null:
// they stay as they are; k_norm: [keys].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_norms(const float* x, const float* factor, float inverse, const float* bias, const float* q_norm,
              const float* k_norm, int queries, int keys, int rest, float eps, float* y) {
    __shared__ float of_warps[WARPS];
    const int part = blockIdx.x, width = part == 0 ? queries : part == 1 ? keys : rest;
    const int first = part ? queries + (part - 1) * keys : 0;  // column of the part
    const float* norm = part == 0 ? q_norm : part == 1 ? k_norm : nullptr;
    const u64 at = (u64)blockIdx.y * (queries + keys + rest) + first;
    const auto column = [](int r) { return r * THREADS + (int)threadIdx.x; };
    float weight[ROUNDS], v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) weight[r] = norm && column(r) < width ? norm[column(r)] : 1;
    if (!FLAG_IN_DATA) wait_for_previous();
    const auto from = [&](int r) { return column(r) < width ? x + at + column(r) : nullptr; };
    ll_receive<FLAG_IN_DATA>(v, from);
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
    y += APART ? (u64)gridDim.y * first + blockIdx.y * width : at;
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (column(r) < width) ll_store(y + column(r), v[r] * normed * weight[r]);
}
