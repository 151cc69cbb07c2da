// Inputs of sparse24 weights (SlideSparse, 4.2): quantised token by token, each with a scale of its own, and expanded.
//
//     x      [tokens, columns]            F32, F16 or BF16: read once
//     row    bytes [columns]              in shared memory: the token's values, quantised; where groups lie within
//                                         eights of inputs, what windows see is put together in registers instead
//     q      bytes [tokens, stride]       word w of a row: the four values that window w sees, from input
//                                         OF * (w / WINDOWS) + 2 * (w % WINDOWS) on; zeros behind the last window
//     scale  float32 [tokens]             largest |x| / STEPS
//
// Launch: a block for each token. A thread keeps its inputs in registers between finding the largest and quantising,
// and writes 8 or 16 bytes at a time. A token that is not finite gets a scale that is not, so that its outputs are not
// either.
//
// Macros: INPUT 0 .. 2 for F32, F16, BF16; FP8 0 for int8, 1 for float8_e4m3fn (sm_89 and later); OF, WINDOWS: of a
// group; THREAD_EIGHTS: groups of eight inputs that a thread has; WARPS, BLOCKS: of a multiprocessor

#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int THREADS = WARPS * 32;
static constexpr int EIGHT_WORDS = 8 % OF == 0 ? 8 / OF * WINDOWS : 0;  // of q, where groups lie within eights
static constexpr float STEPS = FP8 ? 448.0f : 127.0f;
static constexpr float SMALLEST = 1e-30f;  // as formats/orders/slide.py has it

// Two values as bytes, the first in the low one.
__device__ __forceinline__ u32 quantised(float first, float second) {
#if FP8
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return (u32)(u8)__float2int_rn(first) | (u32)(u8)__float2int_rn(second) << 8;
#endif
}

// Eight inputs as bytes, times a factor.
__device__ __forceinline__ uint2 quantised(const Eight& x, float factor) {
    return make_uint2(quantised(x[0] * factor, x[1] * factor) | quantised(x[2] * factor, x[3] * factor) << 16,
                      quantised(x[4] * factor, x[5] * factor) | quantised(x[6] * factor, x[7] * factor) << 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantise_slide(const u8* __restrict__ x, int columns, int element, int stride, u8* __restrict__ q,
                   float* __restrict__ scale) {
    launch_dependents();
    __shared__ u32 largest_of[WARPS];
    wait_for_previous();
    const u64 token = blockIdx.x;
    const u8* const from = x + token * columns * element;
    const bool aligned = ((u64)x | (u64)columns * element) % 16 == 0;

    Eight v[THREAD_EIGHTS] = {};
    u32 largest = 0;  // float32 without its sign: a NaN is larger than any number
#pragma unroll
    for (int c = 0; c < THREAD_EIGHTS; ++c) {
        const int column = (c * THREADS + threadIdx.x) * 8;
        if (column < columns) {
            v[c].load(from, column, columns, aligned);
#pragma unroll
            for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(v[c][i]) & 0x7fffffff);
        }
    }
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = max(largest, largest_of[w]);
    const float top = __uint_as_float(largest);
    const float inverse = top > SMALLEST ? __fdiv_rn(STEPS, top) : 0;
    if (threadIdx.x == 0) scale[token] = top <= SMALLEST ? 0 : __fdiv_rn(top, STEPS);

    u8* const to = q + token * stride;
#if 8 % OF == 0
    // A warp has the words of 32 eights, which lie one behind the other.
    __shared__ __align__(16) u32 words_of[WARPS][32 * EIGHT_WORDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < THREAD_EIGHTS; ++c) {
        const int first = (c * THREADS + 32 * warp) * EIGHT_WORDS * 4;  // of these bytes
        if (first >= stride) continue;
        const uint2 eight = quantised(v[c], inverse);
        if (EIGHT_WORDS == 2) {
            if (first + 8 * lane < stride) *(uint2*)(to + first + 8 * lane) = eight;
        } else {  // three
            u32* const words = words_of[warp];
            words[3 * lane] = eight.x;
            words[3 * lane + 1] = eight.x >> 16 | eight.y << 16;
            words[3 * lane + 2] = eight.y;
            __syncwarp();
            if (lane < 24 && first + 16 * lane < stride)
                *(uint4*)(to + first + 16 * lane) = *(const uint4*)(words + 4 * lane);
            __syncwarp();
        }
    }
#else
    extern __shared__ __align__(16) u8 row[];  // whole groups of columns
    const int groups = (columns + OF - 1) / OF;
#pragma unroll
    for (int c = 0; c < THREAD_EIGHTS; ++c) {
        const int column = (c * THREADS + threadIdx.x) * 8;
        if (column < columns) *(uint2*)(row + column) = quantised(v[c], inverse);
    }
    // What a shorter last group lacks. The eight that the last input lies in has its zeros.
    for (int column = (columns + 7) / 8 * 8 + threadIdx.x; column < groups * OF; column += THREADS) row[column] = 0;
    __syncthreads();

    const int words = groups * WINDOWS;
    for (int first = threadIdx.x * 4; first * 4 < stride; first += THREADS * 4) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int w = first + i;
            const u16* const seen = (const u16*)(row + w / WINDOWS * OF + w % WINDOWS * 2);
            word[i] = w < words ? (u32)seen[0] | (u32)seen[1] << 16 : 0;
        }
        *(uint4*)(to + first * 4) = make_uint4(word[0], word[1], word[2], word[3]);
    }
#endif
}
