// What scales the thresholds of each text so that the share of weights that the text skips stays at a target:
// runtime/threshold_controller.py, whose fields and numbers these are.
#pragma once
#include <algorithm>
#include <cstdint>

namespace sparsepack {

struct HeldText {
    float scale = 1;
    int64_t steps = 0;
};

struct Hold {
    double target, weights, first, last, over, least, most;

    // After a sparse step that skipped so many weights.
    HeldText after(HeldText text, int64_t skipped) const {
        double gain = std::max(last, first / (1 + double(text.steps) / over));
        double scale = text.scale * (1 + gain * (target - double(skipped) / weights));
        return {float(std::min(std::max(scale, least), most)), text.steps + 1};
    }
};

}  // namespace sparsepack
