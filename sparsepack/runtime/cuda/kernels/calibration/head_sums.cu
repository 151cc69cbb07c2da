// What calibrating counts of the queries and keys of attention, in one read of them.
//
//     query  [windows, kv_heads * GROUP, tokens, channels], key [windows, kv_heads, tokens, channels]   F32, F16 or BF16,
//            with the distances between windows, heads and tokens in values; channels lie one beside the other
//     sums   float64 [4 + 2 * GROUP, windows, pieces, kv_heads, channels], of a piece of ROWS tokens:
//            0 |k|   1 k * k   2 a, the mean of |q| over the heads of a group   3 a times the sum of |k| up to the token,
//            from the piece's first on   4 .. |q| of the heads of a group, then their q * q
//
// Launch: a block for each piece, KV head and window; a thread has channels t, t + THREADS ...
//
// Macros: INPUT (common/eight.cuh), GROUP: query heads of a KV head

#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int ROWS = 128;

__device__ __forceinline__ float size_of(const u8* values, u64 at) {
    const float value = INPUT == 0   ? load_l2((const float*)values + at)
                        : INPUT == 1 ? half_to_float(load_l2((const u16*)values + at))
                                     : bfloat_to_float(load_l2((const u16*)values + at));
    return fabsf(value);
}

extern "C" __global__ void head_sums(const u8* __restrict__ query, int query_window, int query_head, int query_token,
                                     const u8* __restrict__ key, int key_window, int key_head, int key_token,
                                     int tokens, int channels, double* __restrict__ sums) {
    wait_for_previous();
    const int piece = blockIdx.x, head = blockIdx.y, window = blockIdx.z;
    const int last = min((piece + 1) * ROWS, tokens);
    const u64 field = (u64)gridDim.z * gridDim.x * gridDim.y * channels;
    for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
        double k_sum = 0, k_square = 0, asked_sum = 0, pairs = 0, q_sum[GROUP], q_square[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) q_sum[g] = 0, q_square[g] = 0;
#pragma unroll 4
        for (int token = piece * ROWS; token < last; ++token) {
            const double k =
                size_of(key, (u64)window * key_window + (u64)head * key_head + (u64)token * key_token + channel);
            k_sum += k, k_square += k * k;
            float asked = 0;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const float q = size_of(query, (u64)window * query_window + (u64)(head * GROUP + g) * query_head +
                                                   (u64)token * query_token + channel);
                asked += q;
                q_sum[g] += q, q_square[g] += (double)q * q;
            }
            asked /= GROUP;
            asked_sum += asked, pairs += asked * k_sum;
        }
        double* const to = sums + (((u64)window * gridDim.x + piece) * gridDim.y + head) * channels + channel;
        to[0] = k_sum, to[field] = k_square, to[2 * field] = asked_sum, to[3 * field] = pairs;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) to[(4 + g) * field] = q_sum[g], to[(4 + GROUP + g) * field] = q_square[g];
    }
}
