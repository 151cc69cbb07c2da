// LFM2's short convolution between attn_in and attn_out, which gives b, c and u of every channel: the output is c times a
// causal convolution (causal_convolution.cuh) of b u.
//
//     rows   float32 [B, 3, channels]     b, then c, then u: what attn_in left, or its product of S positions as
//                                         decoder/prefill.cu takes it, with factors, `inverse`, and bias or null
//     out    float32 [B or S, channels]
//
// Launch: a thread a channel. short_conv_step: grid (channels / THREADS rounded up, B), a position of each sequence.
//         short_conv_prefill: grid (channels / THREADS rounded up, S / ROWS rounded up), positions of one sequence; the
//         threads of the first ones, which alone read what is kept, also keep the last inputs
//
// Macros: that of causal_convolution.cuh; FLAG_IN_DATA 1: rows of a step are read as soon as they are stored
//         (common/flag_in_data.cuh): an earlier kernel than the one that writes them wrote the position

#include "attention/causal_convolution.cuh"
#include "common/flag_in_data.cuh"

#ifndef FLAG_IN_DATA
#define FLAG_IN_DATA 1
#endif

static constexpr int THREADS = 256, ROWS = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_step(const float* rows, int channels, const float* taps, const int* positions, float* inputs,
                    float* out) {
    const int c = blockIdx.x * THREADS + threadIdx.x, b = blockIdx.y;
    const bool real = c < channels;
    rows += (u64)b * 3 * channels + c;
    inputs += (u64)b * TAPS * channels;
    if (!FLAG_IN_DATA) wait_for_previous();
    const int position = load_l2(positions + b);
    const float sum = real ? earlier_taps(inputs, taps, position, c, channels) : 0;
    const float last_tap = real ? taps[c * TAPS + TAPS - 1] : 0;
    float of_row[3];
    const auto at = [&](int i) { return real ? rows + (u64)i * channels : nullptr; };
    ll_receive<FLAG_IN_DATA>(of_row, at);
    launch_dependents();                    // not before: see common/flag_in_data.cuh
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    if (!real) return;
    const float input = of_row[0] * of_row[2];
    inputs[input_place(position, c, channels)] = input;
    ll_store(out + (u64)b * channels + c, of_row[1] * (sum + input * last_tap));
}

// inputs, first, count: of the sequence, its tokens before these, and these; counted: int32 [1], so many of these count, or
// null: all.
extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_prefill(const float* sums, const float* factor, float inverse, const float* bias, int channels,
                       const float* taps, float* inputs, int first, int count, const int* counted, float* out) {
    const int c = blockIdx.x * THREADS + threadIdx.x, begin = blockIdx.y * ROWS;
    launch_dependents();
    wait_for_previous();
    if (c >= channels) return;
    const auto at = [&](int row, int part) {
        const int channel = part * channels + c;
        const float x = load_l2(sums + (u64)row * 3 * channels + channel) * load_l2(factor + row) * inverse;
        return bias ? x + bias[channel] : x;
    };
    const auto input_of = [&](int row) {  // counted from `first`
        if (row >= 0) return at(row, 0) * at(row, 2);
        return first + row < 0 ? 0 : load_l2(inputs + input_place(first + row, c, channels));
    };
    float window[TAPS], tap[TAPS];  // inputs of the last positions, the newest last
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
        tap[t] = taps[c * TAPS + t];
        window[t] = t ? input_of(begin - TAPS + t) : 0;
    }
    for (int row = begin; row < min(begin + ROWS, count); ++row) {
#pragma unroll
        for (int t = 0; t < TAPS - 1; ++t) window[t] = window[t + 1];
        window[TAPS - 1] = input_of(row);
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TAPS; ++t) sum += window[t] * tap[t];
        out[(u64)row * channels + c] = at(row, 1) * sum;
    }
    if (begin) return;
    const int end = counted ? min(load_l2(counted), count) : count;
    for (int row = max(0, end - TAPS); row < end; ++row) inputs[input_place(first + row, c, channels)] = input_of(row);
}
