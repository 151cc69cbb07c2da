// The threshold controller of runtime/threshold_controller.py: after each sparse step, the scale of a sequence's thresholds
// that keeps the share of weights it skips at a target.

#pragma once

#include "common/common.cuh"

// Of the sequences of a step; scale null: thresholds are not controlled.
struct ThresholdController {
    float *scale, *steps;
    u64* skipped;             // weights that lay in inactive columns; zero again afterwards
    const int* moving;        // 0: stands still; null: none does
    const double* constants;  // target, weights, first, last, over, least, most
};

// A sparse step has ended: its part for a sequence, of one thread.
__device__ __forceinline__ void update_scale(const ThresholdController& controller, int sequence) {
    const double target = controller.constants[0], weights = controller.constants[1], first = controller.constants[2],
                 last = controller.constants[3];
    const double over = controller.constants[4], least = controller.constants[5], most = controller.constants[6];
    const double skipped = (double)load_l2(controller.skipped + sequence), steps = load_l2(controller.steps + sequence);
    const double scale = load_l2(controller.scale + sequence);
    controller.skipped[sequence] = 0;
    if (controller.moving && !load_l2(controller.moving + sequence)) return;
    const double gain = fmax(last, first / (1 + steps / over));
    controller.scale[sequence] = (float)fmin(fmax(scale * (1 + gain * (target - skipped / weights)), least), most);
    controller.steps[sequence] = (float)(steps + 1);
}
