// Attention of one decoding step to the tokens that their labels rank best (Double Sparsity, algorithm 1): norms and
// rotates q and k, appends k, v and k's label to the cache, scores every label, selects tokens, attends to those.
//
//     qkv            float32 [B, heads + 2 kv_heads, HEAD_DIM]      q, then k, then v of the new position
//     keys, values   CacheType [B, kv_heads, context, HEAD_DIM]
//     codes, scales  the labels: u8 [B, kv_heads, context, LABEL_BYTES], float16 [B, kv_heads, context]
//     channels       int32 [kv_heads, LABEL_CHANNELS]; -1: none, a zero
//     out            float32 [B, heads, HEAD_DIM]
//     listed, counts int32 [B, kv_heads, list_capacity], [B, kv_heads]: rows that are read, where that is two launches
//
// Launch: grid (CLUSTER, kv_heads, B), WARPS warps a block. The blocks of a cluster share a key head, whose query heads
// read the same tokens:
//
//     labels      block 0's segment | block 1's | ..      each block keeps the scores of its segment in shared memory
//     selection   all together (select_tokens.cuh); each block lists those of its segment
//     tokens      block 0's share of the list | block 1's | ..    of equal length, whichever segments they come from
//     output      block 0's slice | block 1's | ..        each block adds up the blocks' parts of its slice, in order
//
// Nothing is read of keys and values but the tokens of the list; everything is the same every run.
//
// Two launches where the tokens must be fetched between (token_slots.cu): one with ATTENDS 0, which leaves the list in
// `listed`, and one with SELECTS 0, which attends to the rows of keys and values that are listed then.
//
// Macros: those of attention_layout.cuh, LABEL_WORDS, CLUSTER, SELECTS, ATTENDS

#include "attention/attention_loop.cuh"
#include "attention/labels.cuh"
#include "attention/select_tokens.cuh"

#ifndef SELECTS
#define SELECTS 1
#endif
#ifndef ATTENDS
#define ATTENDS 1
#endif
static constexpr int LABELS_AT_ONCE = LABEL_WORDS <= 4 ? 16 : LABEL_WORDS <= 8 ? 8 : 4;  // of a thread, on their way
static constexpr int SLICE = (PAIRS + CLUSTER - 1) / CLUSTER;  // pairs of the result that a block finishes

// The number of tokens that a position reads, as models/sparse_attention.py has it.
__device__ __forceinline__ int budget_of(int seen, int numerator, int denominator, int sinks, int recent,
                                         int min_context) {
    if (seen < min_context) return seen;
    const int share = (int)(((long long)seen * numerator + denominator - 1) / denominator);
    return min(seen, max(share, sinks + recent));
}

static constexpr int AHEAD_TOKENS = 2048;  // whose labels are prefetched before the kernel may begin

// A block's share of the tokens that a position sees, from the first on; segments begin at multiples of ABREAST_TOKENS,
// so that the first block's may begin before the oldest that is seen.
struct Segment {
    int oldest, first, count;
    __device__ __forceinline__ Segment(int position, int window, int rank) {
        oldest = window ? max(0, position + 1 - window) : 0;
        const int base = oldest / ABREAST_TOKENS * ABREAST_TOKENS, all = position + 1 - base;
        const int each = (all + CLUSTER * ABREAST_TOKENS - 1) / (CLUSTER * ABREAST_TOKENS) * ABREAST_TOKENS;
        first = base + rank * each;
        count = min(max(position + 1 - first, 0), each);
    }
    __device__ __forceinline__ int padded() const {
        return (count + ABREAST_TOKENS - 1) / ABREAST_TOKENS * ABREAST_TOKENS;
    }
};

extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS)
    double_sparsity(const float* qkv, CacheType* keys, CacheType* values, u8* codes, u16* scales, const int* channels,
                    const int* positions, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                    float* out, int kv_heads, int context, int window, float eps,
                    // as attention.cu takes them
                    int rope_stride, float scale, const float* growth, float cap, const float* sinks_of, int numerator,
                    int denominator, int sinks, int recent, int min_context,
                    // bytes of the first part of shared memory: scores, then rings; tokens that a list has room for
                    int first_bytes, int list_room,
                    // rows of a key head in keys and values; `context` where they are all tokens
                    int cached_rows, int* listed, int* counts, int list_capacity) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float new_key[HEAD_DIM];
    __shared__ int heavy[LABEL_CHANNELS];
    __shared__ LabelQuery shared_query;
    __shared__ TokenSelection selection;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = block_in_cluster(), kv_head = blockIdx.y, b = blockIdx.z;
    const long long sequence = (long long)b * kv_heads + kv_head;

    u16* scores = (u16*)memory;
    float* query = (float*)(memory + first_bytes);                                       // [GQA_RATIO][WIDTH]
    float* scratch = query + QUERY_FLOATS;                                               // of each warp
    SoftmaxState* warp_states = (SoftmaxState*)(scratch + WARPS * SCRATCH_FLOATS);       // [WARPS][GQA_RATIO]
    float4* parts = (float4*)(((u64)(warp_states + WARPS * GQA_RATIO) + 15) / 16 * 16);  // [CLUSTER][SLICE]
    u16* list = (u16*)(parts + (CLUSTER > 1 ? CLUSTER * SLICE : 0));                     // of this segment
    int* share = (int*)(list + list_room);  // this block's part of all lists

    cos += (long long)b * rope_stride, sin += (long long)b * rope_stride;
    keys += sequence * cached_rows * HEAD_DIM;
    values += sequence * cached_rows * HEAD_DIM;
    listed += sequence * list_capacity;
    codes += sequence * context * LABEL_BYTES;
    scales += sequence * context;
    channels += kv_head * LABEL_CHANNELS;

    begin_in_cluster();
    launch_dependents();
#if SELECTS
    {
        // A guess, which may be one step old.
        const Segment guess(min(max(load_l2(positions + b), 0), context - 1), window, rank);
        const u32 bytes = (u32)min(guess.count, AHEAD_TOKENS) * LABEL_BYTES / 16 * 16;
#if __CUDA_ARCH__ >= 900
        if (LABEL_BYTES % 16 == 0 && bytes && threadIdx.x == 0)
            prefetch_l2_bulk(codes + (long long)guess.first * LABEL_BYTES, bytes);
        if ((int)threadIdx.x * 64 < min(guess.count, AHEAD_TOKENS))
            prefetch_l2(scales + guess.first + threadIdx.x * 64);
#endif
        for (int c = threadIdx.x; c < LABEL_CHANNELS; c += THREADS) heavy[c] = channels[c];
    }
#endif
    wait_for_previous();
    const int position = min(max(load_l2(positions + b), 0), context - 1);
#if SELECTS
    const Segment segment(position, window, rank);
    const auto always = [&](int token) { return token < sinks || token > position - recent; };
    Label labels[LABELS_AT_ONCE];
    const auto load_labels = [&](int start) {
#pragma unroll
        for (int n = 0; n < LABELS_AT_ONCE; ++n) {
            const int i = start + n * THREADS;
            if (i < segment.count && !always(segment.first + i)) labels[n].load(codes, scales, segment.first + i);
        }
    };
    load_labels(threadIdx.x);
    selection.clear();
#endif

    // The new rows are the warps' tasks: the queries 0 .. GQA_RATIO - 1 and, in the first block, key GQA_RATIO and
    // value GQA_RATIO + 1. A lane has pairs of channels (rotary.cuh).
    const NewRows new_in(qkv, b, kv_heads, kv_head);
    const float query_factor = growth ? load_l2(growth + position) : 1;
    for (int task = warp; task < (SELECTS && rank == 0 ? GQA_RATIO + 2 : GQA_RATIO); task += WARPS) {
        const float* from = new_in.row(task);
        const float* norm = task < GQA_RATIO ? q_norm : task == GQA_RATIO ? k_norm : nullptr;
        NewRow row;
        row.load(from, norm);
        float rope_cos[LANE_PAIRS], rope_sin[LANE_PAIRS];
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            const long long at = (long long)position * ROTARY_PAIRS + c;
            const bool turns = task <= GQA_RATIO && c < ROTARY_PAIRS;
            rope_cos[i] = turns ? load_l2(cos + at) : 1;
            rope_sin[i] = turns ? load_l2(sin + at) : 0;
        }
        row.receive(from);
        if (norm) row.scale_to_norm(eps);
        CacheType* cached = (task == GQA_RATIO ? keys : values) + (long long)position * HEAD_DIM;
        const auto put = [&](int c, float x) {
            if (task < GQA_RATIO) {
                query[task * WIDTH + c] = x * query_factor;
            } else if (c < HEAD_DIM) {
                const CacheType stored = to_cache_type(x);
                cached[c] = stored;
                if (task == GQA_RATIO) new_key[c] = from_cache_type(stored);
            }
        };
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            if (c >= HALF) continue;
            put(first_channel(c), row.first[i] * rope_cos[i] - row.second[i] * rope_sin[i]);
            put(second_channel(c), row.second[i] * rope_cos[i] + row.first[i] * rope_sin[i]);
        }
        for (int c = HEAD_DIM + lane; c < WIDTH; c += 32) put(c, 0);
    }
    __syncthreads();
#if SELECTS
    if (warp == 0) {
        shared_query.write([&](int c) {
            const int channel = heavy[c];
            if (channel < 0) return 0.f;
            float sum = query[channel];
            for (int g = 1; g < GQA_RATIO; ++g) sum += query[g * WIDTH + channel];
            return sum;
        });
    } else if (warp == 1 && rank == 0) {
        write_label([&](int c) { return heavy[c] < 0 ? 0 : new_key[heavy[c]]; },
                    codes + (long long)position * LABEL_BYTES, scales + position);
    }
    __syncthreads();
#endif
    for (int i = threadIdx.x; i < QUERY_FLOATS; i += THREADS) query[i] *= scale;

#if SELECTS
    {
        const LabelQuery label_query = shared_query;
        for (int start = threadIdx.x; start < segment.padded(); start += THREADS * LABELS_AT_ONCE) {
#pragma unroll
            for (int n = 0; n < LABELS_AT_ONCE; ++n) {
                const int i = start + n * THREADS, token = segment.first + i;
                if (i >= segment.padded()) break;
                scores[i] = i >= segment.count || token < segment.oldest ? NOT_SEEN
                            : always(token)                              ? ALWAYS
                                                                         : labels[n].score(label_query);
            }
            load_labels(start + THREADS * LABELS_AT_ONCE);
        }
    }
    __syncthreads();

#endif
    wait_for_cluster();
#if SELECTS
    const int padded = segment.padded();
    const int budget = budget_of(position + 1 - segment.oldest, numerator, denominator, sinks, recent, min_context);
    const u32 found = selection.lowest(scores, padded, budget);
    int starts[CLUSTER + 1];
    selection.list_tokens(scores, padded, found, budget, list, starts);
#endif
#if !ATTENDS
    __syncthreads();
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
        if (r != rank) continue;
        for (int i = threadIdx.x; i < starts[r + 1] - starts[r]; i += THREADS)
            listed[starts[r] + i] = segment.first + list[i];
    }
    if (rank == 0 && threadIdx.x == 0) counts[sequence] = starts[CLUSTER];
#else
#if SELECTS
    sync_cluster();
    int rows = starts[CLUSTER];
#else
    int rows = load_l2(counts + sequence);
    __syncthreads();  // the queries are in units of log2
#endif
#if CLUSTER > 1
    // An even part of all lists, whichever blocks have them.
    const int from = (int)((long long)rows * rank / CLUSTER), to = (int)((long long)rows * (rank + 1) / CLUSTER);
    rows = to - from;
#if SELECTS
    for (int entry = from + threadIdx.x; entry < to; entry += THREADS) {
        int of = 0, start = 0;
#pragma unroll
        for (int r = 1; r < CLUSTER; ++r) {
            if (entry >= starts[r]) of = r, start = starts[r];
        }
        const int token = load_there(address_of_block(list + entry - start, of));
        share[entry - from] = Segment(position, window, of).first + token;
    }
    __syncthreads();
#else
    listed += from;
#endif
#endif

    const int lane_row = warp * BATCH + lane / LANES;
    u8* const lane_ring = memory + warp * RING_BYTES + lane * 16;
    int next = lane_row;  // in the list
#if !SELECTS
    int listed_next[DEEP];  // read a batch ahead, since it takes as long as a row
    const auto look_ahead = [&]() {
#pragma unroll
        for (int d = 0; d < DEEP; ++d)
            listed_next[d] = next + d * ABREAST < rows ? load_l2(listed + next + d * ABREAST) : 0;
    };
    look_ahead();
    const auto token_at = [&](int, int d) { return listed_next[d]; };
#elif CLUSTER > 1
    const auto look_ahead = []() {};
    const auto token_at = [&](int entry, int) { return share[entry]; };
#else
    const auto look_ahead = []() {};
    const auto token_at = [&](int entry, int) { return segment.first + list[entry]; };
#endif
    const auto fetch_next = [&](int stage, bool real) {
        if (real) {
#pragma unroll
            for (int d = 0; d < DEEP; ++d) {
                const int entry = next + d * ABREAST;
                const long long at =
                    entry < rows ? (long long)token_at(entry, d) * HEAD_DIM + lane % LANES * VECTOR_CHANNELS : 0;
                fetch_row(lane_ring + stage * STAGE_BYTES + d * ABREAST * ROW_BYTES, keys + at, values + at,
                          entry < rows);
            }
        }
        copy_commit();
        next += BLOCK_ROWS;
        look_ahead();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch_next(i, warp * BATCH + i * BLOCK_ROWS < rows);
    attend_rows(rows, memory, query, cap, scratch, warp_states, fetch_next);
    __syncthreads();

    float* result = out + sequence * GQA_RATIO * HEAD_DIM;
    if (sinks_of) sinks_of += kv_head * GQA_RATIO;
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const PartialOutput part = combine_warps(
            warps_with(rows), [&](int w) { return warp_states[w * GQA_RATIO + pair / HALF]; },
            [&](int w) { return ((const Pair*)(memory + w * RING_BYTES))[pair]; });
#if CLUSTER > 1
        const float4 whole = make_float4(part.sum.first, part.sum.second, part.state.max, part.state.row_sum);
        store_there(address_of_block(parts + rank * SLICE + pair % SLICE, pair / SLICE), whole);
#else
        part.store(result, pair, sinks_of, new_in.gates());
#endif
    }
#if CLUSTER > 1
    sync_cluster();
    for (int i = threadIdx.x; i < SLICE && rank * SLICE + i < PAIRS; i += THREADS) {
        PartialOutput whole = {{0, 0}, {NO_SCORE, 0}};
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) whole.state.max = fmaxf(whole.state.max, parts[r * SLICE + i].z);
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            const float4 part = parts[r * SLICE + i];
            const float factor = exp2_approx(part.z - whole.state.max);
            whole.sum.first += factor * part.x, whole.sum.second += factor * part.y;
            whole.state.row_sum += factor * part.w;
        }
        whole.store(result, rank * SLICE + i, sinks_of, new_in.gates());
    }
#endif
#endif
}
