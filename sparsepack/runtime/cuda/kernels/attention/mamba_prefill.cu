// A state-space model in prefill, S positions of one sequence (mamba.cuh), before and after state_chunks.cu:
//
//     mamba_inputs    product of attn_in  ->  convolution, silu  ->  mixed float32 [S, channels]: C, B, x
//                     d and decay of each head  ->  factors float32 [S, 2, heads]
//     mamba_outputs   out, mixed  ->  + skip x, silu(gate) *, RMSNorm of each group; the last TAPS inputs of the
//                     convolution are kept
//
// counted: as state_heads.cuh has it
//
// Launch: mamba_inputs: grid (S, (channels + heads) / NORM_THREADS rounded up), a thread a channel or head
//         mamba_outputs: grid (S, groups of channels)
//
// Macros: those of mamba.cuh

#include "attention/mamba.cuh"

// inputs, first: of the sequence, and its tokens before these; conv_bias [channels]; rate, dt_bias [heads]
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    mamba_inputs(const float* sums, const float* factor, float inverse, const float* bias, const float* taps,
                 const float* conv_bias, const float* inputs, int first, int heads, const float* rate,
                 const float* dt_bias, float* mixed, float* factors) {
    const int row = blockIdx.x, c = blockIdx.y * NORM_THREADS + threadIdx.x;
    const MambaRows of{heads};
    const ProductRows product{sums, factor, inverse, bias, of.width()};
    launch_dependents();
    wait_for_previous();
    const int head = c - of.channels();
    if (head >= heads) return;
    if (head >= 0) {
        const float d = softplus(product.at(row, of.inner() + c) + dt_bias[head]);
        factors += (u64)row * 2 * heads + head;
        factors[0] = d, factors[heads] = expf(-rate[head] * d);
        return;
    }
    const float sum = conv_bias[c] + convolved(product, inputs, taps, row, first, of.inner(), c, of.channels());
    mixed[(u64)row * of.channels() + of.mixed_place(c)] = silu(sum);
}

// skip [heads]; norm [heads, VALUE_DIM], eps; inputs, first: as in mamba_inputs, written
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    mamba_outputs(const float* sums, const float* factor, float inverse, const float* bias, const float* mixed,
                  const float* skip, const float* norm, float eps, int heads, int first, const int* counted,
                  float* inputs, float* out) {
    __shared__ float scratch[NORM_THREADS / 32];
    const int row = blockIdx.x, group = blockIdx.y * GROUP;
    const MambaRows of{heads};
    const ProductRows product{sums, factor, inverse, bias, of.width()};
    launch_dependents();
    wait_for_previous();
    keep_inputs(product, inputs, row, counted_of(gridDim.x, counted), first, of.inner(), of.channels(),
                blockIdx.y * NORM_THREADS + threadIdx.x, gridDim.y * NORM_THREADS);
    out += (u64)row * of.inner();
    mixed += (u64)row * of.channels() + of.mixed_place(0);
    const auto channel = [&](int i) { return group + (int)threadIdx.x + i * NORM_THREADS; };
    float x[OF_THREAD];
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const int c = channel(i);
        x[i] = 0;
        if (c >= group + GROUP) continue;
        const float y = load_l2(out + c) + skip[c / VALUE_DIM] * load_l2(mixed + c);
        x[i] = y * silu(product.at(row, c));
    }
    const float scale = group_scale(x, eps, scratch);
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i)
        if (channel(i) < group + GROUP) out[channel(i)] = x[i] * scale * norm[channel(i)];
}
