// Attention of one decoding step: softmax(q k^T / sqrt(HEAD_DIM)) v for one new position of each sequence.
//
//     qkv        float32 [B, heads + 2 kv_heads, HEAD_DIM]      q, then k, then v of the new position
//     keys       Stored  [B, kv_heads, context, HEAD_DIM]       and values; row positions[b] is written here
//     cos, sin   float32 [context, HEAD_DIM / 2]
//     out        float32 [B, heads, HEAD_DIM]
//
// Grid: (splits, kv_heads, B), splits a power of two up to 32; where it is more than 1, no more blocks than run at once,
// since they wait for each other. A row of blocks computes the GROUP heads that share a key head, and divides the
// positions before the new one; the last block takes the new one, too, as its row 0.
// Every block prepares the queries for itself. The warps of a block take BATCH rows in turn:
//
//     split 0                                      split 1       ...      last split
//     | warp 0 | warp 1 | ... | warp 0 | ... |     | ...   |              | new position | ... |
//       BATCH rows of keys and of values
//
// Rows travel to the warp's own ring in shared memory, STAGES - 1 batches ahead. Of keys, lane (row, chunk) takes the
// same 16 bytes of each row, LANES lanes a row, and the lanes of a row fold their sums so that each ends up with other
// (position, head) pairs. Those become weights, which meet in shared memory; of values, each lane then takes the same
// channels of all rows, so that its sums need no other lane's.
//
// Sums over a warp's rows, the warps of a block, the blocks: each in order, so that the same bits come every run. Each
// block finishes a slice of the result: the others write it their parts, which are words (words.cuh). Blocks of a
// cluster could write them to each other's shared memory, but an H100 has room for 7 clusters of 16 at a time, a block a
// multiprocessor: with 8 key heads a long context took 23 % longer (benchmarks/notes/cuda.md).
//
//     slots     | for block 0: parts [slice] of block 0 | of block 1 | .. | for block 1: ... | the next row's
//
// The position is read before the kernel may begin. Where q is handed on, an earlier kernel than the one that hands it
// on wrote it (words.cuh), and rows are fetched while q is waited for. Else it is a guess: where the previous kernels
// are still writing it, it is one step old. Rows are then fetched by the guess, and fetched again if it was wrong.
//
// Macros: those of attention_layout.cuh

#include "attention_rows.cuh"
#include "attention_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const float* qkv, Stored* keys, Stored* values, const int* positions, const float* cos, const float* sin,
              const float* q_norm, const float* k_norm, float* out, float4* slots, int kv_heads, int context,
              int window, float eps,
              // pairs of the result that a block finishes, and 2^32 / slice, rounded up
              int slice, u32 slice_magic) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = blockIdx.x, splits = gridDim.x, kv_head = blockIdx.y, b = blockIdx.z;
    const bool newest = split == splits - 1;  // this block takes the new position

    // The new rows are the warps' tasks: the queries 0 .. GROUP - 1 and, where they are cached, key GROUP and value
    // GROUP + 1. A lane has channels c and c + HALF, which turn together.
    const int tasks = newest ? GROUP + 2 : GROUP;
    const auto new_row = [&](int task) {
        const int head = task < GROUP ? kv_head * GROUP + task : task * kv_heads + kv_head;
        return qkv + ((long long)b * (GROUP + 2) * kv_heads + head) * HEAD_DIM;
    };
    NewRow new_rows[TASKS];
    const auto ask = [&] {
#pragma unroll
        for (int t = 0; t < TASKS; ++t) {
            const int task = warp + t * WARPS;
            if (task >= tasks) break;
            new_rows[t].load(new_row(task), task < GROUP ? q_norm : task == GROUP ? k_norm : nullptr);
        }
    };
    const int noted = fresh(positions + b);
    if (HANDED) ask();

    u8* ring = memory + warp * RING_BYTES;
    float* query = (float*)(memory + WARPS * RING_BYTES);          // [GROUP][WIDTH]
    float* scratch = query + QUERY_FLOATS;                         // [WARPS] weights [2][GROUP][BATCH], factors [GROUP]
    Peak* warp_peaks = (Peak*)(scratch + WARPS * SCRATCH_FLOATS);  // [WARPS][GROUP]

    const long long sequence = (long long)b * kv_heads + kv_head;
    keys += sequence * context * HEAD_DIM;
    values += sequence * context * HEAD_DIM;

    int position = min(max(noted, 0), context - 1);  // within the context whatever is there
#if AHEAD
    {
        const Share share(position, window, splits, split);
        const u32 bytes = min(share.count, (STAGES - 1) * TURN) * HEAD_DIM * (int)sizeof(Stored);
        const long long from = (long long)share.first * HEAD_DIM;
        if (ALIGNED && bytes && threadIdx.x == 0) prefetch_bytes(keys + from, bytes);
        if (ALIGNED && bytes && threadIdx.x == THREADS - 1) prefetch_bytes(values + from, bytes);
        if ((int)threadIdx.x * 32 < HALF) {
            prefetch(cos + (long long)position * HALF + threadIdx.x * 32);
            prefetch(sin + (long long)position * HALF + threadIdx.x * 32);
        }
        if ((int)threadIdx.x * 32 < HEAD_DIM) {
            if (q_norm) prefetch(q_norm + threadIdx.x * 32);
            if (k_norm) prefetch(k_norm + threadIdx.x * 32);
        }
    }
#endif
    if (!HANDED) {
        after_previous();
        ask();
    }

    // No guess any more.
    const int position_now = HANDED ? position : min(max(fresh(positions + b), 0), context - 1);

    float turn_cos[LANE_PAIRS], turn_sin[LANE_PAIRS];
    int rows, left;  // of the block; from this lane's next one on
    const Stored *next_key, *next_value;
    const int lane_row = warp * BATCH + lane / LANES;
    u8* const lane_ring = ring + lane * 16;
    const auto bring_next = [&](int stage) {
        if (warp * BATCH + stage * TURN < rows)
            bring(lane_ring + stage * STAGE_BYTES, next_key, next_value, left, newest && stage == 0 && lane_row == 0);
        copy_commit();
        next_key += TURN * HEAD_DIM, next_value += TURN * HEAD_DIM, left -= TURN;
    };
    for (;;) {
        const Share share(position, window, splits, split);
        rows = share.count + newest;
        left = rows - lane_row;
        const long long from = (long long)(share.first - newest + lane_row) * HEAD_DIM + lane % LANES * CHUNK;
        next_key = keys + from, next_value = values + from;
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            const long long at = (long long)position * HALF + c;
            turn_cos[i] = c < HALF ? fresh(cos + at) : 0;
            turn_sin[i] = c < HALF ? fresh(sin + at) : 0;
        }
        bring_next(0);
        if (position == position_now) break;
        position = position_now;
        copy_wait<0>();
    }

#pragma unroll
    for (int t = 0; t < TASKS; ++t) {
        const int task = warp + t * WARPS;
        if (task >= tasks) break;
        NewRow& row = new_rows[t];
        row.receive(new_row(task));
        if (task < GROUP ? q_norm : task == GROUP ? k_norm : nullptr) row.scale_to_norm(eps);
        const float scale = task < GROUP ? LOG2_E / sqrtf(HEAD_DIM) : 1;
        // The new position's place is row 0 of warp 0's first stage.
        Stored* near = (Stored*)(memory + (task == GROUP ? 0 : KEY_BYTES));
        Stored* far = (task == GROUP ? keys : values) + (long long)position * HEAD_DIM;
        const auto put = [&](int c, float x) {
            if (task < GROUP) {
                query[task * WIDTH + c] = x;
            } else {
                const Stored stored = to_stored(x);
                near[c] = stored;
                if (c < HEAD_DIM) far[c] = stored;
            }
        };
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
            const int c = lane + 32 * i;
            if (c >= HALF) continue;
            const float turned_cos = task <= GROUP ? turn_cos[i] : 1, turned_sin = task <= GROUP ? turn_sin[i] : 0;
            put(c, (row.first[i] * turned_cos - row.second[i] * turned_sin) * scale);
            put(c + HALF, (row.second[i] * turned_cos + row.first[i] * turned_sin) * scale);
        }
        for (int c = HEAD_DIM + lane; c < WIDTH; c += 32) put(c, 0);
    }
    __syncthreads();
    let_next_begin();  // not before: see words.cuh
    // The other batches only now: q is what everybody waits for.
#pragma unroll
    for (int i = 1; i < STAGES - 1; ++i) bring_next(i);

    const float* own_query = query + lane % LANES * CHUNK;
    float held[HELD ? GROUP : 1][LANE_CHUNKS][CHUNK];
    const auto load_query = [&](float (&x)[CHUNK], int g, int i) {
#pragma unroll
        for (int c = 0; c < CHUNK; c += 4) {
            const float4 v = *(const float4*)(own_query + g * WIDTH + i * LANES * CHUNK + c);
            x[c] = v.x, x[c + 1] = v.y, x[c + 2] = v.z, x[c + 3] = v.w;
        }
    };
    if constexpr (HELD) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int i = 0; i < LANE_CHUNKS; ++i) load_query(held[g][i], g, i);
        }
    }

    // Where this lane's scores are in a batch, and among its weights.
    int row_of[SLOTS], weight_of[SLOTS], head_of[SLOTS];
#pragma unroll
    for (int r = 0; r < SLOTS; ++r) {
        const int number = number_of<SCORES, LANES / 2>(r, lane);
        head_of[r] = number % GROUP;
        row_of[r] = number / GROUP * ABREAST + lane / LANES;
        weight_of[r] = head_of[r] * BATCH + row_of[r];
    }
    float* weights = scratch + warp * SCRATCH_FLOATS;
    float* factors = weights + 2 * WEIGHT_FLOATS;

    float top[SLOTS], weight_sum[SLOTS], sums[GROUP][LANE_UNITS][UNIT] = {};
#pragma unroll
    for (int r = 0; r < SLOTS; ++r) top[r] = NO_SCORE, weight_sum[r] = 0;

    int stage = 0;
    for (int start = warp * BATCH, odd = 0; start < rows; start += TURN, odd ^= 1) {
        copy_wait<STAGES - 2>();
        const u8* batch = ring + stage * STAGE_BYTES;

        float scores[SCORES] = {};
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; ++i) {
            float key[DEEP][CHUNK];
#pragma unroll
            for (int d = 0; d < DEEP; ++d)
                load_stored<CHUNK>(batch + (d * ABREAST + lane / LANES) * ROW_BYTES + (lane % LANES + i * LANES) * 16,
                                   key[d]);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float loaded[CHUNK];
                if constexpr (!HELD) load_query(loaded, g, i);
#pragma unroll
                for (int c = 0; c < CHUNK; ++c) {
                    const float q = HELD ? held[HELD ? g : 0][i][c] : loaded[c];
#pragma unroll
                    for (int d = 0; d < DEEP; ++d) scores[d * GROUP + g] += q * key[d][c];
                }
            }
        }
        fold<SCORES, LANES / 2>(scores, lane);

        float largest[SLOTS];
#pragma unroll
        for (int r = 0; r < SLOTS; ++r) {
            if (start + row_of[r] >= rows) scores[r] = -__int_as_float(0x7f800000);
            largest[r] = scores[r];
        }
        over_positions(largest, [](float x, float y) { return fmaxf(x, y); });
        bool grown = false;
#pragma unroll
        for (int r = 0; r < SLOTS; ++r) grown |= largest[r] > top[r] + SLACK;
        if (__any_sync(ALL_LANES, grown)) {
#pragma unroll
            for (int r = 0; r < SLOTS; ++r) {
                const float before = top[r];
                top[r] = fmaxf(before, largest[r]);
                const float factor = power(before - top[r]);
                weight_sum[r] *= factor;
                factors[head_of[r]] = factor;  // of all lanes with this head the same
            }
            __syncwarp();
            if (start >= TURN) {
#pragma unroll
                for (int g = 0; g < GROUP; ++g) {
                    const float factor = factors[g];
#pragma unroll
                    for (int u = 0; u < LANE_UNITS; ++u) {
#pragma unroll
                        for (int c = 0; c < UNIT; ++c) sums[g][u][c] *= factor;
                    }
                }
            }
        }
        float* batch_weights = weights + odd * WEIGHT_FLOATS;  // others may still read the ones before
#pragma unroll
        for (int r = 0; r < SLOTS; ++r) {
            const float weight = power(scores[r] - top[r]);
            weight_sum[r] += weight;
            batch_weights[weight_of[r]] = weight;
        }
        __syncwarp();  // weights and values are there, and nobody reads the stage before this one any more

        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (start + (STAGES - 1) * TURN < rows)
            bring(lane_ring + free * STAGE_BYTES, next_key, next_value, left, false);
        copy_commit();
        next_key += TURN * HEAD_DIM, next_value += TURN * HEAD_DIM, left -= TURN;
        stage = stage == STAGES - 1 ? 0 : stage + 1;

#pragma unroll(BATCH > 16 ? 1 : BATCH / STEP)
        for (int from = 0; from < BATCH; from += STEP) {
            float value[STEP][LANE_UNITS][UNIT];
#pragma unroll
            for (int k = 0; k < STEP; ++k) {
#pragma unroll
                for (int u = 0; u < LANE_UNITS; ++u) {
                    const int unit = min(lane + 32 * u, UNITS - 1);
                    const u8* row = batch + KEY_BYTES + (from + k) * ROW_BYTES;
                    load_stored<UNIT>(row + unit * UNIT * sizeof(Stored), value[k][u]);
                }
            }
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float weight[STEP];
                const float* at = batch_weights + g * BATCH + from;
                if constexpr (STEP == 4) {
                    const float4 v = *(const float4*)at;
                    weight[0] = v.x, weight[1] = v.y, weight[2] = v.z, weight[3] = v.w;
                } else {
                    const float2 v = *(const float2*)at;
                    weight[0] = v.x, weight[1] = v.y;
                }
#pragma unroll
                for (int k = 0; k < STEP; ++k) {
#pragma unroll
                    for (int u = 0; u < LANE_UNITS; ++u) {
#pragma unroll
                        for (int c = 0; c < UNIT; ++c) sums[g][u][c] += weight[k] * value[k][u][c];
                    }
                }
            }
        }
    }

    // The warps' sums, where their rings were.
    const int working = min((rows + BATCH - 1) / BATCH, WARPS);
    if (warp < working) {
        over_positions(weight_sum, [](float x, float y) { return x + y; });
#pragma unroll
        for (int r = 0; r < SLOTS; ++r) warp_peaks[warp * GROUP + head_of[r]] = {top[r], weight_sum[r]};
        __syncwarp();
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int u = 0; u < LANE_UNITS; ++u) {
                if (lane + 32 * u >= UNITS) continue;
                float* at = (float*)ring + g * HEAD_DIM + (lane + 32 * u) * UNIT;
#pragma unroll
                for (int c = 0; c < UNIT; c += 2) ((Pair*)at)[c / 2] = {sums[g][u][c], sums[g][u][c + 1]};
            }
        }
    }
    __syncthreads();

    if (HANDED) after_previous();  // nothing but the cache's row is written before: words.cuh
    float* result = out + sequence * GROUP * HEAD_DIM;
    slots += sequence * splits * splits * slice;
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
        const Part part = over_warps(
            working, [&](int w) { return warp_peaks[w * GROUP + pair / HALF]; },
            [&](int w) { return ((const Pair*)(memory + w * RING_BYTES))[pair]; });
        if (splits == 1) {
            part.store(result, pair);
            continue;
        }
        const int to = slice == 1 ? pair : (int)__umulhi(pair, slice_magic);
        part.write(slots + (to * splits + split) * slice + pair - to * slice);
    }
    if (splits == 1) return;

    // A lane for each block's part of a pair.
    for (int first = warp * 32; first < slice * splits; first += THREADS) {
        const int i = (first + lane) >> log2_of(splits), from = lane & (splits - 1), pair = split * slice + i;
        const bool real = i < slice && pair < PAIRS;
        Part part = {{0, 0}, {NO_SCORE, 0}};
        if (real) part = Part::take(slots + (split * splits + from) * slice + i);
        part = over_lanes(part, splits);
        if (real && from == 0) part.store(result, pair);
    }
}
