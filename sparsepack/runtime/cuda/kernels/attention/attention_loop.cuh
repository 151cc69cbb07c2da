// What a block makes of its rows: each warp takes BATCH of them in turn, from its ring, to softmax states and weighted
// sums of its own, the online softmax of FlashAttention. See attention.cu.

#pragma once

#include "attention/attention_rows.cuh"
#include "attention/attention_sums.cuh"

// The number of warps of a block that have any of its rows.
__device__ __forceinline__ int warps_with(int rows) { return min((rows + BATCH - 1) / BATCH, WARPS); }

// rows        -- of the block
// memory      -- the rings of its warps, of which the first STAGES - 1 stages are on their way; then, of each warp that
//                has rows, sums float [GQA_RATIO][HEAD_DIM]
// query       -- [GQA_RATIO][WIDTH], such that products with keys are scores in units of log2, or where CAPPED what
//                soft_capped() takes
// cap         -- of scores, in units of log2, where CAPPED
// scratch     -- of each warp: attention_layout.cuh
// warp_states -- [WARPS][GQA_RATIO]
// fetch_next  -- (stage, real): begins to copy the warp's next batch into a stage of its ring, if there is one, and
//                commits
template <typename FetchNext>
__device__ __forceinline__ void attend_rows(int rows, u8* memory, const float* query, float cap, float* scratch,
                                            SoftmaxState* warp_states, FetchNext fetch_next) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* ring = memory + warp * RING_BYTES;
    const float* own_query = query + lane % LANES * VECTOR_CHANNELS;
    float query_registers[QUERY_IN_REGISTERS ? GQA_RATIO : 1][LANE_VECTORS][VECTOR_CHANNELS];
    const auto load_query = [&](float (&x)[VECTOR_CHANNELS], int g, int i) {
#pragma unroll
        for (int c = 0; c < VECTOR_CHANNELS; c += 4) {
            const float4 v = *(const float4*)(own_query + g * WIDTH + i * LANES * VECTOR_CHANNELS + c);
            x[c] = v.x, x[c + 1] = v.y, x[c + 2] = v.z, x[c + 3] = v.w;
        }
    };
    if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
        for (int g = 0; g < GQA_RATIO; ++g) {
#pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) load_query(query_registers[g][i], g, i);
        }
    }

    // The index of this lane's scores in a batch, and among the batch's weights.
    int row_of[LANE_SCORES], weight_of[LANE_SCORES], head_of[LANE_SCORES];
#pragma unroll
    for (int r = 0; r < LANE_SCORES; ++r) {
        const int number = number_of<SCORES, LANES / 2>(r, lane);
        head_of[r] = number % GQA_RATIO;
        row_of[r] = number / GQA_RATIO * ABREAST + lane / LANES;
        weight_of[r] = head_of[r] * BATCH + row_of[r];
    }
    float* weights = scratch + warp * SCRATCH_FLOATS;
    float* factors = weights + 2 * WEIGHT_FLOATS;

    float row_max[LANE_SCORES], row_sum[LANE_SCORES], sums[GQA_RATIO][LANE_VECS][VALUE_VEC] = {};
#pragma unroll
    for (int r = 0; r < LANE_SCORES; ++r) row_max[r] = NO_SCORE, row_sum[r] = 0;

    int stage = 0;
    for (int start = warp * BATCH, odd = 0; start < rows; start += BLOCK_ROWS, odd ^= 1) {
        copy_wait<STAGES - 2>();
        const u8* batch = ring + stage * STAGE_BYTES;

        float scores[SCORES] = {};
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
            float key[DEEP][VECTOR_CHANNELS];
#pragma unroll
            for (int d = 0; d < DEEP; ++d)
                load_cached<VECTOR_CHANNELS>(
                    batch + (d * ABREAST + lane / LANES) * ROW_BYTES + (lane % LANES + i * LANES) * 16, key[d]);
#pragma unroll
            for (int g = 0; g < GQA_RATIO; ++g) {
                float loaded[VECTOR_CHANNELS];
                if constexpr (!QUERY_IN_REGISTERS) load_query(loaded, g, i);
#pragma unroll
                for (int c = 0; c < VECTOR_CHANNELS; ++c) {
                    const float q = QUERY_IN_REGISTERS ? query_registers[QUERY_IN_REGISTERS ? g : 0][i][c] : loaded[c];
#pragma unroll
                    for (int d = 0; d < DEEP; ++d) scores[d * GQA_RATIO + g] += q * key[d][c];
                }
            }
        }
        fold<SCORES, LANES / 2>(scores, lane);

        float largest[LANE_SCORES];
#pragma unroll
        for (int r = 0; r < LANE_SCORES; ++r) {
            if (CAPPED) scores[r] = soft_capped(scores[r], cap);
            if (start + row_of[r] >= rows) scores[r] = -__int_as_float(0x7f800000);
            largest[r] = scores[r];
        }
        reduce_positions(largest, [](float x, float y) { return fmaxf(x, y); });
        bool grown = false;
#pragma unroll
        for (int r = 0; r < LANE_SCORES; ++r) grown |= largest[r] > row_max[r] + RESCALE_SLACK;
        if (__any_sync(ALL_LANES, grown)) {
#pragma unroll
            for (int r = 0; r < LANE_SCORES; ++r) {
                const float old_max = row_max[r];
                row_max[r] = fmaxf(old_max, largest[r]);
                const float factor = exp2_approx(old_max - row_max[r]);
                row_sum[r] *= factor;
                factors[head_of[r]] = factor;  // of all lanes with this head the same
            }
            __syncwarp();
            if (start >= BLOCK_ROWS) {
#pragma unroll
                for (int g = 0; g < GQA_RATIO; ++g) {
                    const float factor = factors[g];
#pragma unroll
                    for (int u = 0; u < LANE_VECS; ++u) {
#pragma unroll
                        for (int c = 0; c < VALUE_VEC; ++c) sums[g][u][c] *= factor;
                    }
                }
            }
        }
        float* batch_weights = weights + odd * WEIGHT_FLOATS;  // others may still read the ones before
#pragma unroll
        for (int r = 0; r < LANE_SCORES; ++r) {
            const float weight = exp2_approx(scores[r] - row_max[r]);
            row_sum[r] += weight;
            batch_weights[weight_of[r]] = weight;
        }
        __syncwarp();  // weights and values are there, and nobody reads the stage before this one any more

        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        fetch_next(free, start + (STAGES - 1) * BLOCK_ROWS < rows);
        stage = stage == STAGES - 1 ? 0 : stage + 1;

#pragma unroll(BATCH > 16 ? 1 : BATCH / STEP)
        for (int from = 0; from < BATCH; from += STEP) {
            float value[STEP][LANE_VECS][VALUE_VEC];
#pragma unroll
            for (int k = 0; k < STEP; ++k) {
#pragma unroll
                for (int u = 0; u < LANE_VECS; ++u) {
                    const int vec = min(lane + 32 * u, VALUE_VECS - 1);
                    const u8* row = batch + KEY_BYTES + (from + k) * ROW_BYTES;
                    load_cached<VALUE_VEC>(row + vec * VALUE_VEC * sizeof(CacheType), value[k][u]);
                }
            }
#pragma unroll
            for (int g = 0; g < GQA_RATIO; ++g) {
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
                    for (int u = 0; u < LANE_VECS; ++u) {
#pragma unroll
                        for (int c = 0; c < VALUE_VEC; ++c) sums[g][u][c] += weight[k] * value[k][u][c];
                    }
                }
            }
        }
    }

    // The warps' sums, where their rings were.
    const int working = warps_with(rows);
    if (warp < working) {
        reduce_positions(row_sum, [](float x, float y) { return x + y; });
#pragma unroll
        for (int r = 0; r < LANE_SCORES; ++r) warp_states[warp * GQA_RATIO + head_of[r]] = {row_max[r], row_sum[r]};
        __syncwarp();
#pragma unroll
        for (int g = 0; g < GQA_RATIO; ++g) {
#pragma unroll
            for (int u = 0; u < LANE_VECS; ++u) {
                if (lane + 32 * u >= VALUE_VECS) continue;
                float* at = (float*)ring + g * HEAD_DIM + (lane + 32 * u) * VALUE_VEC;
#pragma unroll
                for (int c = 0; c < VALUE_VEC; c += 2) ((Pair*)at)[c / 2] = {sums[g][u][c], sums[g][u][c + 1]};
            }
        }
    }
}
