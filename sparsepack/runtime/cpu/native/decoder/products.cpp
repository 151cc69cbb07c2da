// Products of a token: what their inputs are, and their partial sums, which whoever reads them adds.
#include <string.h>

#include "decoder/decoder.h"

namespace sparsepack {
namespace {

// Partial sums that every thread adds for itself; more of them are shared out, at the price of a barrier.
constexpr int64_t MOST_READ_BY_ALL = 1 << 15;

}  // namespace

// y[hidden] = RMSNorm(x), or x where the block has no such norm
void Decoder::norm(const float* x, const std::vector<float>& weight, float* y) const {
    if (weight.empty())
        memcpy(y, x, s_.hidden * sizeof(float));
    else if (weight.size() > size_t(s_.hidden))
        layer_norm(x, weight.data(), y);
    else
        k_.rms_norm(x, weight.data(), s_.hidden, s_.eps, y);
}

// LayerNorm: weight [hidden], then bias [hidden]
void Decoder::layer_norm(const float* x, const float* weight, float* y) const {
    double sum = 0;
    for (int32_t i = 0; i < s_.hidden; ++i) sum += x[i];
    const float mean = float(sum / s_.hidden);
    for (int32_t i = 0; i < s_.hidden; ++i) y[i] = x[i] - mean;
    k_.rms_norm(y, weight, s_.hidden, s_.eps, y);
    for (int32_t i = 0; i < s_.hidden; ++i) y[i] += weight[s_.hidden + i];
}

// The input of a dense product.
Decoder::Input Decoder::whole(int layer, int site, const float* x, int thread) {
    const Site& at = model_.layers[layer].sites[site];
    int32_t columns = int32_t(at.matrix->columns);
    Active active = {all_.data(), columns};
    if (thread == 0) active_[layer * SITES + site] += units_read(at, active);
    return {&at, x, active, &at.bias, partial_sums_[site & 1].data()};
}

// What a product reads in units of which a token may leave some out: columns, or bytes of a row of superblocks.
int64_t Decoder::units_read(const Site& at, const Active& active) {
    return at.has_planes() ? bytes_read(active) : active.count;
}

// Of the n columns from `first` on, for a sequence by its index in the step: of each level a list.
void Decoder::collect_levels(const Site& at, const float* x, int32_t first, int32_t n, int32_t index, float* d,
                             int32_t* lists, int32_t stride, int32_t* counts) const {
    const float* offset = at.offset.empty() ? nullptr : at.offset.data() + first;
    k_.collect_levels(x, offset, at.threshold.data() + first, at.steps(), threshold_scale(index), n, first, d, lists,
                      stride, counts);
}

// All columns of x that are read, by a sequence's index in the step, level by level at `to`; d: what they are multiplied with.
// threshold: [columns].
Active Decoder::list_levels(const Site& at, const float* x, const float* threshold, int32_t index, float* d,
                            int32_t* to, int thread) {
    int32_t columns = int32_t(at.matrix->columns), stride = columns + 16, counts[PLANES];
    int32_t* lists = scratch_[thread].lists.data();
    const float* offset = at.offset.empty() ? nullptr : at.offset.data();
    k_.collect_levels(x, offset, threshold, at.steps(), threshold_scale(index), columns, 0, d, lists, stride, counts);
    return join_levels(to, 1, [&](int32_t level, int) { return List{lists + level * stride, counts[level]}; });
}

// The input of a product: the active columns of x, listed in the thread's own scratch.
Decoder::Input Decoder::select(int layer, int site, const float* x, bool sparse, int thread) {
    const Site& at = model_.layers[layer].sites[site];
    if (!sparse || at.threshold.empty()) return whole(layer, site, x, thread);
    Scratch& own = scratch_[thread];
    int32_t columns = int32_t(at.matrix->columns);
    Active active = {own.indices.data(), 0};
    if (at.has_levels()) {
        active = list_levels(at, x, at.threshold.data(), 0, own.d.data(), own.indices.data(), thread);
        if (thread == 0) count_unread(at, columns, bytes_read(active), 0, thread);
    } else {
        const float* offset = at.offset.empty() ? nullptr : at.offset.data();
        const float* threshold = thresholds(at, 0, columns, 0, thread);
        active.count =
            k_.collect(x, offset, threshold, at.threshold.size() > 1, columns, 0, own.d.data(), own.indices.data());
        if (thread == 0) count_skipped(at, columns - active.count, 0, thread);
    }
    if (thread == 0) active_[layer * SITES + site] += units_read(at, active);
    return {&at, own.d.data(), active, &at.sparse_bias, partial_sums_[site & 1].data()};
}

// The same of x normed, where `norm` is not empty: each thread norms it for itself.
Decoder::Input Decoder::select_normed(int layer, int site, const float* x, const std::vector<float>& norm, bool sparse,
                                      int thread) {
    if (norm.empty()) return select(layer, site, x, sparse, thread);
    float* inner = scratch_[thread].inner.data();
    k_.rms_norm(x, norm.data(), int32_t(norm.size()), s_.eps, inner);
    return select(layer, site, inner, sparse, thread);
}

// x [positions][columns], normed where `norm` is not empty; of positions first ... last - 1.
void Decoder::norm_each(const std::vector<float>& norm, int32_t first, int32_t last, float* x) const {
    const int64_t columns = int64_t(norm.size());
    for (int64_t p = first; p < last && columns; ++p)
        k_.rms_norm(x + p * columns, norm.data(), int32_t(columns), s_.eps, x + p * columns);
}

void Decoder::multiply(const Input& input) {
    share_gemv(k_, pool_, *input.site->matrix, input.x, input.active, input.partial_sums);
}

Decoder::Sums Decoder::sums(const Input& input) const {
    const Zigzag& m = *input.site->matrix;
    int32_t slices = gemv_slices(m, input.active.count, pool_.threads());
    return {input.partial_sums, gemv_stride(m), slices, input.bias, m.rows};
}

// y[i] = row `first + i` of a finished product; adds to y if `add`.
void Decoder::read(const Sums& sums, int64_t first, int64_t count, float* y, bool add) const {
    const float* bias = sums.bias->empty() ? nullptr : sums.bias->data() + first;
    k_.sum(sums.partial_sums + first, sums.stride, sums.slices, bias, int32_t(count), add, y);
}

// x[hidden] += a finished product, normed where `norm` is not empty; x is the thread's own.
void Decoder::add_to(float* x, const Sums& sums, const std::vector<float>& norm, int thread) {
    int64_t rows = sums.rows;
    float *own = scratch_[thread].d.data(), *y = own;
    if (sums.slices * rows > MOST_READ_BY_ALL) {
        int64_t first = rows * thread / pool_.threads(), last = rows * (thread + 1) / pool_.threads();
        read(sums, first, last - first, sum_.data() + first);
        meet(LISTS, thread);
        y = sum_.data();
    } else if (norm.empty()) {
        return read(sums, 0, rows, x, true);
    } else {
        read(sums, 0, rows, own);
    }
    if (!norm.empty()) {
        k_.rms_norm(y, norm.data(), int32_t(rows), s_.eps, own);
        y = own;
    }
    k_.sum(y, 0, 1, nullptr, int32_t(rows), 1, x);
}

}  // namespace sparsepack
