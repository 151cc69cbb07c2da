// A gated delta net in prefill, S positions of one sequence (delta_net.cuh), before and after state_chunks.cu:
//
//     delta_inputs    product of attn_in  ->  convolution, silu; q and k of length 1  ->  mixed float32 [S, channels]
//                     beta and decay of each value head  ->  factors float32 [S, 2, value heads]
//     delta_outputs   out  ->  RMSNorm, silu(gate) *; the last TAPS inputs of the convolution are kept
//
// counted: as state_heads.cuh has it
//
// Launch: delta_inputs: grid (S, tasks / 8 rounded up), a warp for each task: a key head's queries and keys, a value head's
//             values, or beta and decay of 32 value heads
//         delta_outputs: grid (S, value heads / 8 rounded up), a warp for each head
//
// Macros: those of delta_net.cuh

#include "attention/delta_net.cuh"

static constexpr int WIDEST = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM, LANE_CHANNELS = (WIDEST + 31) / 32;

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
    factors += (u64)row * 2 * heads;
    if (task >= key_heads + heads) {
        const int head = (task - key_heads - heads) * 32 + lane;
        if (head >= heads) return;
        const float known = load_l2(x_factor + row);
        logits += (u64)row * 2 * heads + head;
        factors[head] = sigmoid(load_l2(logits) * known);
        factors[heads + head] = decay_of(load_l2(logits + heads) * known + dt_bias[head], rate[head]);
        return;
    }
    const ProductRows product{sums, factor, inverse, bias, of.width()};
    mixed += (u64)row * of.channels();
    // What the convolution makes of a lane's channels, from a first one on.
    const auto convolve = [&](float (&y)[LANE_CHANNELS], int channel, int dim) {
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; ++i) {
            const int c = channel + lane + 32 * i;
            const bool is = lane + 32 * i < dim;
            y[i] = is ? silu(convolved(product, inputs, taps, row, first, 0, c, of.channels())) : 0;
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
    float k[LANE_CHANNELS], qq = 0, kk = 0;
    convolve(y, task * KEY_DIM, KEY_DIM);
    convolve(k, of.keys() + task * KEY_DIM, KEY_DIM);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) qq += y[i] * y[i], kk += k[i] * k[i];
    const float of_q = rsqrtf(warp_sum(qq) + L2_EPS) * rsqrtf((float)KEY_DIM), of_k = rsqrtf(warp_sum(kk) + L2_EPS);
    keep(y, task * KEY_DIM, KEY_DIM, of_q);
    keep(k, of.keys() + task * KEY_DIM, KEY_DIM, of_k);
}

// norm float32 [VALUE_DIM], eps: RMSNorm of each head's outputs; inputs, first: as in delta_inputs, written
extern "C" __global__ void __launch_bounds__(256)
    delta_outputs(const float* sums, const float* factor, float inverse, const float* bias, const float* norm,
                  float eps, int heads, int first, const int* counted, float* inputs, float* out) {
    const int row = blockIdx.x, head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DeltaRows of{heads};
    const ProductRows product{sums, factor, inverse, bias, of.width()};
    launch_dependents();
    wait_for_previous();
    keep_inputs(product, inputs, row, counted_of(gridDim.x, counted), first, 0, of.channels(),
                blockIdx.y * 256 + threadIdx.x, gridDim.y * 256);
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
