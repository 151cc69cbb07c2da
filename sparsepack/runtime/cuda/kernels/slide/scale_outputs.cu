// What a library multiplied, with its scales: y = sum * x_scale[token] * w_scale[row] + bias[row].
//
//     sums  [tokens, stride]   INT32, F32 or BF16: `rows` of each token count
//     y     [tokens, rows]     F32, F16 or BF16
//     bias  [rows] of the type of y, or null; scales float32, each may be null: 1
//
// Launch: grid (tokens, rows / 1024 rounded up), 256 threads; a thread has every 256th of 1024 rows.
//
// Macros: SUMS 0 INT32, 1 F32, 2 BF16; OUTPUT 0 F32, 1 F16, 2 BF16

#include "common/common.cuh"

__device__ __forceinline__ float sum_at(const u8* sums, u64 at) {
    if (SUMS == 0) return (float)load_l2((const int*)sums + at);
    if (SUMS == 1) return load_l2((const float*)sums + at);
    return bfloat_to_float(load_l2((const u16*)sums + at));
}
__device__ __forceinline__ float bias_at(const u8* bias, int at) {
    if (OUTPUT == 0) return ((const float*)bias)[at];
    const u16 bits = ((const u16*)bias)[at];
    return OUTPUT == 1 ? half_to_float(bits) : bfloat_to_float(bits);
}

extern "C" __global__ void __launch_bounds__(256)
    scale_outputs(const u8* __restrict__ sums, int stride, const float* __restrict__ x_scale,
                  const float* __restrict__ w_scale, const u8* __restrict__ bias, u8* __restrict__ y, int rows) {
    launch_dependents();
    wait_for_previous();
    const u64 token = blockIdx.x;
    const float scale = x_scale ? load_l2(x_scale + token) : 1;
    for (int i = 0; i < 4; ++i) {
        const int row = (blockIdx.y * 4 + i) * 256 + threadIdx.x;
        if (row >= rows) return;
        float value = sum_at(sums, token * stride + row) * (w_scale ? scale * w_scale[row] : scale);
        if (bias) value += bias_at(bias, row);
        const u64 to = token * rows + row;
        if (OUTPUT == 0) ((float*)y)[to] = value;
        if (OUTPUT == 1) ((u16*)y)[to] = float_to_half(value);
        if (OUTPUT == 2) ((u16*)y)[to] = float_to_bfloat(value);
    }
}
