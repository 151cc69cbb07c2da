// What scales the thresholds of each text so that the share of weights that the text skips stays at a target:
// runtime/hold.py, whose fields these are, and whose numbers to the same bits.
#pragma once
#include <algorithm>
#include <cstdint>

namespace sparsepack {

struct HeldText {
    float scale, mean;
};

struct Hold {
    double target, weights, gain, smoothing, least, most;

    HeldText begin() const { return {1, float(target)}; }

    // After a sparse step that skipped so many weights.
    HeldText after(HeldText text, int64_t skipped) const {
        double before = text.mean;
        float mean = float(before + smoothing * (double(skipped) / weights - before));
        double scale = text.scale * (1 + gain * (target - mean));
        return {float(std::min(std::max(scale, least), most)), mean};
    }
};

}  // namespace sparsepack
