// Thresholds that are scaled where a share is held, and what that takes: how many weights each text of a step skips.
#include <stdexcept>

#include "decoder/decoder.h"

namespace sparsepack {

void Decoder::hold(const Hold& hold) {
    if (!(hold.weights > 0)) throw std::invalid_argument("hold: no weights");
    hold_ = hold;
    held_.assign(model_.caches.size(), {});
    for (Scratch& own : scratch_) {
        own.limits = Buffer<float>(all_.size());
        own.skipped.assign(model_.caches.size(), 0);
    }
}

void Decoder::begin_held(int32_t sequence) {
    if (sequence < 0 || sequence >= int32_t(model_.caches.size())) throw std::out_of_range("unknown sequence");
    if (holds()) held_[sequence] = {};
}

// What the columns of a site are compared with, from `first` on, for the text of this number in the step.
const float* Decoder::limits(const Site& at, int32_t first, int32_t n, int32_t text, int thread) {
    bool per_channel = at.threshold.size() > 1;
    const float* thresholds = at.threshold.data() + (per_channel ? first : 0);
    if (!holds()) return thresholds;
    float scale = held_[moving_[text]].scale, *scaled = scratch_[thread].limits.data();
    for (int32_t i = 0; i < (per_channel ? n : 1); ++i) scaled[i] = scale * thresholds[i];
    return scaled;
}

// Counts inactive columns of a site, once for each text of a step and each column, whichever thread it is.
void Decoder::count_skipped(const Site& at, int64_t columns, int32_t text, int thread) {
    if (holds()) scratch_[thread].skipped[text] += at.matrix->rows * columns;
}

// A sparse step of `moving_` has ended.
void Decoder::hold_step() {
    for (size_t text = 0; text < moving_.size(); ++text) {
        int64_t skipped = 0;
        for (Scratch& own : scratch_) {
            skipped += own.skipped[text];
            own.skipped[text] = 0;
        }
        HeldText& held = held_[moving_[text]];
        held = hold_.after(held, skipped);
    }
}

}  // namespace sparsepack
