// What scales the thresholds of each sequence so that the share of weights that it skips stays at a target:
// runtime/threshold_controller.py, whose fields and numbers these are.
#pragma once
#include <algorithm>
#include <cstdint>

namespace sparsepack {

struct SequenceScale {
    float scale = 1;
    int64_t steps = 0;
};

struct ThresholdController {
    double target, weights, first, last, over, least, most;

    // After a sparse step that skipped so many weights.
    SequenceScale after(SequenceScale sequence, int64_t skipped) const {
        double gain = std::max(last, first / (1 + double(sequence.steps) / over));
        double scale = sequence.scale * (1 + gain * (target - double(skipped) / weights));
        return {float(std::min(std::max(scale, least), most)), sequence.steps + 1};
    }
};

}  // namespace sparsepack
