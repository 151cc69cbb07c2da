// Thresholds that are scaled so that the share of skipped weights stays at a target, and how many weights each sequence of a step skips.
#include <stdexcept>

#include "decoder/decoder.h"

namespace sparsepack {

void Decoder::control_thresholds(const ThresholdController& controller) {
    if (!(controller.weights > 0)) throw std::invalid_argument("hold: no weights");
    controller_ = controller;
    scales_.assign(model_.caches.size(), {});
    for (Scratch& own : scratch_) {
        own.thresholds = Buffer<float>(all_.size());
        own.skipped.assign(model_.caches.size(), 0);
    }
}

void Decoder::reset_scale(int32_t sequence) {
    if (sequence < 0 || sequence >= int32_t(model_.caches.size())) throw std::out_of_range("unknown sequence");
    if (scales_thresholds()) scales_[sequence] = {};
}

// What the thresholds of a sequence are multiplied by, by its index in the step.
float Decoder::threshold_scale(int32_t index) const { return scales_thresholds() ? scales_[moving_[index]].scale : 1; }

// What the columns of a site are compared with, from `first` on, for a sequence, by its index in the step.
const float* Decoder::thresholds(const Site& at, int32_t first, int32_t n, int32_t index, int thread) {
    bool per_channel = at.threshold.size() > 1;
    const float* unscaled = at.threshold.data() + (per_channel ? first : 0);
    if (!scales_thresholds()) return unscaled;
    float scale = threshold_scale(index), *scaled = scratch_[thread].thresholds.data();
    for (int32_t i = 0; i < (per_channel ? n : 1); ++i) scaled[i] = scale * unscaled[i];
    return scaled;
}

// Counts inactive columns of a site, once for each sequence of a step and each column, whichever thread it is.
void Decoder::count_skipped(const Site& at, int64_t columns, int32_t index, int thread) {
    if (scales_thresholds()) scratch_[thread].skipped[index] += at.matrix->rows * columns;
}

// The same of columns of a matrix of planes, of which so many bytes of a row of superblocks were read: what was left out makes
// so many whole columns. times: of matrices that are read alike.
void Decoder::count_unread(const Site& at, int64_t columns, int64_t bytes, int32_t index, int thread, int64_t times) {
    count_skipped(at, times * (columns - (bytes + level_bytes(PLANES) - 1) / level_bytes(PLANES)), index, thread);
}

// A sparse step of `moving_` has ended.
void Decoder::update_scales() {
    for (size_t index = 0; index < moving_.size(); ++index) {
        int64_t skipped = 0;
        for (Scratch& own : scratch_) {
            skipped += own.skipped[index];
            own.skipped[index] = 0;
        }
        SequenceScale& scale = scales_[moving_[index]];
        scale = controller_.after(scale, skipped);
    }
}

}  // namespace sparsepack
