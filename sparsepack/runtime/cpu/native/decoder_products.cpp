// Products of a token: cut into units, and their partial sums added by whoever reads them.
#include <algorithm>
#include <string.h>

#include "decoder.h"

namespace sparsepack {
namespace {

// A thread that is held up leaves some of its units to the others.
constexpr int32_t UNITS_PER_THREAD = 3;
// A shorter unit would spend its time beginning.
constexpr int32_t TILES_PER_UNIT = 2;
// Partial sums that every thread adds for itself; more of them are shared out, at the price of a barrier.
constexpr int64_t MOST_READ_BY_ALL = 1 << 15;
constexpr int64_t ROWS_PER_UNIT = 512, LEAST_UNITS_PER_THREAD = 8;

}  // namespace

// Into how many the active columns of a product are cut. Grows with the count.
int32_t Decoder::cuts(const Zigzag& m, int32_t count) const {
    int32_t threads = pool_.threads();
    if (threads == 1) return 1;
    int32_t tiles = (count + m.tile - 1) / m.tile;
    int32_t wanted = (UNITS_PER_THREAD * threads + spans(&m) - 1) / spans(&m);
    return std::max(1, std::min(wanted, tiles / TILES_PER_UNIT));
}

// Unit `number` of a product: the parts of one cut are one vector of all padded rows.
GemvUnit Decoder::unit(const Input& input, int32_t cuts, int32_t number) const {
    const Zigzag& m = *input.site->matrix;
    int32_t span = number % spans(&m), cut = number / spans(&m), tiles = (input.count + m.tile - 1) / m.tile;
    auto border = [&](int32_t cut) { return std::min(input.count, int32_t(int64_t(tiles) * cut / cuts) * m.tile); };
    int32_t first = border(cut);
    float* y = input.parts + int64_t(cut) * m.bands * BAND_ROWS + int64_t(span) * m.span * QUAD_ROWS;
    return {&m, span, border(cut + 1) - first, input.indices + first, input.x, y};
}

// The input of a dense product.
Decoder::Input Decoder::whole(int layer, int site, const float* x, int thread) {
    const Site& at = model_.layers[layer].sites[site];
    int32_t columns = int32_t(at.matrix->columns);
    if (thread == 0) active_[layer * SITES + site] += columns;
    return {&at, x, all_.data(), columns, &at.bias, parts_[site & 1].data()};
}

// The input of a product: the active columns of x, listed in the thread's own scratch.
Decoder::Input Decoder::select(int layer, int site, const float* x, bool sparse, int thread) {
    const Site& at = model_.layers[layer].sites[site];
    if (!sparse || at.threshold.empty()) return whole(layer, site, x, thread);
    Scratch& own = scratch_[thread];
    const float* offset = at.offset.empty() ? nullptr : at.offset.data();
    int32_t count = k_.collect(x, offset, at.threshold.data(), at.threshold.size() > 1, int32_t(at.matrix->columns), 0,
                               own.d.data(), own.indices.data());
    if (thread == 0) active_[layer * SITES + site] += count;
    return {&at, own.d.data(), own.indices.data(), count, &at.sparse_bias, parts_[site & 1].data()};
}

void Decoder::multiply(const Input& input) {
    const Zigzag& m = *input.site->matrix;
    int32_t cut = cuts(m, input.count);
    pool_.share(cut * spans(&m), [&](int here, int next) {
        GemvUnit now = unit(input, cut, here), after = next < 0 ? now : unit(input, cut, next);
        k_.zigzag_gemv(&now, next < 0 ? nullptr : &after);
    });
}

Decoder::Sums Decoder::sums(const Input& input) const {
    const Zigzag& m = *input.site->matrix;
    return {input.parts, int64_t(m.bands) * BAND_ROWS, cuts(m, input.count), input.bias, m.rows};
}

// y[i] = row `first + i` of a finished product; adds to y if `add`.
void Decoder::read(const Sums& sums, int64_t first, int64_t count, float* y, bool add) const {
    const float* bias = sums.bias->empty() ? nullptr : sums.bias->data() + first;
    k_.sum(sums.parts + first, sums.stride, sums.count, bias, int32_t(count), add, y);
}

// x[hidden] += a finished product; x is the thread's own.
void Decoder::add_to(float* x, const Sums& sums, int thread) {
    int64_t rows = sums.rows;
    if (sums.count * rows <= MOST_READ_BY_ALL) return read(sums, 0, rows, x, true);
    int64_t first = rows * thread / pool_.threads(), last = rows * (thread + 1) / pool_.threads();
    read(sums, first, last - first, sum_.data() + first);
    pool_.barrier();
    k_.sum(sum_.data(), 0, 1, nullptr, int32_t(rows), 1, x);
}

// y[positions][vocabulary] = x[positions][hidden] times the output matrix
void Decoder::write_logits(const float* x, int32_t positions, float* y) {
    const Rows& output = model_.output;
    int64_t rows = output.rows, size = rows / (LEAST_UNITS_PER_THREAD * pool_.threads()) / ROW_TILE * ROW_TILE;
    size = std::max<int64_t>(ROW_TILE, std::min(ROWS_PER_UNIT, size));
    pool_.share(int((rows + size - 1) / size), [&](int number, int) {
        int64_t first = number * size;
        k_.rows_matmul(&output, first, std::min(first + size, rows), x, s_.hidden, positions, y, rows);
    });
}

}  // namespace sparsepack
