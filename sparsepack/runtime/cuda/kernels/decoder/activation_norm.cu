// What enters attn_out or mlp_mid where no product makes it of what lies there: normed, or of an MLP's xIELU.
//
//     x  float32 [B, width]; MADE 1 [B, 2 width]: gate, then up
//     v  MADE 0: x; 1: activation(gate) * up; 2: xIELU(x), with coefficients float32 [4] (models/activations.py)
//     y  float32 [B, width]: v, or NORMED 1: v / sqrt(mean of v^2 + eps) * weight
//
// Launch: grid (B), a block a row; thread t has the columns t, t + THREADS, ..
//
// Macros: ROUNDS: width / THREADS, rounded up; MADE, NORMED; ACTIVATION: number of the function, see activations.cuh;
//         FLAG_IN_DATA 1: x is read as soon as it is stored (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/activations.cuh"
#include "common/block_sum.cuh"
#include "common/flag_in_data.cuh"

#ifndef ROUNDS
#define ROUNDS 7
#define FLAG_IN_DATA 1
#endif
#ifndef MADE
#define MADE 0
#endif
#ifndef NORMED
#define NORMED 1
#endif
#ifndef ACTIVATION
#define ACTIVATION 0
#endif

static constexpr int THREADS = 1024, WARPS = THREADS / 32, EACH = MADE == 1 ? 2 : 1;

// weight: float32 [width], or null
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_norm(const float* x, const float* weight, const float* coefficients, int width, float eps, float* y) {
    __shared__ float scratch[WARPS];
    const auto column = [](int r) { return r * THREADS + (int)threadIdx.x; };
    const u64 at = (u64)blockIdx.x * width;
    float factor[ROUNDS], v[EACH * ROUNDS], of[4];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) factor[r] = NORMED && column(r) < width ? weight[column(r)] : 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = MADE == 2 ? coefficients[i] : 0;
    if (!FLAG_IN_DATA) wait_for_previous();
    const auto from = [&](int i) {
        const int c = column(i % ROUNDS);
        return c < width ? x + EACH * at + (i / ROUNDS) * width + c : nullptr;
    };
    ll_receive<FLAG_IN_DATA>(v, from);
    launch_dependents();  // not before: see common/flag_in_data.cuh
    float sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const float a = v[r];
        if (MADE == 1) v[r] = gated(ACTIVATION, a, v[EACH * ROUNDS - ROUNDS + r]);
        if (MADE == 2) v[r] = of[2] * a + (a > 0 ? of[0] * a * a : (expm1f(a > of[3] ? of[3] : a) - a) * of[1]);
        sum += v[r] * v[r];
    }
    const float scale = NORMED ? rsqrtf(block_sum<WARPS>(sum, scratch) / width + eps) : 1;
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (column(r) < width) ll_store(y + at + column(r), v[r] * scale * factor[r]);
}
