// Sizes of one attention step (attention.cu): how rows lie in shared memory, and which lane has what of them.
//
// Macros: HEAD_DIM even, 2 to 256; GROUP heads per key head, 1 to 16; that of stored.cuh; WARPS, STAGES;
//         AHEAD 1: bring the first rows to the L2 cache before the kernel may begin;
//         HANDED 1: q, k and v are read as soon as they are written (words.cuh), not when the kernel before has ended

#pragma once

#include "stored.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 4
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
#ifndef HANDED
#define HANDED 0
#endif
#if __CUDA_ARCH__ < 900 || HANDED
#undef AHEAD
#define AHEAD 0
#endif

static constexpr int THREADS = WARPS * 32;
static constexpr int HALF = HEAD_DIM / 2;
static constexpr int PAIRS = GROUP * HALF;  // of output channels

static constexpr int CHUNK = 16 / sizeof(Stored);  // channels of a lane's 16 bytes
static constexpr int CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK;
__device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }
static constexpr int LANES = CHUNKS > 32 ? 32 : power_of_two_from(CHUNKS);  // of a row of keys
static constexpr int LANE_CHUNKS = (CHUNKS + LANES - 1) / LANES;
static constexpr int WIDTH = LANES * LANE_CHUNKS * CHUNK;  // channels of a row in the ring, the last ones zero
static constexpr int ROW_BYTES = WIDTH * sizeof(Stored);
static constexpr bool ALIGNED = HEAD_DIM * sizeof(Stored) % 16 == 0;

static constexpr int ABREAST = 32 / LANES;  // rows at a time
static constexpr int DEEP = 2;              // of them one after the other
static constexpr int BATCH = ABREAST * DEEP;
static constexpr int TURN = WARPS * BATCH;  // rows from a warp's batch to its next
static constexpr int KEY_BYTES = BATCH * ROW_BYTES;
static constexpr int STAGE_BYTES = 2 * KEY_BYTES;
static constexpr int SUM_BYTES = (GROUP * HEAD_DIM * 4 + 15) / 16 * 16;  // what becomes of the ring
static constexpr int RING_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;

// Channels of values: UNIT at a time, unit u in lane u % 32.
static constexpr int UNIT = HEAD_DIM % 128 == 0 ? 4 : 2;
static constexpr int UNITS = HEAD_DIM / UNIT;
static constexpr int LANE_UNITS = (UNITS + 31) / 32;
static constexpr int STEP = BATCH < 4 ? BATCH : 4;  // rows of values at a time

// Scores of a lane: position d of DEEP and head g are number d * GROUP + g. Folding leaves SLOTS of them. The heads of
// a position are spread over OWN lanes: lanes that differ in other bits hold other positions.
__device__ constexpr int folded(int count, int lanes) {
    return lanes == 1 ? count : folded((count + 1) / 2, lanes / 2);
}
static constexpr int SCORES = DEEP * GROUP;
static constexpr int SLOTS = folded(SCORES, LANES);
static constexpr int OWN = LANES > DEEP ? LANES / DEEP : 1;
static constexpr bool DEEP_IN_LANE = LANES < DEEP;

// Queries stay in registers where there is room.
static constexpr bool HELD = GROUP * LANE_CHUNKS * CHUNK <= 64;
static constexpr int TASKS = (GROUP + 2 + WARPS - 1) / WARPS;  // of a warp, see attention.cu
static constexpr int LANE_PAIRS = (HALF + 31) / 32;

// Shared memory, in floats behind the rings.
static constexpr int QUERY_FLOATS = GROUP * WIDTH;
static constexpr int WEIGHT_FLOATS = GROUP * BATCH;
static constexpr int SCRATCH_FLOATS = 2 * WEIGHT_FLOATS + (GROUP + 3) / 4 * 4;  // of a warp
