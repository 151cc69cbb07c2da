// What prefill does between its products. Those run on the tensor cores through cuBLAS, float16 in and float32 out, so
// every row that goes in is multiplied by a power of two that brings its largest magnitude just below 2^15:
//
//     scaled   float16 [S, columns]      what goes in
//     factor   float32 [S]               the powers of two that undo it
//     product  float32 [S, rows]         what comes out: W scaled; W x = product * factor[s] * inverse, `inverse` of
//                                        what the weights were multiplied by
//
// Launch: add_rows, gate_rows: grid (S), a block a row; a thread has the columns VECTOR (r * THREADS + thread) .. of
// round r.
//         split_heads: grid (S, heads / 8 rounded up), a warp for each head.
//
// Macros: VECTOR 4 where every row begins at a multiple of 16 bytes, 1 elsewhere; ROUNDS: width / (VECTOR * THREADS),
//         rounded up; ACTIVATION: number of the gate's function; or HEADS 1 for split_heads, with HEAD_DIM and the
//         cache's type KV: 1 bfloat16, 2 float16, 3 float32, ROTARY_DIM and NEIGHBOURS (attention/rotary.cuh),
//         and OUTPUT_GATES 1 where gates lie behind the queries of each head; NORMED 1: what add_rows adds is normed first;
//         CENTRED 1: norm is a LayerNorm's

#include "common/common.cuh"
#include "common/activations.cuh"

#ifndef VECTOR
#define VECTOR 4
#define ROUNDS 2
#endif
#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef HEADS
#define HEADS 0
#endif
#ifndef OUTPUT_GATES
#define OUTPUT_GATES 0
#endif
#ifndef K_EQ_V
#define K_EQ_V 0
#endif
#ifndef SHARED_KV
#define SHARED_KV 0
#endif
#ifndef NORMED
#define NORMED 0
#endif
#ifndef CENTRED
#define CENTRED 0
#endif

#if !HEADS
static constexpr int THREADS = 512;

__device__ __forceinline__ int column(int round) { return VECTOR * (round * THREADS + threadIdx.x); }

__device__ __forceinline__ void load(float (&v)[VECTOR], const float* p) {
#if VECTOR == 4
    const float4 x = load_l2((const float4*)p);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
#else
    v[0] = load_l2(p);
#endif
}

__device__ __forceinline__ void store(float* p, const float (&v)[VECTOR]) {
#if VECTOR == 4
    *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
#else
    *p = v[0];
#endif
}

__device__ __forceinline__ void store_scaled_fp16(u16* p, const float (&v)[VECTOR]) {
#if VECTOR == 4
    *(uint2*)p = make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
#else
    *p = float_to_half(v[0]);
#endif
}

// The sum and the maximum over a block, in every thread. scratch: float [2][THREADS / 32] of shared memory.
__device__ __forceinline__ void over_block(float& sum, float& largest, float (*scratch)[THREADS / 32]) {
    sum = warp_sum(sum);
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) {
        scratch[0][threadIdx.x / 32] = sum;
        scratch[1][threadIdx.x / 32] = largest;
    }
    __syncthreads();
    sum = largest = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        sum += scratch[0][w];
        largest = fmaxf(largest, scratch[1][w]);
    }
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(127 + e) << 23); }

// e of 2^e that leaves `largest` below 2^15. Of infinity it is small enough to matter no more.
__device__ __forceinline__ int exponent_for(float largest) {
    const int e = (int)(__float_as_uint(largest) >> 23 & 0xff) - 126;  // largest < 2^e
    return min(15 - e, 120);
}

// v[r] = product * factor * inverse + bias, of a row that begins at `at`.
__device__ __forceinline__ void finished(float (&v)[VECTOR], const float* product, float factor, float inverse,
                                         const float* bias) {
    load(v, product);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        v[j] = v[j] * factor * inverse;
        if (bias) v[j] += bias[j];
    }
}

// x        float32 [S, width]; what a product adds to it is written back
// product  float32 [S, width] or null, with its factors, `inverse`, and bias [width] or null
// product_norm  float32 [width]: RMSNorm of what is added, where NORMED
// sum_scale     what x and what is added are multiplied by
// norm     float32 [width]: RMSNorm comes before `scaled`, or where CENTRED LayerNorm, with norm_bias [width]; or null
// scaled   float16 [S, width] and factor float32 [S]; or null: x is all that is wanted
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rows(float* x, int width, const float* product, const float* product_factor, float inverse, const float* bias,
             const float* product_norm, float sum_scale, const float* norm, const float* norm_bias, float eps,
             u16* scaled, float* factor) {
    __shared__ float scratch[2][THREADS / 32];
    launch_dependents();
    wait_for_previous();
    const u64 at = (u64)blockIdx.x * width;
    float v[ROUNDS][VECTOR];
    float sum = 0, largest = 0;
    const float known = product ? load_l2(product_factor + blockIdx.x) : 0;
    float of_product = 1;  // its RMSNorm's factor
    if (NORMED && product) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int k = column(r);
            if (k >= width) break;
            float more[VECTOR];
            finished(more, product + at + k, known, inverse, bias ? bias + k : nullptr);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum += more[j] * more[j];
        }
        over_block(sum, largest, scratch);
        of_product = 1 / sqrtf(sum / width + eps);
        sum = 0;
        __syncthreads();  // scratch is written again below
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= width) break;
        load(v[r], x + at + k);
        if (product) {
            float more[VECTOR];
            finished(more, product + at + k, known, inverse, bias ? bias + k : nullptr);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
                v[r][j] = (v[r][j] + (NORMED ? more[j] * of_product * product_norm[k + j] : more[j])) * sum_scale;
            store(x + at + k, v[r]);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            sum += CENTRED ? v[r][j] : v[r][j] * v[r][j];
            if (norm && !CENTRED) v[r][j] *= norm[k + j];
            largest = fmaxf(largest, fabsf(v[r][j]));
        }
    }
    if (!scaled) return;
    over_block(sum, largest, scratch);
    float scale = norm ? 1 / sqrtf(sum / width + eps) : 1;
#if CENTRED
    const float mean = sum / width;
    sum = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        if (column(r) >= width) break;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            v[r][j] -= mean;
            sum += v[r][j] * v[r][j];
        }
    }
    __syncthreads();  // scratch is written again
    over_block(sum, largest, scratch);
    const float normed = 1 / sqrtf(sum / width + eps);
    scale = 1, largest = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= width) break;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            v[r][j] = v[r][j] * normed * norm[k + j] + norm_bias[k + j];
            largest = fmaxf(largest, fabsf(v[r][j]));
        }
    }
    __syncthreads();
    over_block(sum, largest, scratch);
#endif
    const int exponent = exponent_for(largest * scale);
    const float up = power_of_two(exponent);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= width) break;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) v[r][j] = v[r][j] * scale * up;
        store_scaled_fp16(scaled + at + k, v[r]);
    }
    if (threadIdx.x == 0) factor[blockIdx.x] = power_of_two(-exponent);
}

// activation(gate) * up of products float32 [S, width], rows a pitch apart, with biases [width] or null -> scaled
// [S, width], factor [S].
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_rows(const float* gate, int gate_pitch, float gate_inverse, const float* gate_bias, const float* up,
              int up_pitch, float up_inverse, const float* up_bias, int width, const float* product_factor, u16* scaled,
              float* factor) {
    __shared__ float scratch[2][THREADS / 32];
    launch_dependents();
    wait_for_previous();
    gate += (u64)blockIdx.x * gate_pitch;
    up += (u64)blockIdx.x * up_pitch;
    float v[ROUNDS][VECTOR];
    float none = 0, largest = 0;
    const float known = load_l2(product_factor + blockIdx.x);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= width) break;
        float other[VECTOR];
        finished(v[r], gate + k, known, gate_inverse, gate_bias ? gate_bias + k : nullptr);
        finished(other, up + k, known, up_inverse, up_bias ? up_bias + k : nullptr);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            v[r][j] = gated(ACTIVATION, v[r][j], other[j]);
            largest = fmaxf(largest, fabsf(v[r][j]));
        }
    }
    over_block(none, largest, scratch);
    const int exponent = exponent_for(largest);
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= width) break;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) v[r][j] *= scale;
        store_scaled_fp16(scaled + (u64)blockIdx.x * width + k, v[r]);
    }
    if (threadIdx.x == 0) factor[blockIdx.x] = power_of_two(-exponent);
}

#else  // ---- Heads --------------------------------------------------------------------------------------------------

#include "attention/cache_type.cuh"
#include "attention/rotary.cuh"

// Norm and rotate queries and keys, and append keys and values to the cache.
//
// product       float32 [S, heads + 2 kv_heads, HEAD_DIM]: q, then k, then v; factors, `inverse` and bias as above. With
//               OUTPUT_GATES gates behind the queries of each head, which are left alone
// q_norm, k_norm, v_norm  float32 [HEAD_DIM] or null: RMSNorm of every head
// cos, sin      float32 [context, ROTARY_DIM / 2]; row s is position first + s
// growth        float32 [context] or null: what queries are multiplied by at each position
// q             CacheType [S, heads, HEAD_DIM]
// keys, values  CacheType [kv_heads, context, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(256)
    split_heads(const float* product, const float* product_factor, float inverse, const float* bias,
                const float* q_norm, const float* k_norm, const float* v_norm, float eps, const float* cos,
                const float* sin, const float* growth, int first, int context, int heads, int kv_heads, CacheType* q,
                CacheType* keys, CacheType* values) {
    launch_dependents();
    wait_for_previous();
    const int row = blockIdx.x, lane = threadIdx.x % 32, head = blockIdx.y * 8 + threadIdx.x / 32;
    const int all = heads + (SHARED_KV ? 0 : 2 * kv_heads);  // there are queries alone
    if (head >= all) return;
    constexpr int MORE = OUTPUT_GATES;  // rows that a query head has beside its queries
    const int same = K_EQ_V && head >= heads + kv_heads ? kv_heads : 0;  // values are keys
    const int stored = head - same + MORE * min(head, heads);
    const float* from = product + ((u64)row * (all - K_EQ_V * kv_heads + MORE * heads) + stored) * HEAD_DIM;
    const float known = load_l2(product_factor + row);
    float a[LANE_PAIRS], b[LANE_PAIRS];
    float sum = 0;
#pragma unroll
    for (int p = 0; p < LANE_PAIRS; ++p) {
        const int i = p * 32 + lane;
        a[p] = b[p] = 0;
        if (i >= HALF) continue;
        a[p] = load_l2(from + first_channel(i)) * known * inverse;
        b[p] = load_l2(from + second_channel(i)) * known * inverse;
        if (bias) {
            a[p] += bias[stored * HEAD_DIM + first_channel(i)];
            b[p] += bias[stored * HEAD_DIM + second_channel(i)];
        }
        sum += a[p] * a[p] + b[p] * b[p];
    }
    const int position = first + row;
    const bool rotated = head < heads + kv_heads;
    const float* norm = head < heads ? q_norm : rotated ? k_norm : v_norm;
    const float scale = norm ? 1 / sqrtf(warp_sum(sum) / HEAD_DIM + eps) : 1;
    const float factor = growth && head < heads ? growth[position] : 1;
    CacheType* to = head < heads ? q + ((u64)row * heads + head) * HEAD_DIM
                    : rotated    ? keys + ((u64)(head - heads) * context + position) * HEAD_DIM
                                 : values + ((u64)(head - heads - kv_heads) * context + position) * HEAD_DIM;
#pragma unroll
    for (int p = 0; p < LANE_PAIRS; ++p) {
        const int i = p * 32 + lane;
        if (i >= HALF) continue;
        if (norm) {
            a[p] *= scale * norm[first_channel(i)];
            b[p] *= scale * norm[second_channel(i)];
        }
        if (rotated && is_rotary(i)) {
            const float c = cos[(u64)position * ROTARY_PAIRS + i], s = sin[(u64)position * ROTARY_PAIRS + i],
                        old = a[p];
            a[p] = old * c - b[p] * s;
            b[p] = b[p] * c + old * s;
        }
        to[first_channel(i)] = to_cache_type(a[p] * factor);
        to[second_channel(i)] = to_cache_type(b[p] * factor);
    }
}
#endif
