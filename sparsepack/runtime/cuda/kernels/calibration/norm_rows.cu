// Rows over their root mean square, rounded, then times a weight, rounded again, as stock norms do:
//
//     out[c] = r(weight[c] * r(x[c] * rsqrt(mean of x * x + eps))),   r: the nearest value of the type
//
//     x        [windows, seen, columns]   F16 or BF16, rows one behind the other, `window` values from window to window;
//              pieces of four columns aligned to 8 bytes
//     weight   [columns] in the type, or null: not multiplied
//     out      [windows, seen, columns], rows one behind the other
//
// Launch: a block of THREADS for each row. Squares are added in the order of vectorized_layer_norm_kernel of torch 2.13,
// so that the result is the same.
//
// Macros: INPUT (common/eight.cuh), 1 or 2; ROUNDS: columns / (4 * THREADS), rounded up

#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int THREADS = 128;

__device__ __forceinline__ float value_of(uint2 four, int i) {
    const u16 bits = (u16)((i < 2 ? four.x : four.y) >> 16 * (i % 2));
    return INPUT == 1 ? half_to_float(bits) : bfloat_to_float(bits);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rows(const u16* __restrict__ x, int window, int columns, float eps, const u16* __restrict__ weight,
              u16* __restrict__ out) {
    __shared__ float of_warps[THREADS / 32];
    wait_for_previous();
    const uint2* const from = (const uint2*)(x + (u64)blockIdx.y * window + (u64)blockIdx.x * columns);
    uint2* const to = (uint2*)(out + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * columns);
    const int pieces = columns / 4;
    uint2 held[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = round * THREADS + threadIdx.x;
        held[round] = at < pieces ? load_l2(from + at) : make_uint2(0, 0);
    }
    float sum = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = __fmaf_rn(value_of(held[round], i), value_of(held[round], i), sum);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(ALL_LANES, sum, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    const float all = (of_warps[0] + of_warps[2]) + (of_warps[1] + of_warps[3]);
    const float scale = rsqrtf(all / (float)columns + eps);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = round * THREADS + threadIdx.x;
        if (at >= pieces) break;
        const uint2 weights = weight ? load_l2((const uint2*)weight + at) : make_uint2(0, 0);
        u32 made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float normed = Eight::rounded(__fmul_rn(scale, value_of(held[round], i)));
            made[i] = Eight::bits(weight ? __fmul_rn(value_of(weights, i), normed) : normed);
        }
        to[at] = make_uint2(made[0] | made[1] << 16, made[2] | made[3] << 16);
    }
}
