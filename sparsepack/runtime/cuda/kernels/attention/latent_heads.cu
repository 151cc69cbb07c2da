// Queries, keys and values as attention takes them, of models whose attention has latents (models/blocks.py, Latent):
//
//     q        [heads, PLAIN + TURNING]             of a position: what attn_q_b gives, or attn_in
//     kv       [heads, PLAIN + VALUE]               what attn_kv_b gives
//     turning  [TURNING]                            the part of keys that all heads share
//     qkv      float32 [B or S, 3, heads, HEAD_DIM] queries and keys: | TURNING | PLAIN | zeros |, values: | VALUE | zeros |
//
// Launch: grid (3 heads HEAD_DIM / THREADS rounded up, B or S), a thread a number.
//
// Macros: PLAIN, TURNING, VALUE, HEAD_DIM; FLAG_IN_DATA 1: what comes in is read as soon as it is stored
//         (common/flag_in_data.cuh), not when the kernel before has ended

#include "common/flag_in_data.cuh"

#ifndef PLAIN
#define PLAIN 128
#define TURNING 64
#define VALUE 128
#define HEAD_DIM 192
#endif
#ifndef FLAG_IN_DATA
#define FLAG_IN_DATA 0
#endif

static constexpr int THREADS = 256;

// Rows of a product as decoder/prefill.cu takes it, a pitch apart; factor null: of ones.
struct Rows {
    const float* sums;
    int pitch;
    const float* factor;
    float inverse;
    const float* bias;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    latent_heads(const float* q, int q_pitch, const float* q_factor, float q_inverse, const float* q_bias,
                 const float* kv, int kv_pitch, const float* kv_factor, float kv_inverse, const float* kv_bias,
                 const float* turning, int turning_pitch, int heads, float* qkv) {
    const int row = blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    const int c = i % HEAD_DIM, head = i / HEAD_DIM % heads, part = i / HEAD_DIM / heads;
    Rows of{kv, kv_pitch, kv_factor, kv_inverse, kv_bias};
    int column = -1;  // of `of`; -1: a zero
    if (part == 0) {
        of = {q, q_pitch, q_factor, q_inverse, q_bias};
        if (c < PLAIN + TURNING) column = head * (PLAIN + TURNING) + (c < TURNING ? PLAIN + c : c - TURNING);
    } else if (part == 1) {
        if (c < TURNING) of = {turning, turning_pitch, nullptr, 1, nullptr};
        if (c < PLAIN + TURNING) column = c < TURNING ? c : head * (PLAIN + VALUE) + c - TURNING;
    } else if (part == 2 && c < VALUE) {
        column = head * (PLAIN + VALUE) + PLAIN + c;
    }
    if (!FLAG_IN_DATA) wait_for_previous();
    const float* from = column < 0 ? nullptr : of.sums + (u64)row * of.pitch + column;
    float v[1];
    ll_receive<FLAG_IN_DATA>(v, [&](int) { return from; });
    launch_dependents();  // not before: see common/flag_in_data.cuh
    if (from && of.factor) v[0] *= load_l2(of.factor + row) * of.inverse;
    if (from && of.bias) v[0] += of.bias[column];
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    if (part < 3) ll_store(qkv + (u64)row * 3 * heads * HEAD_DIM + i, v[0]);
}
