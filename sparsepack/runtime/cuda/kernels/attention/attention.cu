// Attention of one decoding step: softmax(scale q k^T) v for one new position of each sequence.
//
//     qkv        float32 [B, heads + 2 kv_heads, HEAD_DIM]      q, then k, then v of the new position; with OUTPUT_GATES
//                                                               gates behind the queries of each head
//     keys       CacheType [B, kv_heads, context, HEAD_DIM]     and values; row positions[b] is written here
//     q_norm     float32 [HEAD_DIM]      and k_norm, v_norm: RMSNorm of each head comes first; null: it does not
//     cos, sin   float32 [1 or B, context, ROTARY_DIM / 2]
//     out        float32 [B, heads, VALUE_DIM]
//
// Launch: grid (splits, kv_heads, B), WARPS warps a block. splits is a power of two up to 32 (split-K over positions:
// Flash-Decoding's num_splits); where it is more than 1, no more blocks than run at once, since they wait for each
// other. The blocks of a key head compute the GQA_RATIO query heads that share it, and divide the positions before the
// new one; the last block takes the new one, too, as its row 0. Every block prepares the queries for itself. The warps
// of a block take BATCH rows in turn:
//
//     split 0                                      split 1       ...      last split
//     | warp 0 | warp 1 | ... | warp 0 | ... |     | ...   |              | new position | ... |
//       BATCH rows of keys and of values
//
// Rows travel to the warp's own ring in shared memory, STAGES - 1 batches ahead. Of keys, lane (row, vector) takes the
// same 16 bytes of each row, LANES lanes a row, and the lanes of a row fold their sums so that each ends up with other
// (position, head) pairs. Those become weights, which meet in shared memory; of values, each lane then takes the same
// channels of all rows, so that its sums need no other lane's.
//
// Where SHARED_KV, another layer's attention has written the row of the new position, which is then like the others.
//
// Sums over a warp's rows, the warps of a block, the blocks: each in order, so that the same bits come every run. Each
// block finishes a slice of the result: the others hand their partial outputs to it (common/flag_in_data.cuh). Blocks
// of a cluster could write them to each other's shared memory, but an H100 has room for 7 clusters of 16 at a time, a
// block a multiprocessor: with 8 key heads a long context took 23 % longer.
//
//     workspace | for block 0: partial outputs [slice] of block 0 | of block 1 | .. | for block 1: .. | next key head
//
// The position is read before the kernel may begin. Where q has its flag in the data, an earlier kernel than the one
// that writes q wrote the position (common/flag_in_data.cuh), and rows are fetched while q is waited for. Else it is a
// guess: where the previous kernels are still writing it, it is one step old. Rows are then fetched by the guess, and
// again if it was wrong.
//
// Macros: those of attention_layout.cuh

#include "attention/attention_loop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const float* qkv, CacheType* keys, CacheType* values, const int* positions, const float* cos,
              const float* sin, const float* q_norm, const float* k_norm, const float* v_norm, float* out,
              float4* workspace, int kv_heads, int context, int window, float eps,
              // floats from a sequence's cos to the next one's; what q is multiplied by (attend_rows), at each position
              // [context] besides or null; its cap; the heads' sinks [heads] or null
              int rope_stride, float scale, const float* growth, float cap, const float* sinks,
              // pairs of the result that a block finishes, and 2^32 / slice, rounded up
              int slice, u32 slice_magic) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = blockIdx.x, splits = gridDim.x, kv_head = blockIdx.y, b = blockIdx.z;
    const bool newest = !SHARED_KV && split == splits - 1;  // this block takes the new position, apart from the others

    // The new rows are the warps' tasks: the queries 0 .. GQA_RATIO - 1 and, where they are cached, key GQA_RATIO and
    // value GQA_RATIO + 1. A lane has pairs of channels, which rotary embedding rotates together (rotary.cuh).
    const int tasks = newest ? GQA_RATIO + 2 : GQA_RATIO;
    const NewRows new_in(qkv, b, kv_heads, kv_head);
    NewRow new_rows[TASKS];
    const auto norm_of = [&](int task) { return task < GQA_RATIO ? q_norm : task == GQA_RATIO ? k_norm : v_norm; };
    const auto request = [&] {
#pragma unroll
        for (int t = 0; t < TASKS; ++t) {
            const int task = warp + t * WARPS;
            if (task >= tasks) break;
            new_rows[t].load(new_in.row(task), norm_of(task));
        }
    };
    const int early_position = load_l2(positions + b);
    if (FLAG_IN_DATA) request();

    u8* ring = memory + warp * RING_BYTES;
    float* query = (float*)(memory + WARPS * RING_BYTES);  // [GQA_RATIO][WIDTH]
    float* scratch = query + QUERY_FLOATS;                 // of each warp: attention_layout.cuh
    SoftmaxState* warp_states = (SoftmaxState*)(scratch + WARPS * SCRATCH_FLOATS);  // [WARPS][GQA_RATIO]

    const long long sequence = (long long)b * kv_heads + kv_head;
    cos += (long long)b * rope_stride, sin += (long long)b * rope_stride;
    const long long of_cache = LATENTS ? b : sequence;
    keys += of_cache * context * HEAD_DIM;
    values += of_cache * context * HEAD_DIM;

    int position = min(max(early_position, 0), context - 1);  // within the context whatever is there
#if AHEAD
    {
        const PositionShare share(position, window, splits, split);
        const u32 bytes = min(share.count, (STAGES - 1) * BLOCK_ROWS) * HEAD_DIM * (int)sizeof(CacheType);
        const long long from = (long long)share.first * HEAD_DIM;
        if (ALIGNED && bytes && threadIdx.x == 0) prefetch_l2_bulk(keys + from, bytes);
        if (ALIGNED && bytes && threadIdx.x == THREADS - 1) prefetch_l2_bulk(values + from, bytes);
        if ((int)threadIdx.x * 32 < ROTARY_PAIRS) {
            prefetch_l2(cos + (long long)position * ROTARY_PAIRS + threadIdx.x * 32);
            prefetch_l2(sin + (long long)position * ROTARY_PAIRS + threadIdx.x * 32);
        }
        if ((int)threadIdx.x * 32 < HEAD_DIM) {
            if (q_norm) prefetch_l2(q_norm + threadIdx.x * 32);
            if (k_norm) prefetch_l2(k_norm + threadIdx.x * 32);
        }
    }
#endif
    if (!FLAG_IN_DATA) {
        wait_for_previous();
        request();
    }

    // No guess any more.
    const int position_now = FLAG_IN_DATA ? position : min(max(load_l2(positions + b), 0), context - 1);

    float rope_cos[LANE_PAIRS], rope_sin[LANE_PAIRS];
    int rows, left;  // of the block; from this lane's next one on
    const CacheType *next_key, *next_value;
    const int lane_row = warp * BATCH + lane / LANES;
    u8* const lane_ring = ring + lane * 16;
    const auto fetch_next = [&](int stage, bool real, bool without_new = false) {
        if (real) fetch_rows(lane_ring + stage * STAGE_BYTES, next_key, next_value, left, without_new);
        copy_commit();
        next_key += BLOCK_ROWS * HEAD_DIM, next_value += BLOCK_ROWS * HEAD_DIM, left -= BLOCK_ROWS;
    };
    for (;;) {
        const PositionShare share(position, window, splits, split);
        rows = share.count + newest;
        left = rows - lane_row;
        const long long from = (long long)(share.first - newest + lane_row) * HEAD_DIM + lane % LANES * VECTOR_CHANNELS;
        next_key = keys + from, next_value = values + from;
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            const long long at = (long long)position * ROTARY_PAIRS + c;
            rope_cos[i] = c < ROTARY_PAIRS ? load_l2(cos + at) : 1;
            rope_sin[i] = c < ROTARY_PAIRS ? load_l2(sin + at) : 0;
        }
        fetch_next(0, warp * BATCH < rows, newest && lane_row == 0);
        if (position == position_now) break;
        position = position_now;
        copy_wait<0>();
    }

    const float query_factor = growth ? scale * load_l2(growth + position) : scale;
#pragma unroll
    for (int t = 0; t < TASKS; ++t) {
        const int task = warp + t * WARPS;
        if (task >= tasks) break;
        NewRow& row = new_rows[t];
        row.receive(new_in.row(task));
        if (norm_of(task)) row.scale_to_norm(eps);
        const float factor = task < GQA_RATIO ? query_factor : 1;
        // The new position's place is row 0 of warp 0's first stage.
        CacheType* in_shared = (CacheType*)(memory + (task == GQA_RATIO ? 0 : KEY_BYTES));
        CacheType* cached = (task == GQA_RATIO ? keys : values) + (long long)position * HEAD_DIM;
        const auto put = [&](int c, float x) {
            if (task < GQA_RATIO) {
                query[task * WIDTH + c] = x;
            } else {
                const CacheType stored = to_cache_type(x);
                in_shared[c] = stored;
                if (c < HEAD_DIM && (!LATENTS || (task == GQA_RATIO && kv_head == 0))) cached[c] = stored;
            }
        };
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            if (c >= HALF) continue;
            const float cos_c = task <= GQA_RATIO ? rope_cos[i] : 1, sin_c = task <= GQA_RATIO ? rope_sin[i] : 0;
            put(first_channel(c), (row.first[i] * cos_c - row.second[i] * sin_c) * factor);
            put(second_channel(c), (row.second[i] * cos_c + row.first[i] * sin_c) * factor);
        }
        for (int c = HEAD_DIM + lane; c < WIDTH; c += 32) put(c, 0);
    }
    __syncthreads();
    launch_dependents();  // not before: see common/flag_in_data.cuh
    // The other batches only now: q is what everybody waits for.
#pragma unroll
    for (int i = 1; i < STAGES - 1; ++i) fetch_next(i, warp * BATCH + i * BLOCK_ROWS < rows);

    attend_rows(rows, memory, query, cap, scratch, warp_states, fetch_next);
    __syncthreads();

    if (FLAG_IN_DATA) wait_for_previous();  // nothing but the cache's row is written before: common/flag_in_data.cuh
    float* result = out + sequence * GQA_RATIO * VALUE_DIM;
    if (sinks) sinks += kv_head * GQA_RATIO;
    workspace += sequence * splits * splits * slice;
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const PartialOutput part = combine_warps(
            warps_with(rows), [&](int w) { return warp_states[w * GQA_RATIO + pair / HALF]; },
            [&](int w) { return ((const Pair*)(memory + w * RING_BYTES))[pair]; });
        if (splits == 1) {
            part.store(result, pair, sinks, new_in.gates());
            continue;
        }
        const int to = slice == 1 ? pair : (int)__umulhi(pair, slice_magic);
        part.write(workspace + (to * splits + split) * slice + pair - to * slice);
    }
    if (splits == 1) return;

    // A lane for each block's partial output of a pair.
    for (int first = warp * 32; first < slice * splits; first += THREADS) {
        const int i = (first + lane) >> log2_of(splits), from = lane & (splits - 1), pair = split * slice + i;
        const bool real = i < slice && pair < PAIRS;
        PartialOutput part = {{0, 0}, {NO_SCORE, 0}};
        if (real) part = PartialOutput::take(workspace + (split * splits + from) * slice + i);
        part = combine_lanes(part, splits);
        if (real && from == 0) part.store(result, pair, sinks, new_in.gates());
    }
}
