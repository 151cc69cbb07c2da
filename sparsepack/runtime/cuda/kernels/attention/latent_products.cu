// The products of attention by latents in a step whose cache has latents: what attn_kv_b would make of them is multiplied into
// queries, and into what attention gives (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
//
//     keys     float16 [heads, PLAIN, RANK]        of attn_kv_b, times a power of two that `inverse` undoes
//     values   float16 [heads, VALUE, RANK]
//     q        float32 [B, heads, PLAIN + TURNING]
//     latents  float32 [B, RANK], normed; turning float32 [B, TURNING]
//     qkv      float32 [B, heads + 1, TURNING + RANK]   of each head | turning | keys^T plain |, then | turning | latents |
//     mixed    float32 [B, heads, RANK]            what attention gives
//     out      float32 [B, heads, VALUE]           values mixed + bias
//
// Launch: latent_queries: grid (RANK / COLUMNS rounded up, heads + 1, B), a block has COLUMNS of a head's columns, a warp
//             every WARPS-th row of them. latent_outputs: grid (VALUE / WARPS rounded up, heads, B), a warp a row
//
// Macros: PLAIN, TURNING, VALUE, RANK; FLAG_IN_DATA 1: what comes in is read as soon as it is stored
//         (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/flag_in_data.cuh"

#ifndef PLAIN
#define PLAIN 128
#define TURNING 64
#define VALUE 128
#define RANK 512
#endif
#ifndef FLAG_IN_DATA
#define FLAG_IN_DATA 0
#endif

static constexpr int WARPS = 8, THREADS = WARPS * 32, COLUMNS = 64;
static constexpr int WIDTH = TURNING + RANK;

// COUNT numbers of global memory into shared memory, by all threads.
template <int COUNT>
__device__ __forceinline__ void receive(float* to, const float* from) {
    constexpr int EACH = (COUNT + THREADS - 1) / THREADS;
    float v[EACH];
    const auto at = [&](int i) {
        const int c = i * THREADS + (int)threadIdx.x;
        return c < COUNT ? from + c : nullptr;
    };
    ll_receive<FLAG_IN_DATA>(v, at);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (at(i)) to[i * THREADS + threadIdx.x] = v[i];
}

// active: the number of what was read of attn_kv_b, `units`, is added
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_queries(const u16* keys, float inverse, const float* q, const float* latents, const float* turning,
                   int units, u64* active, float* qkv) {
    __shared__ float query[PLAIN + TURNING], sums[WARPS][COLUMNS];
    const int head = blockIdx.y, heads = gridDim.y - 1, b = blockIdx.z, warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32, begin = blockIdx.x * COLUMNS;
    if (!FLAG_IN_DATA) wait_for_previous();
    qkv += ((u64)b * (heads + 1) + head) * WIDTH;
    const bool is_key = head == heads;
    if (is_key) {
        if (blockIdx.x == 0) receive<TURNING>(query + PLAIN, turning + (u64)b * TURNING);
    } else {
        receive<PLAIN + TURNING>(query, q + ((u64)b * heads + head) * (PLAIN + TURNING));
    }
    __syncthreads();
    float own[2] = {0, 0};
    if (!is_key) {
        keys += (u64)head * PLAIN * RANK;
#pragma unroll 4
        for (int p = warp; p < PLAIN; p += WARPS) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = begin + 32 * i + lane;
                if (c < RANK) own[i] += half_to_float(keys[(u64)p * RANK + c]) * query[p];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[warp][32 * i + lane] = own[i];
    __syncthreads();
    const int column = begin + (int)threadIdx.x;
    const bool real = threadIdx.x < COLUMNS && column < RANK;
    float value = 0;
    if (is_key) {
        float v[1];
        const auto at = [&](int) { return real ? latents + (u64)b * RANK + column : nullptr; };
        ll_receive<FLAG_IN_DATA>(v, at);
        value = v[0];
    } else if (real) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) value += sums[w][threadIdx.x];
        value *= inverse;
    }
    launch_dependents();                    // not before: see common/flag_in_data.cuh
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    if (real) ll_store(qkv + TURNING + column, value);
    if (blockIdx.x == 0)
        for (int c = threadIdx.x; c < TURNING; c += THREADS) ll_store(qkv + c, query[PLAIN + c]);
    if (is_key && blockIdx.x == 0 && b == 0 && threadIdx.x == 0 && active) atomic_add(active, units);
}

// bias: float32 [heads, PLAIN + VALUE] of attn_kv_b, or null
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_outputs(const u16* values, float inverse, const float* bias, const float* mixed, float* out) {
    __shared__ float input[RANK];
    const int head = blockIdx.y, heads = gridDim.y, b = blockIdx.z, lane = threadIdx.x % 32;
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (!FLAG_IN_DATA) wait_for_previous();
    receive<RANK>(input, mixed + ((u64)b * heads + head) * RANK);
    launch_dependents();  // not before: see common/flag_in_data.cuh
    __syncthreads();
    float sum = 0;
    if (row < VALUE) {
        values += ((u64)head * VALUE + row) * RANK;
#pragma unroll 4
        for (int c = lane; c < RANK; c += 32) sum += half_to_float(values[c]) * input[c];
    }
    sum = warp_sum(sum) * inverse;
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    if (row < VALUE && lane == 0)
        ll_store(out + ((u64)b * heads + head) * VALUE + row,
                 sum + (bias ? bias[head * (PLAIN + VALUE) + PLAIN + row] : 0));
}
