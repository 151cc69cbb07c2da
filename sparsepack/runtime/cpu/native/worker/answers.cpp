// How a thread computes its part of what the device asks for: the listed neurons of a block, or a product's rows.
#include "threads/products.h"
#include "worker/cold_worker.h"
#include "worker/slices.h"

#include <algorithm>
#include <cstdint>

namespace sparsepack {
namespace {

constexpr int32_t FIRST_RECORDS = 4;
// Whoever adds takes whole cache lines.
constexpr int64_t LINE = 16;  // floats

// Of columns from `first` on, those of each level above `absent`, one list after the other.
LevelRanges list_levels(const uint8_t* levels, int32_t first, int32_t count, int32_t absent, int32_t* list) {
    LevelRanges ranges = {};
    int32_t counts[256] = {}, at = 0;
    for (int32_t i = 0; i < count; ++i) ++counts[levels[first + i]];
    for (int32_t level = absent + 1; level <= PLANES; ++level) {
        ranges.first[level - 1] = ranges.last[level - 1] = at;
        at += counts[level];
    }
    for (int32_t i = 0; i < count; ++i) {
        int32_t level = levels[first + i];
        if (level > absent && level <= PLANES) list[ranges.last[level - 1]++] = first + i;
    }
    return ranges;
}

}  // namespace

// y [sequences][hidden] = the sum over the thread's range of the listed neurons
void ColdWorker::compute(const Request& of, const Deal& deal, int thread, float* y) noexcept {
    const uint8_t* request = this->request(of);
    const Neurons& n = *records_[of.block];
    auto border = [&](int32_t thread) {  // a multiple of 8, as many as are multiplied together
        return thread == deal.threads ? deal.count : int32_t(int64_t(deal.count) * thread / deal.threads) & ~7;
    };
    int32_t first = border(thread), count = border(thread + 1) - first;
    const int32_t* indices = reinterpret_cast<const int32_t*>(request + at_.indices) + first;
    const float* gates = reinterpret_cast<const float*>(request + at_.gates) + first;
    const float* x = reinterpret_cast<const float*>(request + at_.x);
    float* all = gates_.data();
    for (int32_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= at_.neurons) {
            give_up(BAD_REQUEST);
            count = 0;
            break;
        }
        for (int32_t sequence = 0; sequence < sequences_ && !of_gates_[of.block]; ++sequence)
            all[int64_t(sequence) * at_.neurons + indices[i]] = gates[int64_t(sequence) * at_.neurons + i];
    }
    if (of_gates_[of.block]) {
        count = active_of(of, indices, count, x, thread);
        indices = own_[thread].active.data();
    }
    if (sequences_ > 1) {
        NeuronsWork work = {&n, count, indices, x, all, sequences_, y};
        kernels_.neuron_matmul(&work);
        return;
    }
    const int64_t stride = neuron_stride(&n);
    for (int32_t i = 0; i < std::min(count, FIRST_RECORDS); ++i)  // on their way while the input is made
        for (int64_t byte = 0; byte < stride; byte += 64) __builtin_prefetch(n.data + indices[i] * stride + byte);
    uint8_t* input = own_[thread].input.data();
    if (!of_gates_[of.block]) kernels_.neuron_input(x, n.bands, input);
    NeuronWork work = {&n, count, indices, all, input, y};
    kernels_.neuron_ffn(&work, nullptr);
}

// Those of the listed neurons that are active in any sequence, into the thread's own memory, and their gates into gates_.
int32_t ColdWorker::active_of(const Request& of, const int32_t* indices, int32_t count, const float* x,
                              int thread) noexcept {
    const Gates& g = *of_gates_[of.block];
    Own& own = own_[thread];
    const int64_t stride = neuron_input_stride(g.bands);
    for (int32_t sequence = 0; sequence < sequences_; ++sequence)
        kernels_.neuron_input(x + int64_t(sequence) * at_.hidden, g.bands, own.input.data() + sequence * stride);
    float* products = own.products.data();
    GatesWork work = {&g, 0, count, indices, own.input.data(), sequences_, products, at_.neurons};
    kernels_.gate_products(&work);
    int32_t active = 0;
    for (int32_t i = 0; i < count; ++i) {
        bool any = false;
        for (int32_t sequence = 0; sequence < sequences_; ++sequence) {
            float product = products[int64_t(sequence) * at_.neurons + i];
            // Of what is not finite nothing is left out: it must show.
            float gate = product < 0 ? 0 : product;
            gates_.data()[int64_t(sequence) * at_.neurons + indices[i]] = gate;
            any |= gate != 0;
        }
        if (any) own.active.data()[active++] = indices[i];
    }
    return active;
}

void ColdWorker::answer_together(int32_t number, int thread) noexcept {
    const Request& of = requests_[number];
    const Deal& deal = deals_[number];
    int64_t floats = int64_t(sequences_) * at_.hidden, stride = int64_t(at_.sequences) * at_.hidden;
    compute(of, deal, thread, partial_sums_.data() + thread * stride);
    Arrivals& at = arrivals_[number];
    arrive(at, deal);
    int64_t lines = floats / LINE, first = lines * thread / deal.threads * LINE;
    int64_t last = lines * (thread + 1) / deal.threads * LINE;
    float* y = reinterpret_cast<float*>(answer(of) + at_.y);
    kernels_.sum(partial_sums_.data() + first, stride, deal.threads, nullptr, int32_t(last - first), 0, y + first);
    if (at.added.fetch_add(1, std::memory_order_acq_rel) == deal.threads - 1) publish(of);
}

// y [sequences][rows] = x [sequences][columns] W^T. A sequence is multiplied as if it were alone; the weights of a slice stay in the
// cache meanwhile.
void ColdWorker::multiply_together(int32_t number, int thread) noexcept {
    const Request& of = requests_[number];
    const Deal& deal = deals_[number];
    const Zigzag& m = *products_[of.product];
    const MailboxProduct& product = at_.products[of.product];
    const float* x = reinterpret_cast<const float*>(memory_ + product.x);
    const int32_t slices = product_slices(m, deal.threads), items = slices * spans(&m) * sequences_;
    const int32_t tiles = (product.columns + m.tile - 1) / m.tile;
    const int64_t stride = gemv_stride(m);
    auto border = [&](int32_t n) { return std::min(product.columns, int32_t(int64_t(tiles) * n / slices) * m.tile); };
    const uint8_t* levels = product.levels ? memory_ + product.levels : nullptr;
    Own& own = own_[thread];
    bool second = false;
    auto item = [&](int32_t at) {
        int64_t sequence = at % sequences_;
        int32_t span = at / sequences_ % spans(&m), slice = at / sequences_ / spans(&m);
        int32_t first = border(slice), count = border(slice + 1) - first;
        const int32_t* indices = columns_.data() + first;
        LevelRanges ranges = {};
        if (levels) {
            int32_t* kept = own.kept.data() + (second ? int64_t(own.kept.size() / 2) : 0);
            int32_t begin = span ? first : std::min(std::max(first, product.begins), first + count);
            ranges = list_levels(levels, begin, first + count - begin, m.absent, kept);
            indices = kept, second = !second;
        } else if (product.skips) {  // beside the list of the item before, which may still be read
            const float nothing = 0;
            int32_t* kept = own.kept.data() + (second ? int64_t(own.kept.size() / 2) : 0);
            const float* row = x + sequence * m.columns + first;
            count = kernels_.collect(row, nullptr, &nothing, 0, count, first, own.seen.data(), kept);
            std::fill_n(kept + count, SPARE_COLUMNS, first);
            indices = kept, second = !second;
        }
        float* y = slices_.data() + (int64_t(sequence) * slices + slice) * stride + int64_t(span) * m.span * QUAD_ROWS;
        return GemvWork{&m, span, count, indices, x + sequence * m.columns, y, true, ranges};
    };
    Arrivals& at = arrivals_[number];
    auto take = [&] { return at.taken.fetch_add(1, std::memory_order_relaxed); };
    bool fetched = false;
    for (int32_t here = take(); here < items;) {
        bool ahead = here + deal.threads < items;  // nobody holds one of the last items while others have none
        int32_t next = ahead ? take() : items;
        GemvWork now = item(here), after = next < items ? item(next) : now;
        now.cold = !fetched, fetched = next < items;
        kernels_.zigzag_gemv(&now, fetched ? &after : nullptr);
        here = ahead ? next : take();
    }
    arrive(at, deal);
    int64_t lines = (m.rows + LINE - 1) / LINE, first = lines * thread / deal.threads * LINE;
    int64_t last = std::min(m.rows, lines * (thread + 1) / deal.threads * LINE);
    float* y = reinterpret_cast<float*>(memory_ + product.y);
    for (int32_t sequence = 0; sequence < sequences_ && first < last; ++sequence)
        kernels_.sum(slices_.data() + int64_t(sequence) * slices * stride + first, stride, slices, nullptr,
                     int32_t(last - first), 0, y + int64_t(sequence) * m.rows + first);
    if (at.added.fetch_add(1, std::memory_order_acq_rel) == deal.threads - 1) publish(of);
}

}  // namespace sparsepack
