// A gated delta net in a step, one position of each sequence, between attn_in and attn_out (delta_net.cuh):
//
//     rows      float32 [B, width]            what attn_in left
//     x         float32 [B, hidden]           what attn_in took  ->  beta and decay of each value head
//     rows  ->  convolution, silu  ->  q and k of length 1  ->  delta rule  ->  RMSNorm, silu(gate) *  ->  out
//     out       float32 [B, value heads, VALUE_DIM]
//
// Launch: grid (value heads, B), WARPS warps a block: a head's state (state_heads.cuh) comes while attn_in
// still computes, as do the products that give beta and decay.
//
// Where rows have their flag in the data, an earlier kernel than the one that writes them wrote the position; and where
// x has none, that kernel waited for who wrote x (common/flag_in_data.cuh).
//
// Macros: those of delta_net.cuh; ROUNDS: hidden / threads, rounded up; FLAG_IN_DATA 1: rows are read as soon as they are
//         stored, X_IN_DATA 1: x too; else the kernel before has ended

#include "attention/delta_net.cuh"

#ifndef ROUNDS
#define ROUNDS 8
#define FLAG_IN_DATA 1
#define X_IN_DATA 1
#endif

static constexpr int WARPS = STEP_WARPS, THREADS = STEP_THREADS;
static constexpr int EACH = (NUMBERS + THREADS - 1) / THREADS;  // numbers of a thread
static_assert(2 * COLUMNS <= 32, "a lane has one sum");

// norm, eps    RMSNorm of x [hidden], and of outputs; out_norm [VALUE_DIM]
// gates        float32 [2, value heads, hidden]: of beta, then of the decay, to which dt_bias [value heads] is added
// rate         float32 [value heads]
// taps         float32 [channels, TAPS], the last one is of the position itself
extern "C" __global__ void __launch_bounds__(THREADS)
    delta_step(const float* rows, const float* x, int hidden, const float* norm, float eps, const float* gates,
               const float* taps, const float* rate, const float* dt_bias, const float* out_norm, const int* positions,
               float* state, float* inputs, float* out) {
    __shared__ __align__(16) float numbers[NUMBERS];
    __shared__ float results[VALUE_DIM], totals[WARPS][2 * COLUMNS], of_warps[3][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, b = blockIdx.y;
    const DeltaRows of{(int)gridDim.x};
    rows += (u64)b * of.width();
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
        const int channel = of.place(head, number(e));
        sum[e] = earlier_taps(inputs, taps, position, channel, of.channels());
        last_tap[e] = taps[channel * TAPS + TAPS - 1];
    }

    // Beta and decay.
    x += (u64)b * hidden;
    const auto column = [&](int r) { return r * THREADS + (int)threadIdx.x; };
    float of_beta[ROUNDS], of_decay[ROUNDS], v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        const float weight = k < hidden ? norm[k] : 0;
        of_beta[r] = k < hidden ? weight * gates[(u64)head * hidden + k] : 0;
        of_decay[r] = k < hidden ? weight * gates[(u64)(of.heads + head) * hidden + k] : 0;
    }
    const auto from = [&](int r) { return column(r) < hidden ? x + column(r) : nullptr; };
    ll_receive<X_IN_DATA>(v, from);
    float squares = 0, beta = 0, decay = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) squares += v[r] * v[r], beta += v[r] * of_beta[r], decay += v[r] * of_decay[r];
    squares = warp_sum(squares), beta = warp_sum(beta), decay = warp_sum(decay);
    if (lane == 0) of_warps[0][warp] = squares, of_warps[1][warp] = beta, of_warps[2][warp] = decay;

    // The position itself.
    float value[EACH];
    const auto of_row = [&](int e) { return number(e) < NUMBERS ? rows + of.place(head, number(e)) : nullptr; };
    ll_receive<FLAG_IN_DATA>(value, of_row);
    launch_dependents();  // not before: see common/flag_in_data.cuh
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (number(e) < NUMBERS)
            numbers[number(e)] = number(e) < CONVOLVED ? silu(sum[e] + value[e] * last_tap[e]) : value[e];
    }
    __syncthreads();
    const auto whole = [&](int which) { return warp_sum(lane < WARPS ? of_warps[which][lane] : 0); };
    const float scale = rsqrtf(whole(0) / hidden + eps);
    beta = sigmoid(whole(1) * scale);
    decay = decay_of(whole(2) * scale + dt_bias[head], rate[head]);

    float q[LANE_KEYS], k[LANE_KEYS], qq = 0, kk = 0, qk = 0;
    load_keys_shared(q, numbers);
    load_keys_shared(k, numbers + KEY_DIM);
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) qq += q[i] * q[i], kk += k[i] * k[i], qk += q[i] * k[i];
    const float of_q = rsqrtf(warp_sum(qq) + L2_EPS) * rsqrtf((float)KEY_DIM), of_k = rsqrtf(warp_sum(kk) + L2_EPS);
    qk = warp_sum(qk) * of_q * of_k;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) q[i] *= of_q, k[i] *= of_k;

    float sums[2 * COLUMNS];
    delta_sums(sums, s, q, k);
    fold<2 * COLUMNS, 16>(sums, lane);
    totals[warp][number_of<2 * COLUMNS, 16>(0, lane)] = sums[0];  // lanes with the same number have the same sum
    __syncwarp();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = min(column_of(c), VALUE_DIM - 1);
        const float error = beta * (numbers[2 * KEY_DIM + column] - decay * totals[warp][c]);
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) s[c][i] = decay * s[c][i] + k[i] * error;
        if (lane == 0 && column_of(c) < VALUE_DIM) results[column] = decay * totals[warp][COLUMNS + c] + qk * error;
    }
    __syncthreads();
    float of_results = 0;
    for (int c = lane; c < VALUE_DIM; c += 32) of_results += results[c] * results[c];
    const float normed = rsqrtf(warp_sum(of_results) / VALUE_DIM + eps);
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    for (int c = threadIdx.x; c < VALUE_DIM; c += THREADS)
        ll_store(out + own * VALUE_DIM + c, results[c] * normed * out_norm[c] * silu(numbers[CONVOLVED + c]));

    store_state(state, position, s);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        // Of queries and keys by the first of the heads that have them.
        const bool is = number(e) < CONVOLVED && (number(e) >= 2 * KEY_DIM || head % RATIO == 0);
        if (is) inputs[input_place(position, of.place(head, number(e)), of.channels())] = value[e];
    }
}
