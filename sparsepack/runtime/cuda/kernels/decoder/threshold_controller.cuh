// The share of weights that each text skips is held at a target: what scales its thresholds, computed anew after each
// sparse step, by the numbers of runtime/threshold_controller.py.

#pragma once

#include "common/common.cuh"

// Of the sequences of a step; scale null: nothing is held.
struct Held {
    float *scale, *steps;
    u64* skipped;       // weights that lay in inactive columns; zero again afterwards
    const int* moving;  // 0: stands still; null: none does
    const double* how;  // target, weights, first, last, over, least, most
};

// A sparse step has ended: its part for a sequence, of one thread.
__device__ __forceinline__ void hold_step(const Held& held, int sequence) {
    const double target = held.how[0], weights = held.how[1], first = held.how[2], last = held.how[3];
    const double over = held.how[4], least = held.how[5], most = held.how[6];
    const double skipped = (double)load_l2(held.skipped + sequence), steps = load_l2(held.steps + sequence);
    const double scale = load_l2(held.scale + sequence);
    held.skipped[sequence] = 0;
    if (held.moving && !load_l2(held.moving + sequence)) return;
    const double gain = fmax(last, first / (1 + steps / over));
    held.scale[sequence] = (float)fmin(fmax(scale * (1 + gain * (target - skipped / weights)), least), most);
    held.steps[sequence] = (float)(steps + 1);
}
