// A state-space model in a step, one position of each sequence, between attn_in and attn_out (mamba.cuh), in two launches:
//
//     mamba_step    rows float32 [B, width]  ->  convolution, silu  ->  y float32 [B, heads, VALUE_DIM]
//     mamba_norm    y, rows  ->  silu(gate) *, RMSNorm of each group  ->  out float32 [B, heads, VALUE_DIM]
//
// y is words with their flag in the data that these two alone have: mamba_norm resets them.
//
// Launch: mamba_step: grid (heads, B), WARPS warps a block: a head's state (state_heads.cuh) comes
//             while attn_in still computes
//         mamba_norm: grid (groups of channels, B)
//
// Where rows have their flag in the data, an earlier kernel than the one that writes them wrote the position
// (common/flag_in_data.cuh).
//
// Macros: those of mamba.cuh; FLAG_IN_DATA 1: what comes in is read as soon as it is stored; else the kernel before has
//         ended

#include "attention/mamba.cuh"
#include "common/flag_in_data.cuh"
#include "common/fold.cuh"

#ifndef FLAG_IN_DATA
#define FLAG_IN_DATA 1
#endif

static constexpr int WARPS = STEP_WARPS, THREADS = STEP_THREADS;
static constexpr int NUMBERS = CONVOLVED + 1;                   // the last is dt
static constexpr int EACH = (NUMBERS + THREADS - 1) / THREADS;  // numbers of a thread
static_assert(COLUMNS <= 32, "a lane has one sum");

// taps  float32 [channels, TAPS], the last one is of the position itself; conv_bias [channels]
// rate, dt_bias, skip  float32 [heads]
extern "C" __global__ void __launch_bounds__(THREADS)
    mamba_step(const float* rows, const float* taps, const float* conv_bias, const float* rate, const float* dt_bias,
               const float* skip, const int* positions, float* state, float* inputs, float* y) {
    __shared__ __align__(16) float numbers[NUMBERS];
    __shared__ float results[VALUE_DIM], totals[WARPS][COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, b = blockIdx.y;
    const MambaRows of{(int)gridDim.x};
    rows += (u64)b * of.width() + of.inner();
    if (!FLAG_IN_DATA) wait_for_previous();
    const int position = load_l2(positions + b);

    const u64 own = (u64)b * of.heads + head;
    float s[COLUMNS][LANE_KEYS];
    load_state(s, state, position);

    // Of the convolution all but the position itself.
    const auto number = [&](int e) { return (int)threadIdx.x + e * THREADS; };
    inputs += (u64)b * TAPS * of.channels();
    float sum[EACH] = {}, last_tap[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (number(e) >= CONVOLVED) continue;
        const int channel = of.channel(head, number(e));
        sum[e] = earlier_taps(inputs, taps, position, channel, of.channels()) + conv_bias[channel];
        last_tap[e] = taps[channel * TAPS + TAPS - 1];
    }

    // The position itself.
    float value[EACH];
    ll_receive<FLAG_IN_DATA>(value, [&](int e) {
        const int n = number(e);
        return n < CONVOLVED ? rows + of.channel(head, n) : n < NUMBERS ? rows + of.channels() + head : nullptr;
    });
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (number(e) < NUMBERS)
            numbers[number(e)] = number(e) < CONVOLVED ? silu(sum[e] + value[e] * last_tap[e]) : value[e];
    }
    __syncthreads();
    launch_dependents();  // not before, nor by threads without a number: see common/flag_in_data.cuh
    const float d = softplus(numbers[CONVOLVED] + dt_bias[head]), decay = expf(-rate[head] * d);
    float q[LANE_KEYS], k[LANE_KEYS], qk = 0;
    load_keys_shared(q, numbers);
    load_keys_shared(k, numbers + KEY_DIM);
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) qk += q[i] * k[i];
    qk = warp_sum(qk);

    float sums[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        sums[c] = 0;
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) sums[c] += q[i] * s[c][i];
    }
    fold<COLUMNS, 16>(sums, lane);
    totals[warp][number_of<COLUMNS, 16>(0, lane)] = sums[0];  // lanes with the same number have the same sum
    __syncwarp();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = min(column_of(c), VALUE_DIM - 1);
        const float x = numbers[2 * KEY_DIM + column];
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) s[c][i] = decay * s[c][i] + k[i] * (d * x);
        if (lane == 0 && column_of(c) < VALUE_DIM)
            results[column] = decay * totals[warp][c] + qk * (d * x) + skip[head] * x;
    }
    __syncthreads();
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    for (int c = threadIdx.x; c < VALUE_DIM; c += THREADS) ll_store(y + own * VALUE_DIM + c, results[c]);

    store_state(state, position, s);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        // Of B and C by the first of the heads that have them.
        const bool is = number(e) < CONVOLVED && (number(e) >= 2 * KEY_DIM || head % RATIO == 0);
        if (is) inputs[input_place(position, of.channel(head, number(e)), of.channels())] = value[e];
    }
}

// width: of rows; norm float32 [heads, VALUE_DIM], eps
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    mamba_norm(float* y, const float* rows, int width, const float* norm, float eps, float* out) {
    __shared__ float scratch[NORM_THREADS / 32];
    const int first = blockIdx.x * GROUP, b = blockIdx.y;
    const u64 own = (u64)b * gridDim.x * GROUP + first;
    const auto number = [&](int i) { return (int)threadIdx.x + i * NORM_THREADS; };
    float weight[OF_THREAD], values[2 * OF_THREAD], x[OF_THREAD];
    if (!FLAG_IN_DATA) wait_for_previous();
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) weight[i] = number(i) < GROUP ? norm[first + number(i)] : 0;
    ll_receive<FLAG_IN_DATA>(values, [&](int i) -> const float* {
        const int n = number(i % OF_THREAD);
        return n >= GROUP ? nullptr : i < OF_THREAD ? y + own + n : rows + (u64)b * width + first + n;
    });
    launch_dependents();  // not before: see common/flag_in_data.cuh
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) x[i] = values[i] * silu(values[OF_THREAD + i]);
    const float scale = group_scale(x, eps, scratch);
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        if (number(i) >= GROUP) continue;
        ll_store(out + own + number(i), x[i] * scale * weight[i]);
        ((u32*)y)[own + number(i)] = SENTINEL;
    }
}
