#include "threads/products.h"

#include <algorithm>

namespace sparsepack {
namespace {

// A thread that is held up leaves some of its work items to the others. With planes an item begins and ends more slowly, by
// the time of 30 columns. Of many threads one is held up more often, and all wait for it.
constexpr int32_t ITEMS_PER_THREAD = 3, PLANE_ITEMS_PER_THREAD = 2, MANY_THREADS = 8, ITEMS_OF_MANY_THREADS = 4;
// A shorter slice would spend its time beginning.
constexpr int32_t TILES_PER_SLICE = 2, NEURONS_PER_SLICE = 32;
// Of fewer positions, another kernel may be the faster one, and gives other bits.
constexpr int32_t LEAST_GROUP = 32;
constexpr int32_t GATES_PER_ITEM = 64;
constexpr int64_t ROWS_PER_ITEM = 512, ROW_ITEMS_PER_THREAD = 8, ROWS_PER_SUM = 1024;

// The neuron, of `count`, at which slice `slice` begins: a multiple of 8, as many as are multiplied together.
int32_t neuron_border(int32_t count, int32_t slices, int32_t slice) {
    return slice == slices ? count : int32_t(int64_t(count) * slice / slices) & ~7;
}

// Of a list of columns of a matrix of planes, those whose numbers are from `from` to before `to`.
LevelRanges columns_between(const Active& active, int32_t from, int32_t to) {
    LevelRanges levels = level_ranges(&active.ends, active.count);
    auto at = [&](int32_t first, int32_t last, int32_t column) {
        return int32_t(std::lower_bound(active.indices + first, active.indices + last, column) - active.indices);
    };
    for (int32_t i = 0; i < PLANES; i++) {
        int32_t first = levels.first[i], last = levels.last[i];
        levels.first[i] = at(first, last, from), levels.last[i] = at(first, last, to);
    }
    return levels;
}

// Of such a list, the part from `first` to before `last`, as a list.
LevelRanges ranges_within(const Active& active, int32_t first, int32_t last) {
    LevelRanges levels = level_ranges(&active.ends, active.count);
    for (int32_t* each : {levels.first, levels.last}) {
        for (int32_t i = 0; i < PLANES; i++) each[i] = std::min(std::max(each[i], first), last) - first;
    }
    return levels;
}

int32_t items_wanted(const Zigzag& m, int32_t threads) {
    if (threads >= MANY_THREADS) return threads * ITEMS_OF_MANY_THREADS;
    return threads * (m.block == Q6_P ? PLANE_ITEMS_PER_THREAD : ITEMS_PER_THREAD);
}

// Work items that the rows of a product are shared out to: its spans, or with planes their quads, where spans are few.
int32_t row_ranges(const Zigzag& m, int32_t threads, int32_t together) {
    bool few = m.block == Q6_P && threads > 1 && spans(&m) * together < items_wanted(m, threads);
    return few ? quads(&m) : spans(&m);
}

// Positions of a work item: with these the thread that has most ends first, when all are as fast. Each item unpacks the
// weights of a quad anew. Of equals, enough items for threads that are held up.
int32_t group_size(const MatmulPanel& panel, int32_t quads, int32_t positions, int32_t threads) {
    int32_t best = positions;
    int64_t least = INT64_MAX, items = 0;
    for (int32_t groups = 1; groups == 1 || positions / groups >= LEAST_GROUP; ++groups) {
        int32_t size = groups == 1 ? positions : ((positions + groups - 1) / groups + 15) & ~15;
        int32_t count = (positions + size - 1) / size, steps = (size + panel.step - 1) / panel.step;
        if (count > 1 && positions - (count - 1) * size < LEAST_GROUP) continue;
        int64_t unpacking = int64_t(size + panel.positions - 1) / panel.positions * panel.unpacking;
        int64_t rounds = (int64_t(quads) * count + threads - 1) / threads;
        int64_t time = rounds * (steps * panel.step + unpacking);
        if (time > least || (time == least && items >= ITEMS_PER_THREAD * threads)) continue;
        best = size, least = time, items = int64_t(quads) * count;
    }
    return best;
}

}  // namespace

int64_t bytes_read(const Active& active) {
    int64_t bytes = 0;
    for (int32_t level = 1; level <= PLANES; level++)
        bytes += (level_end(&active.ends, level, active.count) - level_begin(&active.ends, level)) * level_bytes(level);
    return bytes;
}

int32_t gemv_slices(const Zigzag& m, int32_t count, int32_t threads, int32_t together) {
    if (threads == 1) return 1;
    int32_t tiles = (count + m.tile - 1) / m.tile, items = row_ranges(m, threads, together) * together;
    int32_t wanted = (items_wanted(m, threads) + items - 1) / items;
    return std::max(1, std::min(wanted, tiles / TILES_PER_SLICE));
}

int32_t gemv_slices(const Zigzag& m, int32_t count, int32_t threads) { return gemv_slices(m, count, threads, 1); }

int32_t neuron_slices(int32_t count, int32_t threads) {
    int32_t wanted = threads == 1 ? 1 : ITEMS_PER_THREAD * threads;
    return std::max(1, std::min(wanted, count / NEURONS_PER_SLICE));
}

void share_gemvs(const Kernels& kernels, Pool& pool, const Product* products, int32_t together, float* partial_sums) {
    const Zigzag& shape = *products[0].matrix;
    auto slices_of = [&](const Product& p) { return gemv_slices(shape, p.active.count, pool.threads(), together); };
    int32_t all = 0, ranges = row_ranges(shape, pool.threads(), together);
    for (int32_t i = 0; i < together; ++i) all += slices_of(products[i]);
    auto item = [&](int number) {
        int32_t range = number % ranges, at = number / ranges, slice = at;
        int32_t span = ranges == spans(&shape) ? range : range / shape.span;
        const Product* p = products;
        for (; slice >= slices_of(*p); ++p) slice -= slices_of(*p);
        int32_t slices = slices_of(*p), count = p->active.count, tiles = (count + shape.tile - 1) / shape.tile;
        float* y = partial_sums + at * gemv_stride(shape) + int64_t(span) * shape.span * QUAD_ROWS;
        if (shape.block == Q6_P) {
            auto column = [&](int32_t n) { return int32_t(shape.columns * n / slices); };
            LevelRanges levels = columns_between(p->active, column(slice), column(slice + 1));
            GemvWork work = {p->matrix, span, count, p->active.indices, p->x, y, false, levels};
            if (ranges != spans(&shape)) work.first_quad = range % shape.span, work.end_quad = work.first_quad + 1;
            return work;
        }
        auto border = [&](int32_t n) { return std::min(count, int32_t(int64_t(tiles) * n / slices) * shape.tile); };
        int32_t first = border(slice);
        return GemvWork{p->matrix, span, border(slice + 1) - first, p->active.indices + first, p->x, y, false};
    };
    bool cold = true;
    pool.share(all * ranges, [&](int here, int next) {
        GemvWork now = item(here), after = next < 0 ? now : item(next);
        now.cold = cold, cold = false;
        kernels.zigzag_gemv(&now, next < 0 ? nullptr : &after);
    });
}

void share_gemv(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, Active active,
                float* partial_sums) {
    Product one = {&m, x, active};
    share_gemvs(kernels, pool, &one, 1, partial_sums);
}

void share_matmul(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, int32_t positions, float* y,
                  const uint8_t* levels) {
    const int32_t size = group_size(kernels.panel, quads(&m), positions, pool.threads());
    const int32_t groups = (positions + size - 1) / size;
    const LevelEnds whole = {};
    pool.share(quads(&m) * groups, [&](int number, int) {
        int64_t first = int64_t(number % groups) * size;
        int32_t here = int32_t(std::min<int64_t>(size, positions - first));
        MatmulWork work = {&m,
                           number / groups,
                           int32_t(m.columns),
                           nullptr,
                           x + first * m.columns,
                           y + first * m.rows,
                           m.columns,
                           m.rows,
                           here,
                           level_ranges(&whole, int32_t(m.columns)),
                           levels ? levels + first * m.columns : nullptr};
        kernels.zigzag_matmul(&work);
    });
}

int32_t matmul_slices(const Zigzag& m, int32_t count, int32_t threads) {
    int32_t wanted = threads == 1 ? 1 : (ITEMS_PER_THREAD * threads + quads(&m) - 1) / quads(&m);
    return std::max(1, std::min(wanted, count / MATMUL_TILE));
}

void share_matmul(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, Active active, int32_t positions,
                  float* partial_sums) {
    int32_t slices = matmul_slices(m, active.count, pool.threads());
    int32_t tiles = (active.count + MATMUL_TILE - 1) / MATMUL_TILE;
    auto border = [&](int32_t slice) {
        return std::min(active.count, int32_t(int64_t(tiles) * slice / slices) * MATMUL_TILE);
    };
    pool.share(quads(&m) * slices, [&](int number, int) {
        int32_t slice = number / quads(&m), first = border(slice), last = border(slice + 1);
        MatmulWork work = {&m,           number % quads(&m),
                           last - first, active.indices + first,
                           x + first,    partial_sums + int64_t(slice) * positions * m.rows,
                           m.columns,    m.rows,
                           positions,    ranges_within(active, first, last)};
        kernels.zigzag_matmul(&work);
    });
}

void share_matmul(const Kernels& kernels, Pool& pool, const Rows& m, const float* x, int32_t positions, float* y) {
    int64_t size = m.rows / (ROW_ITEMS_PER_THREAD * pool.threads()) / ROW_TILE * ROW_TILE;
    size = std::max<int64_t>(ROW_TILE, std::min(ROWS_PER_ITEM, size));
    pool.share(int((m.rows + size - 1) / size), [&](int number, int) {
        int64_t first = number * size;
        kernels.rows_matmul(&m, first, std::min(first + size, m.rows), x, m.columns, positions, y, m.rows);
    });
}

void share_neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& n, const uint8_t* input, const float* gate,
                      Active active, float* partial_sums) {
    int32_t slices = neuron_slices(active.count, pool.threads());
    int64_t hidden = neuron_hidden(&n);
    auto item = [&](int32_t slice) {
        int32_t first = neuron_border(active.count, slices, slice);
        int32_t count = neuron_border(active.count, slices, slice + 1) - first;
        return NeuronWork{&n, count, active.indices + first, gate, input, partial_sums + slice * hidden};
    };
    pool.share(slices, [&](int here, int next) {
        NeuronWork now = item(here), after = next < 0 ? now : item(next);
        kernels.neuron_ffn(&now, next < 0 ? nullptr : &after);
    });
}

void share_neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& n, const float* x, const float* gate,
                         int32_t positions, float* y) {
    // Each group decodes the records that it needs anew; its inputs and sums should stay in the cache.
    int64_t hidden = neuron_hidden(&n);
    int32_t most = std::max<int32_t>(MOST_NEURON_POSITIONS / 2, int32_t(MOST_NEURON_POSITIONS * 1024 / hidden));
    int32_t size = std::min({(positions + pool.threads() - 1) / pool.threads(), most, int32_t(MOST_NEURON_POSITIONS)});
    pool.share((positions + size - 1) / size, [&](int group, int) {
        int64_t first = (int64_t)group * size;
        NeuronsWork work = {&n,
                            int32_t(n.count),
                            nullptr,
                            x + first * hidden,
                            gate + first * n.count,
                            int32_t(std::min<int64_t>(size, positions - first)),
                            y + first * hidden};
        kernels.neuron_matmul(&work);
    });
}

void share_gate_products(const Kernels& kernels, Pool& pool, const Gates& gates, const uint8_t* inputs,
                         int32_t positions, float* y) {
    int32_t count = int32_t(gates.count);
    pool.share((count + GATES_PER_ITEM - 1) / GATES_PER_ITEM, [&](int number, int) {
        int32_t first = number * GATES_PER_ITEM, here = std::min(GATES_PER_ITEM, count - first);
        GatesWork work = {&gates, first, here, nullptr, inputs, positions, y, gates.count};
        kernels.gate_products(&work);
    });
}

void gemv(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, Active active, ProductScratch& scratch,
          float* y) {
    int32_t slices = gemv_slices(m, active.count, pool.threads());
    scratch.partial_sums.grow(slices * gemv_stride(m));
    float* sums = scratch.partial_sums.data();
    pool.run([&](int) {
        share_gemv(kernels, pool, m, x, active, sums);
        pool.barrier();
        pool.share(int((m.rows + ROWS_PER_SUM - 1) / ROWS_PER_SUM), [&](int number, int) {
            int64_t first = number * ROWS_PER_SUM, rows = std::min(ROWS_PER_SUM, m.rows - first);
            kernels.sum(sums + first, gemv_stride(m), slices, nullptr, int32_t(rows), 0, y + first);
        });
    });
}

void neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& n, const float* x, const float* gate, Active active,
                ProductScratch& scratch, float* y) {
    int32_t slices = neuron_slices(active.count, pool.threads()), hidden = neuron_hidden(&n);
    scratch.partial_sums.grow(int64_t(slices) * hidden);
    scratch.neuron_input.grow(neuron_input_bytes(n.bands));
    float* sums = scratch.partial_sums.data();
    uint8_t* input = scratch.neuron_input.data();
    kernels.neuron_input(x, n.bands, input);
    pool.run([&](int) { share_neuron_ffn(kernels, pool, n, input, gate, active, sums); });
    kernels.sum(sums, hidden, slices, nullptr, hidden, 0, y);
}

void gate_products(const Kernels& kernels, Pool& pool, const Gates& gates, const float* x, int32_t positions,
                   ProductScratch& scratch, float* y) {
    int64_t stride = neuron_input_stride(gates.bands), hidden = int64_t(gates.bands) * BAND_ROWS;
    scratch.neuron_input.grow(positions * stride);
    uint8_t* inputs = scratch.neuron_input.data();
    pool.run([&](int) {
        pool.share(positions,
                   [&](int p, int) { kernels.neuron_input(x + p * hidden, gates.bands, inputs + p * stride); });
        pool.barrier();
        share_gate_products(kernels, pool, gates, inputs, positions, y);
    });
}

}  // namespace sparsepack
