// The type of the superblocks in zigzag order, one header each: BLOCK_BYTES of one as it lies on the GPU, a multiple of 16,
// and what a lane does with it. products/zigzag.py lays them out.
//
// Macros: BLOCK, ggml's number of the type

#pragma once

#define Q8_0 8
#define Q4_K 12
#define Q6_K 14
#ifndef BLOCK
#define BLOCK Q4_K
#endif

#if BLOCK == Q8_0
#include "blocks/q8_0.cuh"
#elif BLOCK == Q6_K
#include "blocks/q6_k.cuh"
#else
#include "blocks/q4_k.cuh"
#endif
