// The share of weights that each text skips is held at a target: what scales its thresholds, computed anew after each
// sparse step, by the numbers of runtime/hold.py.

#pragma once

#include "common/common.cuh"

// Of the sequences of a step; scale null: nothing is held.
struct Held {
    float *scale, *mean;
    u64* skipped;       // weights that lay in inactive columns; zero again afterwards
    const int* moving;  // 0: stands still; null: none does
    const double* how;  // target, weights, gain, smoothing, least, most
};

// A sparse step has ended: its part for a sequence, of one thread.
__device__ __forceinline__ void hold_step(const Held& held, int sequence) {
    const double target = held.how[0], weights = held.how[1], gain = held.how[2], smoothing = held.how[3];
    const double skipped = (double)load_l2(held.skipped + sequence), before = load_l2(held.mean + sequence);
    const double scale = load_l2(held.scale + sequence);
    held.skipped[sequence] = 0;
    if (held.moving && !load_l2(held.moving + sequence)) return;
    const float mean = (float)(before + smoothing * (skipped / weights - before));
    held.mean[sequence] = mean;
    held.scale[sequence] = (float)fmin(fmax(scale * (1 + gain * (target - mean)), held.how[4]), held.how[5]);
}
