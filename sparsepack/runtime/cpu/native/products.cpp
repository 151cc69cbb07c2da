#include "products.h"

#include <algorithm>

namespace sparsepack {
namespace {

constexpr int32_t UNITS_PER_THREAD = 4;  // a thread that is held up leaves some of its units to the others
constexpr int64_t ROWS_PER_UNIT = 8 * ROW_TILE;

int32_t pieces(const Zigzag& m, int32_t count, int threads) {
    if (threads == 1) return 1;
    int32_t tiles = (count + m.tile - 1) / m.tile, wanted = (UNITS_PER_THREAD * threads + spans(&m) - 1) / spans(&m);
    return std::max(1, std::min(tiles, wanted));
}

}  // namespace

void gemv(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, const int32_t* indices, int32_t count,
          std::vector<float>& parts, float* y) {
    int32_t cuts = pieces(m, count, pool.threads()), units = spans(&m) * cuts;
    int64_t padded = (int64_t)m.bands * BAND_ROWS;
    if ((int64_t)parts.size() < cuts * padded) parts.resize(cuts * padded);
    auto described = [&](int number) {
        int32_t span = number / cuts, cut = number % cuts;
        int32_t from = (int32_t)((int64_t)count * cut / cuts), to = (int32_t)((int64_t)count * (cut + 1) / cuts);
        float* part = parts.data() + cut * padded + (int64_t)span * m.span * QUAD_ROWS;
        return GemvUnit{&m, span, to - from, indices + from, x, part};
    };
    pool.run([&](int) {
        pool.share(units, [&](int here, int next) {
            GemvUnit unit = described(here), after = next < 0 ? unit : described(next);
            kernels.zigzag_gemv(&unit, next < 0 ? nullptr : &after);
        });
        pool.barrier();
        pool.share(spans(&m), [&](int span, int) {
            int64_t first = (int64_t)span * m.span * QUAD_ROWS;
            int64_t rows = std::min(m.rows - first, (int64_t)span_bands(&m, span) * BAND_ROWS);
            kernels.sum(parts.data() + first, padded, cuts, nullptr, (int32_t)rows, 0, y + first);
        });
    });
}

void matmul(const Kernels& kernels, Pool& pool, const Zigzag& m, const float* x, int32_t positions, float* y) {
    // Each group of positions decodes the weights anew: only as many as it takes to employ every thread.
    int32_t groups = std::max(1, std::min(positions, (pool.threads() + quads(&m) - 1) / quads(&m)));
    pool.run([&](int) {
        pool.share(quads(&m) * groups, [&](int number, int) {
            int32_t group = number % groups;
            int64_t from = (int64_t)positions * group / groups, to = (int64_t)positions * (group + 1) / groups;
            kernels.zigzag_matmul(&m, number / groups, x + from * m.columns, m.columns, (int32_t)(to - from),
                                  y + from * m.rows, m.rows);
        });
    });
}

void neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& n, const float* x, const float* gate,
                const int32_t* indices, int32_t count, Buffer<uint8_t>& input, std::vector<float>& parts, float* y) {
    int32_t cuts = neuron_cuts(count, pool.threads()), hidden = neuron_hidden(&n);
    if ((int64_t)parts.size() < (int64_t)cuts * hidden) parts.resize((int64_t)cuts * hidden);
    input.grow(neuron_input_bytes(n.bands));
    kernels.neuron_input(x, n.bands, input.data());
    auto unit = [&](int32_t cut) {
        int32_t first = neuron_border(count, cuts, cut), last = neuron_border(count, cuts, cut + 1);
        return NeuronUnit{&n, last - first, indices + first, gate, input.data(), parts.data() + (int64_t)cut * hidden};
    };
    pool.run([&](int) {
        pool.share(cuts, [&](int here, int next) {
            NeuronUnit now = unit(here), after = next < 0 ? now : unit(next);
            kernels.neuron_ffn(&now, next < 0 ? nullptr : &after);
        });
    });
    kernels.sum(parts.data(), hidden, cuts, nullptr, hidden, 0, y);
}

void neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& n, const float* x, const float* gate,
                   int32_t positions, float* y) {
    pool.run([&](int) { share_neuron_matmul(kernels, pool, n, x, gate, positions, y); });
}

void share_neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& n, const float* x, const float* gate,
                         int32_t positions, float* y) {
    // Each group decodes the records that it needs anew; its inputs and sums should stay in the cache.
    int64_t hidden = neuron_hidden(&n);
    int32_t most = std::max<int32_t>(MOST_NEURON_POSITIONS / 2, int32_t(MOST_NEURON_POSITIONS * 1024 / hidden));
    int32_t size = std::min({(positions + pool.threads() - 1) / pool.threads(), most, int32_t(MOST_NEURON_POSITIONS)});
    pool.share((positions + size - 1) / size, [&](int group, int) {
        int64_t first = (int64_t)group * size;
        kernels.neuron_matmul(&n, x + first * hidden, gate + first * n.count,
                              (int32_t)std::min<int64_t>(size, positions - first), y + first * hidden);
    });
}

void matmul(const Kernels& kernels, Pool& pool, const Rows& m, const float* x, int32_t positions, float* y) {
    int32_t units = (int32_t)((m.rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT);
    pool.run([&](int) {
        pool.share(units, [&](int number, int) {
            int64_t first = number * ROWS_PER_UNIT;
            kernels.rows_matmul(&m, first, std::min(first + ROWS_PER_UNIT, m.rows), x, m.columns, positions, y, m.rows);
        });
    });
}

}  // namespace sparsepack
