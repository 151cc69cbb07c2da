// Sizes of one attention step (attention.cu): how rows lie in shared memory, and which lane has what of them.
// attention.py (`Variant`) computes the same bytes on the host.
//
//     dynamic shared memory of a block
//     | ring of warp 0 | .. of warp WARPS - 1 | queries [GQA_RATIO][WIDTH] | scratch of each warp | softmax states |
//       STAGES stages      later the warp's weighted sums                    weights [2][GQA_RATIO][BATCH], factors
//     | BATCH rows of keys | BATCH rows of values |
//
//     a row of keys     | VECTOR_CHANNELS of lane 0 | lane 1 | .. LANES - 1 | LANE_VECTORS times; ROW_BYTES
//
// Macros: HEAD_DIM even, 2 to 512; GQA_RATIO query heads of a key head, 1 to 16 (the group size of grouped-query
//         attention; llama.cpp's gqa_ratio); that of cache_type.cuh; WARPS; STAGES of the pipeline (CUTLASS's word,
//         too); ROTARY_DIM, NEIGHBOURS: rotary.cuh; CAPPED 1: scores have a soft cap; OUTPUT_GATES 1: a row of gates
//         lies behind each row of queries, by whose sigmoid the result is multiplied; VALUE_DIM: so many channels of a
//         head's result are left, values have zeros behind them; K_EQ_V 1: no values come in, they are the keys before norm
//         and rotation; LATENTS 1: there is one key head, which all query heads read, kv_heads groups of GQA_RATIO, and its
//         channels behind ROTARY_DIM are the values; SHARED_KV 1: queries alone come in, keys and values of the new position are
//         in the cache; AHEAD 1: bring the first rows to the L2 cache before the kernel may
//         begin; FLAG_IN_DATA 1: q, k and v are read as soon as they are written (common/flag_in_data.cuh), not when the
//         kernel before has ended

#pragma once

#include "attention/cache_type.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#include "attention/rotary.cuh"

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
#ifndef LATENTS
#define LATENTS 0
#endif
#ifndef CAPPED
#define CAPPED 0
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
#ifndef GQA_RATIO
#define GQA_RATIO 4
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef FLAG_IN_DATA
#define FLAG_IN_DATA 0
#endif
#if __CUDA_ARCH__ < 900 || FLAG_IN_DATA
#undef AHEAD
#define AHEAD 0
#endif

static constexpr int THREADS = WARPS * 32;
static constexpr int PAIRS = GQA_RATIO * HALF;  // of output channels

static constexpr int VECTOR_CHANNELS = 16 / sizeof(CacheType);  // channels of a lane's 16 bytes
static constexpr int ROW_VECTORS = (HEAD_DIM + VECTOR_CHANNELS - 1) / VECTOR_CHANNELS;
__device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }
static constexpr int LANES = ROW_VECTORS > 32 ? 32 : power_of_two_from(ROW_VECTORS);  // of a row of keys
static constexpr int LANE_VECTORS = (ROW_VECTORS + LANES - 1) / LANES;
static constexpr int WIDTH = LANES * LANE_VECTORS * VECTOR_CHANNELS;  // channels of a row in the ring, zeros last
static constexpr int ROW_BYTES = WIDTH * sizeof(CacheType);
static constexpr bool ALIGNED = HEAD_DIM * sizeof(CacheType) % 16 == 0;

static constexpr int ABREAST = 32 / LANES;  // rows at a time
static constexpr int DEEP = 2;              // of these one after the other, for more independent sums
static constexpr int BATCH = ABREAST * DEEP;
static constexpr int BLOCK_ROWS = WARPS * BATCH;  // from a warp's batch to its next; FlashAttention's kBlockN
static constexpr int KEY_BYTES = BATCH * ROW_BYTES;
static constexpr int STAGE_BYTES = 2 * KEY_BYTES;
static constexpr int SUM_BYTES = (GQA_RATIO * HEAD_DIM * 4 + 15) / 16 * 16;  // what becomes of the ring
static constexpr int RING_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES* STAGE_BYTES : SUM_BYTES;

// Channels of values: VALUE_VEC at a time, vector u in lane u % 32.
static constexpr int VALUE_VEC = HEAD_DIM % 128 == 0 ? 4 : 2;
static constexpr int VALUE_VECS = HEAD_DIM / VALUE_VEC;
static constexpr int LANE_VECS = (VALUE_VECS + 31) / 32;
static constexpr int STEP = BATCH < 4 ? BATCH : 4;  // rows of values at a time

// Scores of a lane: position d of DEEP and head g are number d * GQA_RATIO + g. Folding leaves LANE_SCORES of them. The
// heads of a position are spread over HEAD_LANES lanes: lanes that differ in other bits hold other positions.
__device__ constexpr int folded(int count, int lanes) {
    return lanes == 1 ? count : folded((count + 1) / 2, lanes / 2);
}
static constexpr int SCORES = DEEP * GQA_RATIO;
static constexpr int LANE_SCORES = folded(SCORES, LANES);
static constexpr int HEAD_LANES = LANES > DEEP ? LANES / DEEP : 1;
static constexpr bool DEEP_IN_LANE = LANES < DEEP;

// Queries stay in registers where there is room.
static constexpr bool QUERY_IN_REGISTERS = GQA_RATIO * LANE_VECTORS * VECTOR_CHANNELS <= 64;
static constexpr int TASKS = (GQA_RATIO + 2 + WARPS - 1) / WARPS;  // of a warp, see attention.cu

// Shared memory, in floats behind the rings.
static constexpr int QUERY_FLOATS = GQA_RATIO * WIDTH;
static constexpr int WEIGHT_FLOATS = GQA_RATIO * BATCH;
static constexpr int SCRATCH_FLOATS = 2 * WEIGHT_FLOATS + (GQA_RATIO + 3) / 4 * 4;  // of a warp
