// A gated delta net in prefill, S positions of one sequence (delta_net.cuh), in three launches:
//
//     delta_inputs    product of attn_in  ->  convolution, silu; q and k of length 1  ->  mixed float32 [S, channels]
//                     beta and decay of each value head, q^T k of each key head  ->  factors float32
//                     [S, 2 value heads + key heads]
//     delta_rule      mixed, factors  ->  out float32 [S, value heads, VALUE_DIM], the state after them
//     delta_outputs   out  ->  RMSNorm, silu(gate) *; the last TAPS inputs of the convolution are kept
//
// product: as decoder/prefill.cu takes it, with its factors, `inverse`, and bias or null.
//
// Launch: delta_inputs: grid (S, tasks / 8 rounded up), a warp for each task: a key head's queries and keys, a value head's
//             values, or beta and decay of 32 value heads
//         delta_rule: grid (VALUE_DIM / (RULE_WARPS * RULE_COLUMNS) rounded up, value heads). A warp has RULE_COLUMNS columns
//             of a state and needs no other, and passes from position to position alone
//         delta_outputs: grid (S, value heads / 8 rounded up), a warp for each head
//
// Macros: those of delta_net.cuh

#include "attention/delta_net.cuh"

static constexpr int RULE_WARPS = 4, RULE_COLUMNS = 8, AHEAD = 4;
static constexpr int WIDEST = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM, LANE_CHANNELS = (WIDEST + 31) / 32;

struct DeltaProduct {
    const float *sums, *factor;
    float inverse;
    const float* bias;
    int width;
    __device__ __forceinline__ float at(int row, int channel) const {
        const float x = load_l2(sums + (u64)row * width + channel) * load_l2(factor + row) * inverse;
        return bias ? x + bias[channel] : x;
    }
};

// inputs, first: of the sequence, and its tokens before these; logits float32 [S, 2, value heads] of beta and decay, before
// x_factor [S]
extern "C" __global__ void __launch_bounds__(256)
    delta_inputs(const float* sums, const float* factor, float inverse, const float* bias, const float* taps,
                 const float* inputs, int first, int heads, const float* logits, const float* x_factor,
                 const float* rate, const float* dt_bias, float* mixed, float* factors) {
    const int row = blockIdx.x, task = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DeltaRows of{heads};
    const int key_heads = heads / RATIO;
    launch_dependents();
    wait_for_previous();
    const int width = 2 * heads + key_heads;  // of factors
    factors += (u64)row * width;
    if (task >= key_heads + heads) {
        const int head = (task - key_heads - heads) * 32 + lane;
        if (head >= heads) return;
        const float known = load_l2(x_factor + row);
        logits += (u64)row * 2 * heads + head;
        factors[head] = sigmoid(load_l2(logits) * known);
        factors[heads + head] = decay_of(load_l2(logits + heads) * known + dt_bias[head], rate[head]);
        return;
    }
    const DeltaProduct product{sums, factor, inverse, bias, of.width()};
    mixed += (u64)row * of.channels();
    // What the convolution makes of a lane's channels, from a first one on.
    const auto convolve = [&](float (&y)[LANE_CHANNELS], int channel, int dim) {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; ++i) {
            const int c = channel + lane + 32 * i;
            y[i] = 0;
            if (lane + 32 * i >= dim) continue;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                const int s = row - (TAPS - 1) + t, p = first + s;
                if (p < 0) continue;
                const float x = s >= 0 ? product.at(s, c) : load_l2(inputs + input_place(p, c, of.channels()));
                y[i] += x * taps[c * TAPS + t];
            }
            y[i] = silu(y[i]);
        }
    };
    const auto keep = [&](const float (&y)[LANE_CHANNELS], int channel, int dim, float scale) {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; ++i)
            if (lane + 32 * i < dim) mixed[channel + lane + 32 * i] = y[i] * scale;
    };
    float y[LANE_CHANNELS];
    if (task >= key_heads) {
        const int channel = 2 * of.keys() + (task - key_heads) * VALUE_DIM;
        convolve(y, channel, VALUE_DIM);
        keep(y, channel, VALUE_DIM, 1);
        return;
    }
    float k[LANE_CHANNELS], qq = 0, kk = 0, qk = 0;
    convolve(y, task * KEY_DIM, KEY_DIM);
    convolve(k, of.keys() + task * KEY_DIM, KEY_DIM);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) qq += y[i] * y[i], kk += k[i] * k[i], qk += y[i] * k[i];
    const float of_q = rsqrtf(warp_sum(qq) + L2_EPS) * rsqrtf((float)KEY_DIM), of_k = rsqrtf(warp_sum(kk) + L2_EPS);
    qk = warp_sum(qk) * of_q * of_k;
    keep(y, task * KEY_DIM, KEY_DIM, of_q);
    keep(k, of.keys() + task * KEY_DIM, KEY_DIM, of_k);
    if (lane == 0) factors[2 * heads + task] = qk;
}

// A position as a lane needs it. v: of the column whose sum the lane has.
struct Token {
    float q[LANE_KEYS], k[LANE_KEYS], v, beta, decay, qk;
};

// before, after: the states of all heads of the sequence, maybe the same; before is null at the beginning of a text
extern "C" __global__ void __launch_bounds__(RULE_WARPS * 32)
    delta_rule(const float* mixed, const float* factors, int count, const float* before, float* after, float* out) {
    constexpr int SUMS = 2 * RULE_COLUMNS;
    __shared__ __align__(16) float errors[RULE_WARPS][2][RULE_COLUMNS];  // of two positions in turns
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const DeltaRows of{(int)gridDim.y};
    const int column = ((int)blockIdx.x * RULE_WARPS + warp) * RULE_COLUMNS;
    launch_dependents();
    wait_for_previous();
    if (column >= VALUE_DIM) return;
    const u64 own = ((u64)head * VALUE_DIM + column) * KEY_DIM;
    float s[RULE_COLUMNS][LANE_KEYS];
#pragma unroll
    for (int c = 0; c < RULE_COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) s[c][i] = 0;
        if (before && column + c < VALUE_DIM) load_keys_l2(s[c], before + own + c * KEY_DIM);
    }
    // The sum that a lane has after folding, and its column.
    const int number = number_of<SUMS, 16>(0, lane), of_lane = number % RULE_COLUMNS;
    const bool of_output = number >= RULE_COLUMNS, real = column + of_lane < VALUE_DIM;

    const int width = 2 * of.heads + of.heads / RATIO;
    const float* next_row = mixed;
    const float* next_factors = factors;
    const int q_at = of.place(head, 0), k_at = of.place(head, KEY_DIM);
    const int v_at = of.place(head, 2 * KEY_DIM) + min(column + of_lane, VALUE_DIM - 1);
    const auto load = [&](Token& token, bool is) {  // the next one
        if (!is) return;
        load_keys_l2(token.q, next_row + q_at);
        load_keys_l2(token.k, next_row + k_at);
        token.v = load_l2(next_row + v_at);
        token.beta = load_l2(next_factors + head);
        token.decay = load_l2(next_factors + of.heads + head);
        token.qk = load_l2(next_factors + 2 * of.heads + head / RATIO);
        next_row += of.channels(), next_factors += width;
    };
    out += (u64)head * VALUE_DIM + column + of_lane;
    Token tokens[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) load(tokens[j], j < count);
#pragma unroll 1
    for (int start = 0; start < count; start += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (start + j >= count) break;
            const Token token = tokens[j];
            load(tokens[j], start + j + AHEAD < count);
            float sums[SUMS];
            delta_sums(sums, s, token.q, token.k);
            fold<SUMS, 16>(sums, lane);
            float* const own_errors = errors[warp][j % 2];
            if (!of_output) own_errors[of_lane] = token.beta * (token.v - token.decay * sums[0]);
            __syncwarp();
#pragma unroll
            for (int c = 0; c < RULE_COLUMNS; c += 4) {
                const float4 v = *(const float4*)(own_errors + c);
                const float error[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int n = 0; n < 4; ++n) {
#pragma unroll
                    for (int i = 0; i < LANE_KEYS; ++i) s[c + n][i] = token.decay * s[c + n][i] + token.k[i] * error[n];
                }
            }
            if (of_output && real) *out = token.decay * sums[0] + token.qk * own_errors[of_lane];
            out += of.heads * VALUE_DIM;
        }
    }
#pragma unroll
    for (int c = 0; c < RULE_COLUMNS; ++c)
        if (column + c < VALUE_DIM) store_keys(after + own + c * KEY_DIM, s[c]);
}

// norm float32 [VALUE_DIM], eps: RMSNorm of each head's outputs; inputs, first: as in delta_inputs, written
extern "C" __global__ void __launch_bounds__(256)
    delta_outputs(const float* sums, const float* factor, float inverse, const float* bias, const float* norm,
                  float eps, int heads, int first, float* inputs, float* out) {
    const int row = blockIdx.x, head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DeltaRows of{heads};
    const DeltaProduct product{sums, factor, inverse, bias, of.width()};
    launch_dependents();
    wait_for_previous();
    if (row >= (int)gridDim.x - TAPS) {
        float* kept = inputs + (u64)((first + row) % TAPS) * of.channels();
        for (int c = blockIdx.y * 256 + threadIdx.x; c < of.channels(); c += gridDim.y * 256)
            kept[c] = product.at(row, c);
    }
    if (head >= heads) return;
    out += ((u64)row * heads + head) * VALUE_DIM;
    constexpr int EACH = (VALUE_DIM + 31) / 32;
    float y[EACH], squares = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        y[i] = lane + 32 * i < VALUE_DIM ? load_l2(out + lane + 32 * i) : 0;
        squares += y[i] * y[i];
    }
    const float scale = rsqrtf(warp_sum(squares) / VALUE_DIM + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = lane + 32 * i;
        if (c < VALUE_DIM)
            out[c] = y[i] * scale * norm[c] * silu(product.at(row, of.channels() + head * VALUE_DIM + c));
    }
}
