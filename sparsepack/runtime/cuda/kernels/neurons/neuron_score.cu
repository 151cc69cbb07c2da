// Who may be active by a copy of the gate in two bits a weight (formats/orders/gates.py): the neurons whose score, the
// product of their copy with the normed input xn, is above -limit |xn|.
//
//     codes     | neuron 0: word 0 .. words - 1 | neuron 1 | ..     u32, 16 weights each, the first in the lowest bits
//     listed    float32 [INPUTS][neurons]: 1 or 0
//
//     score = scale (2 sum_j code_j xn_j - 3 sum_j xn_j)
//
// A warp takes four neurons at a time, with every 32nd word for each lane: block b has those of group b + w blocks. A
// code is a float as it is, once the rest of its word is masked off: below 2^-126 floats are integers times 2^-149, so
// bits s and s + 1 (up to bit 23) hold code 2^(s - 149), exactly. xn takes 2^(64 - s) in turn, and the sum 2^85. The
// last four codes of a word lie above bit 23 and are shifted down by 8. In shared memory xn lies as lanes read it:
//
//     xn        [INPUTS][4 quads of a word][words] float4
//
// Launch: grid (blocks), 1024 threads; shared memory: INPUTS * hidden floats.
//
// Macros: INPUTS sequences

#include "common/common.cuh"

#ifndef INPUTS
#define INPUTS 1
#endif

static constexpr int WARPS = 32, THREADS = 32 * WARPS;
static constexpr int ROWS = 4;   // of a warp at a time
static constexpr int AHEAD = 4;  // words of each that are asked for together
static constexpr u32 CODE = 3;

// By how many bits code j of quad i lies to the left, once the last quad is shifted down.
__device__ __forceinline__ constexpr int code_shift(int i, int j) { return 8 * i + 2 * j - (i == 3 ? 8 : 0); }

__device__ __forceinline__ float code(u32 word, int i, int j) {
    return __uint_as_float((i == 3 ? word >> 8 : word) & CODE << code_shift(i, j));
}

// The sum over the block, in the same order every time; every thread gets it.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = warp_sum(scratch[threadIdx.x % 32]);
    __syncthreads();
    return v;
}

// scales float16 [neurons]; limits float32 [neurons]; x float32 [INPUTS][16 words], before its RMSNorm by `norm`, eps
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    neuron_score(const u32* __restrict__ codes, const u16* __restrict__ scales, const float* __restrict__ limits,
                 int neurons, int words, const float* x, const float* __restrict__ norm, float eps, float* listed) {
    extern __shared__ float4 xn[];
    __shared__ float scratch[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden = 16 * words;
    launch_dependents();
    wait_for_previous();

    // Of xn. Without the zeros ptxas 13.0 gives the sums of all sequences one register, which then has the last sequence's.
    float sum[INPUTS] = {}, length[INPUTS] = {};
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        const float* from = x + b * hidden;
        float squares = 0;
        for (int k = 4 * threadIdx.x; k < hidden; k += 4 * THREADS) {
            const float4 v = load_l2((const float4*)(from + k));
            squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        const float scale = 1 / sqrtf(block_sum(squares, scratch) / hidden + eps);
        float of_thread = 0;
        squares = 0;
        for (int k = 4 * threadIdx.x; k < hidden; k += 4 * THREADS) {
            const float4 factor = *(const float4*)(norm + k);
            float4 v = load_l2((const float4*)(from + k));
            v.x = v.x * scale * factor.x;
            v.y = v.y * scale * factor.y;
            v.z = v.z * scale * factor.z;
            v.w = v.w * scale * factor.w;
            of_thread += (v.x + v.y) + (v.z + v.w);
            squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            const int quad = k / 4 % 4;
            const float first = __uint_as_float((u32)(127 + 64 - code_shift(quad, 0)) << 23);  // 2^(64 - s)
            v.x *= first;
            v.y *= first * 0x1p-2f;
            v.z *= first * 0x1p-4f;
            v.w *= first * 0x1p-6f;
            xn[(b * 4 + quad) * words + k / 16] = v;
        }
        const float of_block = block_sum(of_thread, scratch), squared = block_sum(squares, scratch);
#pragma unroll
        for (int of = 0; of < INPUTS; ++of) {  // in registers
            if (of != b) continue;
            sum[of] = of_block;
            length[of] = sqrtf(squared);
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int group = blockIdx.x + warp * gridDim.x; group * ROWS < neurons; group += gridDim.x * WARPS) {
        const u32* from[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) from[r] = codes + (u64)min(group * ROWS + r, neurons - 1) * words;
        float dot[INPUTS][ROWS] = {};
#pragma unroll 1
        for (int first = lane; first < words; first += 32 * AHEAD) {
            u32 word[AHEAD][ROWS];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) word[a][r] = first + 32 * a < words ? from[r][first + 32 * a] : 0;
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (first + 32 * a >= words) break;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int b = 0; b < INPUTS; ++b) {
                        const float4 v = xn[(b * 4 + i) * words + first + 32 * a];
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) {
                            const u32 w = word[a][r];
                            dot[b][r] = fmaf(code(w, i, 0), v.x, dot[b][r]);
                            dot[b][r] = fmaf(code(w, i, 1), v.y, dot[b][r]);
                            dot[b][r] = fmaf(code(w, i, 2), v.z, dot[b][r]);
                            dot[b][r] = fmaf(code(w, i, 3), v.w, dot[b][r]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            float mine = 0;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float all = warp_sum(dot[b][r]);
                if (lane == r) mine = all;
            }
            const int neuron = group * ROWS + lane;
            if (lane < ROWS && neuron < neurons) {
                const float score = half_to_float(scales[neuron]) * (0x1p86f * mine - 3 * sum[b]);
                // What is no number is listed, so that it is seen.
                listed[b * neurons + neuron] = score <= -limits[neuron] * length[b] ? 0 : 1;
            }
        }
    }
}
