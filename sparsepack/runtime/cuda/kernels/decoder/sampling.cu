// The next token of every sequence, greedily: the best of the candidates that rows_product.cu left, one for each block.
// Sampling with a temperature follows in torch (sampling.py).
//
//     bits 63 .. 32                                        31 .. 0
//        | value: float32 whose order is that of integers | ~row     |     the largest is the first row of the largest
//                                                                          value; a NaN is larger than infinity
//
// Launch: grid (sequences), one warp a block, and where thresholds are controlled a second one, which scales the sequence's
// thresholds for the next step (threshold_controller.cuh).

#include "common/common.cuh"
#include "decoder/threshold_controller.cuh"

// candidates  u64 [sequences, blocks]
// ids         int32 [sequences]: the rows chosen
// best        float32 [sequences]: their values
// positions   int32 [sequences]: one is added; or null
// scale ..    as in `ThresholdController`; null: thresholds are not controlled
extern "C" __global__ void __launch_bounds__(64)
    pick_likeliest(const u64* candidates, int blocks, int* ids, float* best, int* positions, float* scale, float* steps,
                   u64* skipped, const int* moving, const double* constants) {
    launch_dependents();
    wait_for_previous();
    const int sequence = blockIdx.x;
    if (threadIdx.x >= 32) {
        if (threadIdx.x == 32) update_scale({scale, steps, skipped, moving, constants}, sequence);
        return;
    }
    u64 top = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < blocks; i += 32) top = max(top, load_l2(candidates + (u64)blocks * sequence + i));
#pragma unroll
    for (int apart = 16; apart; apart /= 2) top = max(top, __shfl_xor_sync(ALL_LANES, top, apart));
    if (threadIdx.x == 0) {
        const u32 value = (u32)(top >> 32);
        ids[sequence] = (int)~(u32)top;
        best[sequence] = __uint_as_float(value >> 31 ? value & 0x7fffffff : ~value);
        if (positions) positions[sequence] = load_l2(positions + sequence) + 1;
    }
}
