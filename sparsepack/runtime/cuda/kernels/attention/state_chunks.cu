// What prefill makes of the states of heads (state_heads.cuh), S positions of one sequence, in two launches:
//
//     state_chunks    mixed, factors  ->  what of a chunk of CHUNK positions needs no state
//     state_rule      these  ->  out float32 [S, value heads, VALUE_DIM], the state after them
//
//     mixed    float32 [S, channels]         q, k and v
//     factors  float32 [S, 2, value heads]   beta, then the decay
//
// Chunks (Gated Delta Networks, section 3.3). With g_t the decay from the beginning of a chunk to its position t and d_ti = g_t /
// g_i, the errors e_t = beta_t (v_t - g_t S^T k_t - sum over i < t of d_ti (k_t k_i) e_i) are the rows of
//
//     E = U - W S    (1 + L) [U | W] = diag(beta) [V | diag(g) K]    L_ti = beta_t d_ti k_t k_i, i < t
//     O = diag(g) Q S + A E          A_ti = d_ti q_t k_i, i <= t
//     S <- g_last S + K'^T E         row i of K': d_last,i k_i
//
// Without the correction of the delta rule (a state-space model; Mamba-2, section 6) L and W are zero: E = diag(beta) V.
//
// state_chunks solves for U and W in float32, all chunks at once; state_rule passes from chunk to chunk, a warp with 16
// columns of S to itself: it multiplies S^T and E^T, which it has in registers, by what state_chunks left in the order of
// the tensor cores' operands. Every factor there is two bfloat16, what the first one lacks being the second: three products
// are as good as one of 16 bits and a sign.
//
//     operands  uint4 [chunks, value heads, CHUNK_WORDS], a lane's words of both bfloat16 side by side, by steps of 16:
//                   of keys      | -W, tiles of 8 positions | diag(g) Q, likewise |, without correction only the latter
//                   of positions | A, tiles of 8 queries    | K', tiles of 8 keys |
//     updates   float32 [chunks, value heads, VALUE_DIM, CHUNK]   U transposed
//     fades     float32 [chunks, value heads]                     g_last
//
// counted: as state_heads.cuh has it. Positions that do not count change no state.
//
// Launch: state_chunks: grid (chunks, value heads)
//         state_rule: grid (VALUE_DIM / (16 RULE_WARPS) rounded up, value heads)
//
// Macros: those of state_heads.cuh; CORRECTS 1: by the delta rule; RULE_WARPS: of a block of state_rule

#include "attention/state_heads.cuh"
#include "products/mma.cuh"

#ifndef RULE_WARPS
#define RULE_WARPS 4
#endif
#ifndef CORRECTS
#define CORRECTS 1
#endif

static constexpr int CHUNK = 64, CHUNK_TILES = CHUNK / 8, CHUNK_STEPS = CHUNK / 16;
static constexpr int KEY_STEPS = (KEY_DIM + 15) / 16, KEYS = 16 * KEY_STEPS, KEY_TILES = KEYS / 8;
static constexpr int OF_QUERIES = CORRECTS ? CHUNK_TILES : 0;  // tiles before those of queries in a step over keys
// In uint4: a step over keys, one over positions, and all of a chunk.
static constexpr int STEP_OF_KEYS = (OF_QUERIES + CHUNK_TILES) * 32, STEP_OF_POSITIONS = (CHUNK_TILES + KEY_TILES) * 32;
static constexpr int CHUNK_WORDS = KEY_STEPS * STEP_OF_KEYS + CHUNK_STEPS * STEP_OF_POSITIONS;

// Two numbers as two bfloat16 each: the nearest ones, and what they lack.
__device__ __forceinline__ uint2 split(float first, float second) {
    const u32 near = pack_bfloat2(first, second);
    const u32 rest = pack_bfloat2(first - __uint_as_float(near << 16), second - __uint_as_float(near & 0xffff0000));
    return make_uint2(near, rest);
}

static constexpr int CHUNK_THREADS = 256, PIECE = 16, PITCH = CHUNK + 4;  // keys that lie in shared memory at a time
static constexpr int TILES = CHUNK / 4 * (CHUNK / 4 + 1) / 2;             // of 4 x 4 on and below the diagonal
static_assert(TILES <= CHUNK_THREADS, "a thread has one tile");

// What of a chunk needs no state. rows: S
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    state_chunks(const float* mixed, const float* factors, int rows, const int* counted, uint4* operands,
                 float* updates, float* fades) {
    __shared__ __align__(16) float pieces[2][PIECE][PITCH];  // queries and keys, transposed
    __shared__ __align__(16) float lower[CHUNK][CHUNK];      // L
    __shared__ float within[CHUNK][CHUNK + 1];               // d, then A
    __shared__ float betas[CHUNK], decays[CHUNK], since_start[CHUNK], to_end[CHUNK];
    const int chunk = blockIdx.x, head = blockIdx.y, thread = threadIdx.x;
    const MixedRows of{(int)gridDim.y};
    launch_dependents();
    wait_for_previous();
    const int first = chunk * CHUNK, count = counted_of(rows, counted) - first;  // those of the chunk that count
    const u64 own = (u64)chunk * of.heads + head;
    u32* const words = (u32*)(operands + own * CHUNK_WORDS);
    updates += own * VALUE_DIM * CHUNK;
    mixed += (u64)first * of.channels();
    factors += (u64)first * 2 * of.heads;
    const int q_at = of.place(head, 0), k_at = of.place(head, KEY_DIM), v_at = of.place(head, 2 * KEY_DIM);
    const auto at = [&](int position, int channel, bool is) {
        return is && position < count ? load_l2(mixed + (u64)position * of.channels() + channel) : 0;
    };

    if (thread < CHUNK) {
        const float* const f = factors + thread * 2 * of.heads + head;
        betas[thread] = thread < count ? load_l2(f) : 0;
        decays[thread] = thread < count ? load_l2(f + of.heads) : 1;
    }
    __syncthreads();
    // By products, not by differences of logarithms: a decay may be zero.
    if (thread < CHUNK) {
        float d = 1;
        for (int t = 0; t < CHUNK; ++t) {
            if (t > thread) d *= decays[t];
            within[t][thread] = t < thread ? 0 : d;
        }
        to_end[thread] = d;
    } else if (thread == CHUNK) {
        float d = 1;
        for (int t = 0; t < CHUNK; ++t) since_start[t] = d *= decays[t];
        fades[own] = d;
    }

    // k_t k_i and q_t k_i, for a thread's tile of 4 x 4.
    int row = 0, column = thread;
    while (column > row) column -= ++row;
    row *= 4, column *= 4;
    float kk[4][4] = {}, qk[4][4] = {};
    constexpr int EACH = 2 * PIECE * CHUNK / CHUNK_THREADS;
    float ahead[EACH];
    const auto fetch = [&](int key) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int n = thread + e * CHUNK_THREADS, which = n / (PIECE * CHUNK), own_key = key + n % PIECE;
            ahead[e] = at(n / PIECE % CHUNK, (which ? k_at : q_at) + own_key, own_key < KEY_DIM);
        }
    };
    fetch(0);
#pragma unroll 1
    for (int key = 0; key < KEYS; key += PIECE) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int n = thread + e * CHUNK_THREADS;
            pieces[n / (PIECE * CHUNK)][n % PIECE][n / PIECE % CHUNK] = ahead[e];
        }
        __syncthreads();
        if (key + PIECE < KEYS) fetch(key + PIECE);
        if (thread >= TILES) continue;
#pragma unroll
        for (int p = 0; p < PIECE; ++p) {
            const float4 of_q = *(const float4*)&pieces[0][p][row], of_k = *(const float4*)&pieces[1][p][row];
            const float4 other = *(const float4*)&pieces[1][p][column];
            const float q[4] = {of_q.x, of_q.y, of_q.z, of_q.w}, k[4] = {of_k.x, of_k.y, of_k.z, of_k.w};
            const float o[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (CORRECTS) kk[i][j] += k[i] * o[j];
                    qk[i][j] += q[i] * o[j];
                }
            }
        }
    }
    if (thread < TILES) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& d = within[row + i][column + j];
                if (CORRECTS) lower[row + i][column + j] = betas[row + i] * d * kk[i][j];
                d *= qk[i][j];
            }
        }
    }
    __syncthreads();

    // W and U, a column a thread.
    constexpr int COLUMNS = KEYS + VALUE_DIM;
#pragma unroll 1
    for (int start = CORRECTS ? 0 : KEYS; start < COLUMNS; start += CHUNK_THREADS) {
        const int c = start + thread, v = c - KEYS;
        const bool is_key = c < KEYS;
        float x[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            const float value = at(t, is_key ? k_at + c : v_at + v, is_key ? c < KEY_DIM : v < VALUE_DIM);
            x[t] = value * betas[t] * (is_key ? since_start[t] : 1);
        }
        if constexpr (CORRECTS) {
#pragma unroll
            for (int t = 1; t < CHUNK; ++t) {
                float sums[4] = {};
#pragma unroll
                for (int i = 0; i < t; i += 4) {
                    const float4 l = *(const float4*)&lower[t][i];
                    sums[0] += l.x * x[i];
                    if (i + 1 < t) sums[1] += l.y * x[i + 1];
                    if (i + 2 < t) sums[2] += l.z * x[i + 2];
                    if (i + 3 < t) sums[3] += l.w * x[i + 3];
                }
                x[t] -= (sums[0] + sums[1]) + (sums[2] + sums[3]);
            }
        }
        if (!is_key && v < VALUE_DIM) {
            float4* const to = (float4*)(updates + v * CHUNK);
#pragma unroll
            for (int t = 0; t < CHUNK; t += 4) to[t / 4] = make_float4(x[t], x[t + 1], x[t + 2], x[t + 3]);
        }
        if (!CORRECTS) continue;
        // Of two neighbours the even one stores the near bfloat16 of both, the odd one the others.
        const int odd = c % 2;
        u32* const to = words + c / 16 * STEP_OF_KEYS * 4 + c % 8 / 2 * 4 + c % 16 / 8 + 2 * odd;
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            const uint2 parts = split(-x[t], 0);
            const u32 both = (parts.x & 0xffff) | parts.y << 16;
            const u32 other = __shfl_xor_sync(ALL_LANES, both, 1);
            const u32 word = odd ? other >> 16 | (both & 0xffff0000) : (both & 0xffff) | other << 16;
            if (is_key) to[(t / 8 * 32 + t % 8 * 4) * 4] = word;
        }
    }

    // The other operands. number: of the column of 16 steps' 8 words, which a lane's two of them are at
    const auto store = [&](int step_at, int tile, int column, int pair, float a, float b) {
        const uint2 parts = split(a, b);
        u32* const to = words + (step_at + tile * 32 + column * 4 + pair % 4) * 4 + pair / 4;
        to[0] = parts.x, to[2] = parts.y;
    };
    for (int e = thread; e < CHUNK * KEYS / 2; e += CHUNK_THREADS) {
        const int t = e / (KEYS / 2), k = e % (KEYS / 2) * 2;
        const float a = at(t, q_at + k, k < KEY_DIM), b = at(t, q_at + k + 1, k + 1 < KEY_DIM);
        store(k / 16 * STEP_OF_KEYS, OF_QUERIES + t / 8, t % 8, k % 16 / 2, a * since_start[t], b * since_start[t]);
    }
    constexpr int AT = KEY_STEPS * STEP_OF_KEYS;
    for (int e = thread; e < CHUNK * CHUNK / 2; e += CHUNK_THREADS) {
        const int t = e / (CHUNK / 2), i = e % (CHUNK / 2) * 2;
        store(AT + i / 16 * STEP_OF_POSITIONS, t / 8, t % 8, i % 16 / 2, within[t][i], within[t][i + 1]);
    }
    for (int e = thread; e < KEYS * CHUNK / 2; e += CHUNK_THREADS) {
        const int k = e % KEYS, i = e / KEYS * 2;
        const float a = at(i, k_at + k, k < KEY_DIM) * to_end[i], b = at(i + 1, k_at + k, k < KEY_DIM) * to_end[i + 1];
        store(AT + i / 16 * STEP_OF_POSITIONS, CHUNK_TILES + k / 8, k % 8, i % 16 / 2, a, b);
    }
}

// A as the tensor cores take it, of C of two neighbouring tiles.
struct Factor {
    u32 near[4], rest[4];
    __device__ __forceinline__ Factor(const float (&left)[4], const float (&right)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&of)[4] = i < 2 ? left : right;
            const uint2 parts = split(of[i % 2 * 2], of[i % 2 * 2 + 1]);
            near[i] = parts.x, rest[i] = parts.y;
        }
    }
    __device__ __forceinline__ void multiply(float (&c)[4], const uint4& b) const {
        const u32 b_near[2] = {b.x, b.y}, b_rest[2] = {b.z, b.w};
        mma_bfloat(c, rest, b_near);
        mma_bfloat(c, near, b_rest);
        mma_bfloat(c, near, b_near);
    }
};

static constexpr int STAGES = 4, STAGE = STEP_OF_KEYS > STEP_OF_POSITIONS ? STEP_OF_KEYS : STEP_OF_POSITIONS;
static constexpr int RULE_STEPS = KEY_STEPS + CHUNK_STEPS;

// state: of the sequence, its other half `half` numbers further; first: its tokens before these
extern "C" __global__ void __launch_bounds__(RULE_WARPS * 32)
    state_rule(const uint4* operands, const float* updates, const float* fades, int rows, const int* counted, int first,
               float* state, int half, float* out) {
    extern __shared__ __align__(16) uint4 ring[];  // [STAGES][STAGE]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
    const MixedRows of{(int)gridDim.y};
    const int value = ((int)blockIdx.x * RULE_WARPS + warp) * 16 + g;  // and 8 further
    launch_dependents();
    wait_for_previous();
    const int chunks = (rows + CHUNK - 1) / CHUNK, last = first + counted_of(rows, counted);

    const auto source = [&](int step) {
        const u64 own = (u64)(step / RULE_STEPS) * of.heads + head;
        const int n = step % RULE_STEPS, of_keys = min(n, KEY_STEPS);
        return operands + own * CHUNK_WORDS + of_keys * STEP_OF_KEYS + (n - of_keys) * STEP_OF_POSITIONS;
    };
    const auto load = [&](int step) {
        if (step < chunks * RULE_STEPS) {
            const uint4* const from = source(step);
            const int count = step % RULE_STEPS < KEY_STEPS ? STEP_OF_KEYS : STEP_OF_POSITIONS;
            for (int i = threadIdx.x; i < count; i += RULE_WARPS * 32)
                copy_async(ring + step % STAGES * STAGE + i, from + i);
        }
        copy_commit();
    };
    // A lane's word of each tile of a step; the one STAGES - 1 further is on its way then.
    const auto next = [&](int step) -> const uint4* {
        copy_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        return ring + step % STAGES * STAGE + lane;
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) load(step);

    const auto is = [&](int v, int k) { return v < VALUE_DIM && k < KEY_DIM; };
    const u64 own = (u64)head * VALUE_DIM * KEY_DIM;
    const float* const before = state + (u64)(first % 2) * half + own;
    float s[KEY_TILES][4];
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int v = value + i / 2 * 8, k = 8 * n + 2 * t + i % 2;
            s[n][i] = first && is(v, k) ? load_l2(before + v * KEY_DIM + k) : 0;
        }
    }
    out += head * VALUE_DIM + value;
    const int pitch = of.heads * VALUE_DIM;
    int step = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const u64 of_chunk = (u64)chunk * of.heads + head;
        const float fade = load_l2(fades + of_chunk);
        float e[CHUNK_TILES][4], o[CHUNK_TILES][4];
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int v = value + 8 * i;
                const float2* const u = (const float2*)(updates + (of_chunk * VALUE_DIM + v) * CHUNK + 8 * n + 2 * t);
                const float2 both = v < VALUE_DIM ? load_l2(u) : make_float2(0, 0);
                e[n][2 * i] = both.x, e[n][2 * i + 1] = both.y;
                o[n][2 * i] = o[n][2 * i + 1] = 0;
            }
        }
#pragma unroll
        for (int j = 0; j < KEY_STEPS; ++j) {
            const uint4* const words = next(step++);
            const Factor factor(s[2 * j], s[2 * j + 1]);
#pragma unroll
            for (int n = 0; n < CHUNK_TILES; ++n) {
                if (CORRECTS) factor.multiply(e[n], words[n * 32]);
                factor.multiply(o[n], words[(OF_QUERIES + n) * 32]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] *= fade;
        }
#pragma unroll
        for (int j = 0; j < CHUNK_STEPS; ++j) {
            const uint4* const words = next(step++);
            const Factor factor(e[2 * j], e[2 * j + 1]);
#pragma unroll
            for (int n = 2 * j; n < CHUNK_TILES; ++n) factor.multiply(o[n], words[n * 32]);  // A is zero before
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) factor.multiply(s[n], words[(CHUNK_TILES + n) * 32]);
        }
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = chunk * CHUNK + 8 * n + 2 * t + i % 2;
                if (row < rows && value + i / 2 * 8 < VALUE_DIM) out[(u64)row * pitch + i / 2 * 8] = o[n][i];
            }
        }
    }
    float* const after = state + (u64)(last % 2) * half + own;
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int v = value + i / 2 * 8, k = 8 * n + 2 * t + i % 2;
            if (is(v, k)) after[v * KEY_DIM + k] = s[n][i];
        }
    }
}
