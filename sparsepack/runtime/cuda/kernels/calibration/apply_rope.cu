// The rotary embedding of queries and keys, rounded as stock code rounds it, in one read of them: of the n channels of a
// head that lie in two halves,
//
//     out[c] = r(r(x[c] * cosine[c]) + r(other_half * sine[c])),   other_half = -x[c + n / 2] in the first half, x[c - n / 2] in
//     the second one, r: the nearest value of the type
//
//     query, key    [windows, heads or kv_heads, tokens, n]   F32, F16 or BF16, with the distances between windows, heads
//                   and tokens in values; channels lie one beside the other, pieces of eight aligned to 16 bytes
//     cosine, sine  [1 or windows, tokens, n]   in the type; rows lie one behind the other, `table` is the distance
//                   between windows, or 0
//     new_query, new_key   as query and key, with distances of their own
//
// Launch: a block for each token and window, of a multiple of channels / 16 threads; a thread has eight channels of each
// half of a head, then the same of other heads
//
// Macro: INPUT (common/eight.cuh)

#include "common/common.cuh"
#include "common/eight.cuh"

extern "C" __global__ void apply_rope(const u8* __restrict__ query, int query_window, int query_head, int query_token,
                                      const u8* __restrict__ key, int key_window, int key_head, int key_token,
                                      const u8* __restrict__ cosine, const u8* __restrict__ sine, int table, int heads,
                                      int kv_heads, int channels, u8* __restrict__ new_query, int new_query_window,
                                      int new_query_head, int new_query_token, u8* __restrict__ new_key,
                                      int new_key_window, int new_key_head, int new_key_token) {
    constexpr int ELEMENT = INPUT == 0 ? 4 : 2;
    wait_for_previous();
    const int token = blockIdx.x, window = blockIdx.y;
    const int half = channels / 2, pieces = half / 8;
    const u64 angle = ((u64)window * table + (u64)token * channels) * ELEMENT;
    const int channel = threadIdx.x % pieces * 8;
    Eight c[2], s[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        c[part].load(cosine + angle, channel + part * half, channels, true);
        s[part].load(sine + angle, channel + part * half, channels, true);
    }
    for (int at = threadIdx.x / pieces; at < heads + kv_heads; at += blockDim.x / pieces) {
        const bool of_key = at >= heads;
        const int head = of_key ? at - heads : at;
        const u8* const from =
            of_key ? key + ((u64)window * key_window + (u64)head * key_head + (u64)token * key_token) * ELEMENT
                   : query + ((u64)window * query_window + (u64)head * query_head + (u64)token * query_token) * ELEMENT;
        u8* const to =
            of_key ? new_key + ((u64)window * new_key_window + (u64)head * new_key_head + (u64)token * new_key_token) *
                                   ELEMENT
                   : new_query +
                         ((u64)window * new_query_window + (u64)head * new_query_head + (u64)token * new_query_token) *
                             ELEMENT;
        Eight x[2];
#pragma unroll
        for (int part = 0; part < 2; ++part) x[part].load(from, channel + part * half, channels, true);
        float made[8];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float other_half = part == 0 ? -x[1][j] : x[0][j];
                made[j] = Eight::rounded(__fadd_rn(Eight::rounded(__fmul_rn(x[part][j], c[part][j])),
                                                   Eight::rounded(__fmul_rn(other_half, s[part][j]))));
            }
            Eight::store(made, to, channel + part * half);
        }
    }
}
