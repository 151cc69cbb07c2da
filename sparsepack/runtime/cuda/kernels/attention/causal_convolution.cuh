// A convolution of each channel over its last TAPS positions, and what is kept of it:
//
//     inputs  float32 [sequences, TAPS, channels]   of position p at p modulo TAPS
//     taps    float32 [channels, TAPS]              the last one is of the position itself
//
// So a step at a position writes none of the inputs that it, or another step there, reads. Before a text there are zeros,
// whatever lies there.
//
// Macro: TAPS: positions that it sees

#pragma once

#include "common/common.cuh"

#ifndef TAPS
#define TAPS 4
#endif

// The place of a channel's input at a position, of a sequence.
__device__ __forceinline__ u64 input_place(int position, int channel, int channels) {
    return (u64)(position % TAPS) * channels + channel;
}

// What the positions before one give.
__device__ __forceinline__ float earlier_taps(const float* inputs, const float* taps, int position, int channel,
                                              int channels) {
    float sum = 0;
#pragma unroll
    for (int t = 0; t < TAPS - 1; ++t) {
        const int p = position - (TAPS - 1) + t;
        if (p >= 0) sum += load_l2(inputs + input_place(p, channel, channels)) * taps[channel * TAPS + t];
    }
    return sum;
}
