// Which channels of a head rotary embedding rotates together: halves of the first ROTARY_DIM apart (llama.cpp's NEOX
// type), or with NEIGHBOURS 1 neighbours (llama.cpp's NORM type). The channels behind those stay as they are, in pairs of
// their own, so that every lane has whole pairs.
//
//     channel    | 0 .. TURNED - 1 | TURNED .. ROTARY_DIM - 1 | ROTARY_DIM ..       | .. HEAD_DIM - 1     |
//     of a pair  | first           | second                   | first               | second              |
//     pair       | 0 .. TURNED - 1 | 0 .. TURNED - 1          | TURNED .. HALF - 1  | TURNED .. HALF - 1  |
//
//     with NEIGHBOURS the first of pair p < TURNED is channel 2 p, the second 2 p + 1
//
//     cos, sin   float32 [context, TURNED], of each sequence or of all
//
// Macros: HEAD_DIM, ROTARY_DIM, both even; NEIGHBOURS

#pragma once

#include "common/common.cuh"

#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM
#endif
#ifndef NEIGHBOURS
#define NEIGHBOURS 0
#endif

static constexpr int HALF = HEAD_DIM / 2;
static constexpr int LANE_PAIRS = (HALF + 31) / 32;  // of a lane: its number, and from there on every 32nd
static constexpr int ROTARY_PAIRS = ROTARY_DIM / 2;  // pairs that rotate
static_assert(ROTARY_PAIRS <= HALF, "a head has these channels");

__device__ __forceinline__ bool is_rotary(int pair) { return ROTARY_PAIRS == HALF || pair < ROTARY_PAIRS; }
__device__ __forceinline__ int first_channel(int pair) {
    return is_rotary(pair) ? (NEIGHBOURS ? 2 * pair : pair) : pair + ROTARY_PAIRS;
}
__device__ __forceinline__ int second_channel(int pair) {
    return is_rotary(pair) ? (NEIGHBOURS ? 2 * pair + 1 : pair + ROTARY_PAIRS) : pair + HALF;
}
