// Given tokens, many at once, as steps compute each: what a token's own thresholds leave out of a product is zero in its row,
// and of a matrix of planes each column is read at the level that it has for the token. Activity is counted as by steps.
#include <string.h>

#include <stdexcept>

#include "decoder/decoder.h"

namespace sparsepack {

void Decoder::teacher_forced(const std::vector<Continuation>& all, const int64_t* ids, bool sparse, float* logits) {
    if (sparse && scales_thresholds())
        throw std::invalid_argument("thresholds follow from the token before: expected steps");
    append(all, ids, sparse, logits);
}

// What the sum of a site's product lacks in a row.
const std::vector<float>& Decoder::bias(const Site& at, int64_t row) const {
    return masks(at) && steps_[row] ? at.sparse_bias : at.bias;
}

// The level of each column of a row and those after it; null where no row has levels of its own.
uint8_t* Decoder::levels(const Site& at, int64_t row) {
    return masks(at) && at.has_levels() ? wide_levels_.data() + row * at.matrix->columns : nullptr;
}

// Of x, the inputs of a site, rows first ... last - 1: what is not read becomes zero, and the levels of the others are noted.
// times: of matrices that are read alike.
void Decoder::mask_rows(int layer, int site, float* x, int32_t first, int32_t last, int thread, int64_t times) {
    if (!steps_some_) return;
    const Site& at = model_.layers[layer].sites[site];
    int64_t& counted = scratch_[thread].counted[layer * SITES + site];
    for (int64_t p = first; p < last; ++p)
        counted += times * mask_row(at, at.threshold.data(), p, x + p * at.matrix->columns, levels(at, p), thread);
}

// The same of the inputs x that a row has for a site, by these thresholds; levels: null where it has none. Returns the units
// that are read, of a row that runs as a step.
int64_t Decoder::mask_row(const Site& at, const float* threshold, int64_t row, float* x, uint8_t* levels, int thread) {
    const int32_t columns = int32_t(at.matrix->columns);
    if (!steps_[row] || !masks(at)) {
        if (levels) memset(levels, PLANES, columns);
        return steps_[row] ? units_read(at, {all_.data(), columns}) : 0;
    }
    int32_t* indices = scratch_[thread].indices.data();
    if (levels) {
        Active active = list_levels(at, x, threshold, 0, x, indices, thread);
        memset(levels, 0, columns);
        for (int32_t level = 1; level <= PLANES; ++level)
            for (int32_t i = level_begin(&active.ends, level); i < level_end(&active.ends, level, active.count); ++i)
                levels[indices[i]] = uint8_t(level);
        return bytes_read(active);
    }
    const float* offset = at.offset.empty() ? nullptr : at.offset.data();
    int32_t count = k_.collect(x, offset, threshold, at.threshold.size() > 1, columns, 0, x, indices), from = 0;
    for (int32_t i = 0; i <= count; ++i) {
        const int32_t to = i < count ? indices[i] : columns;
        memset(x + from, 0, (to - from) * sizeof(float));
        from = to + 1;
    }
    return units_read(at, {indices, count});
}

// Counts active neurons of rows first ... last - 1, from their gates in `wide_rows_`.
void Decoder::count_neurons(int layer, int32_t first, int32_t last, int thread) {
    const int64_t count = model_.layers[layer].neurons->count;
    std::vector<int64_t>& counted = scratch_[thread].counted;
    for (int64_t p = first; p < last; ++p) {
        if (!steps_[p]) continue;
        const float* gates = wide_rows_.data() + p * count;
        int64_t active = sparse_rows_ ? 0 : count;
        for (int64_t n = 0; n < count && sparse_rows_; ++n) active += gates[n] > 0;
        counted[layer * SITES + MLP_MID] += active;
        if (model_.layers[layer].gates) counted[layer * SITES + MLP_IN] += s_.hidden;
    }
}

}  // namespace sparsepack
