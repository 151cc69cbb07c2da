// What a block makes of an input that each token has for it: y = activation(gate) * input.
//
//     gate   float32 [B, width]      what a product with the residual stream left
//     input  float32 [B, ..]         rows begin `stride` numbers apart
//     y      float32 [B, width]
//
// Launch: grid (blocks of a row, B).
//
// Macros: ACTIVATION: number of the gate's function

#include "common/activations.cuh"
#include "common/common.cuh"

#ifndef ACTIVATION
#define ACTIVATION 3
#endif

static constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_inputs(const float* gate, const float* input, int width, int stride, float* y) {
    const int column = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y;
    launch_dependents();
    wait_for_previous();
    if (column >= width) return;
    const long long at = (long long)row * width + column;
    y[at] = gated(ACTIVATION, load_l2(gate + at), load_l2(input + (long long)row * stride + column));
}
