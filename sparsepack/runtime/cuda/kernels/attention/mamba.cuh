// What the kernels of state-space models share (Mamba-2, arXiv 2405.21060; state_heads.cuh). A head keeps a matrix S, which
// every token multiplies by its decay: with d = softplus(dt + dt_bias) it becomes exp(-rate d) S + d B x, and gives S^T C +
// skip x. So queries are C, keys B, values x: key heads are groups, KEY_DIM is the state's width, VALUE_DIM that of a head.
//
//     rows      | gates of the output, as x | x of all heads | B of all groups | C of them |  dt of all heads  |
//                                           |  the channels of the convolution           |
//
// The output is normed by groups of GROUP channels, after its gates.
//
// Macros: those of state_heads.cuh; GROUP

#pragma once

#include "attention/state_heads.cuh"
#include "common/block_sum.cuh"

#ifndef GROUP
#define GROUP 512
#endif

static constexpr int NORM_THREADS = 256, OF_THREAD = (GROUP + NORM_THREADS - 1) / NORM_THREADS;

// Where rows have what, of so many heads.
struct MambaRows : MixedRows {
    __device__ __forceinline__ int inner() const { return heads * VALUE_DIM; }
    __device__ __forceinline__ int width() const { return inner() + channels() + heads; }
    // The channel of the convolution of a head's CONVOLVED: C, B, x.
    __device__ __forceinline__ int channel(int head, int number) const {
        if (number < KEY_DIM) return inner() + keys() + head / RATIO * KEY_DIM + number;
        if (number < 2 * KEY_DIM) return inner() + head / RATIO * KEY_DIM + number - KEY_DIM;
        return head * VALUE_DIM + number - 2 * KEY_DIM;
    }
    // Where `mixed` has a channel.
    __device__ __forceinline__ int mixed_place(int channel) const {
        const int n = channel - inner();
        return n < 0 ? 2 * keys() + channel : n < keys() ? keys() + n : n - keys();
    }
};

// The norm of a group of channels, of which thread t has every NORM_THREADS-th from t on.
__device__ __forceinline__ float group_scale(const float (&x)[OF_THREAD], float eps, float* scratch) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) squares += x[i] * x[i];
    return rsqrtf(block_sum<NORM_THREADS / 32>(squares, scratch) / GROUP + eps);
}
