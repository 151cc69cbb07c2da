// Matrices of planes: the layout against the bytes of the file, every instruction set against the plain one.
#include "check_kernels.h"
#include "layout/planes.h"
#include "layout/repack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sparsepack {
namespace {

// Relative errors where multipliers have 7 bits, and of products in floats. Those of multipliers are of the largest
// weights that a group's scale allows (`largest_norm`): weights of a few columns nearly cancel what is added to them.
constexpr float COARSE = 0.005f, FINE = 3e-4f, LARGEST = 128;

std::vector<Q6PBlock> random_blocks(int64_t count) {
    std::vector<Q6PBlock> blocks(count);
    auto* bytes = (uint8_t*)blocks.data();
    for (int64_t i = 0; i < count * (int64_t)sizeof(Q6PBlock); i++) bytes[i] = (uint8_t)bits();
    for (Q6PBlock& block : blocks) {
        for (uint8_t& scale : block.s) scale = (uint8_t)(130 + scale % 16);
    }
    return blocks;
}

struct Made {
    ZigzagMatrix matrix;
    std::vector<Q6PBlock> blocks, tail;
};

Made random_planes(int64_t rows, int64_t columns, int span, int tile, bool has_tail, int32_t absent = 0) {
    static Pool pool(1);
    Made made;
    made.blocks = random_blocks((has_tail ? rows / 256 : (rows + 255) / 256) * columns);
    if (has_tail) made.tail = random_blocks(tail_blocks(rows, columns));
    made.matrix = repack_zigzag((const uint8_t*)made.blocks.data(), rows, columns, span, tile, pool,
                                has_tail ? (const uint8_t*)made.tail.data() : nullptr, Q6_P, absent);
    return made;
}

float scale_of(const Q6PBlock& block, int32_t group) {
    float fraction = 1 + (float)(block.s[group] % 8 * 4 + block.b[group] / 64) / 32;
    return std::ldexp(fraction, block.s[group] / 8 - 24);
}

// A weight at a level, from the bytes of the file; or what of it is in planes after the `absent` first ones.
float weight_of(const Q6PBlock& block, int32_t i, int32_t level, int32_t absent) {
    int32_t group = i / 64, byte = i % 64, q = absent ? 0 : (block.first[byte] >> 2 * group & 3) << 4;
    for (int32_t plane = absent ? absent + 1 : 2; plane <= level; plane++)
        q |= (block.others[plane - 2][byte % 32] >> (2 * group + byte / 32) & 1) << (5 - plane);
    static const float middles[] = {0, 90, 112, 120, 124, 126};
    float t = (level == 1 ? 60.0f * (float)(q >> 4) : 4.0f * (float)q) - middles[level];
    float centre = (float)(int8_t)(block.b[group] << 2) + 2;
    if (absent) t = 4.0f * (float)q, centre = 0;
    return scale_of(block, group) * (t + centre);
}

// The superblock of a weight, of a tail where it lies there, and the number of its group in it.
const Q6PBlock& block_of(const Made& made, int64_t row, int64_t column, int32_t* group) {
    const Zigzag& m = made.matrix.view;
    bool whole = !m.pieces || row < m.rows / 256 * 256;
    int64_t piece = column * m.pieces + row % 256 / 64;
    *group = whole ? int32_t(row % 256 / 64) : int32_t(piece % 4);
    return whole ? made.blocks[row / 256 * m.columns + column] : made.tail[piece / 4];
}

float weight_of(const Made& made, int64_t row, int64_t column, int32_t level) {
    int32_t group;
    const Q6PBlock& block = block_of(made, row, column, &group);
    return weight_of(block, int32_t(group * 64 + row % 64), level, made.matrix.view.absent);
}

// Some of the columns, level by level, each ascending; inputs that are as large as their levels say.
struct Listed {
    std::vector<int32_t> indices;
    std::vector<float> x;
    LevelEnds ends;
};

// level: of all columns; 0: at random, some at none; columns of levels up to `absent` are not listed
Listed random_levels(int64_t columns, int32_t level, int32_t absent = 0) {
    Listed of;
    std::vector<int32_t> levels(columns);
    of.x = normals(columns);
    for (int64_t i = 0; i < columns; i++) {
        levels[i] = level ? level : below(PLANES + 1);
        of.x[i] = std::ldexp(0.5f + uniform(), levels[i] - 4) * (below(2) ? 1.0f : -1.0f);
    }
    for (int32_t l = 1; l <= PLANES; l++) {
        for (int32_t i = 0; i < columns; i++)
            if (levels[i] == l && l > absent) of.indices.push_back(i);
        if (l < PLANES) of.ends.of[l - 1] = (int32_t)of.indices.size();
    }
    return of;
}

// The norm of a product of inputs that are listed with weights as large as their scales allow, of random signs. Padding
// rows have weights, too.
float largest_norm(const Made& made, const Listed& of, const float* x) {
    const Zigzag& m = made.matrix.view;
    int64_t rows = m.pieces ? m.rows / 256 * 256 + 64 * m.pieces : (int64_t)m.bands * BAND_ROWS;
    double sum = 0;
    for (int32_t column : of.indices) {
        for (int64_t row = 0; row < rows; row++) {
            int32_t group;
            const Q6PBlock& block = block_of(made, row, column, &group);
            sum += std::pow(LARGEST * scale_of(block, group) * x[column], 2);
        }
    }
    return (float)std::sqrt(sum);
}

// rows of all spans, padding rows too.
std::vector<float> product(const Kernels& k, const Zigzag& m, const Listed& of) {
    std::vector<float> y((size_t)m.bands * BAND_ROWS + 16, GUARD);
    for (int32_t span = 0; span < spans(&m); span++) {
        float* to = y.data() + (size_t)span * m.span * QUAD_ROWS;
        int32_t count = (int32_t)of.indices.size();
        LevelRanges levels = level_ranges(&of.ends, count);
        GemvWork work = {&m, span, count, of.indices.data(), of.x.data(), to, span % 2 == 0, levels};
        GemvWork next = {&m, spans(&m) - 1 - span, count, of.indices.data(), of.x.data(), to, false, levels};
        int32_t last = planes_span(&m, span).quads, border = below(last + 1);  // in one work item, or in two
        if (border > 0 && border < last) {
            work.end_quad = border;
            k.zigzag_gemv(&work, &next);
            work.first_quad = border, work.end_quad = last;
        }
        k.zigzag_gemv(&work, span % 2 ? &next : nullptr);
    }
    return y;
}

void check_layout(const Made& made) {
    const Zigzag& m = made.matrix.view;
    for (int32_t level = 0; level <= PLANES; level++) {
        Listed of = random_levels(m.columns, level, m.absent);
        std::vector<float> found = product(scalar_kernels, m, of), expected(m.rows);
        for (int32_t l = 1; l <= PLANES; l++) {
            for (int32_t i = level_begin(&of.ends, l); i < level_end(&of.ends, l, (int32_t)of.indices.size()); i++) {
                int32_t column = of.indices[i];
                for (int64_t row = 0; row < m.rows; row++)
                    expected[row] += weight_of(made, row, column, l) * of.x[column];
            }
        }
        found.resize(m.rows);
        check_near(found, expected, "repack", text("planes of %d x %d at level %d", (int)m.rows, (int)m.columns, level),
                   1e-5f, 1e-6f);
    }
}

void check_products(const Kernels& k, const Made& made) {
    const Zigzag& m = made.matrix.view;
    for (int32_t level = 0; level <= PLANES; level++) {
        std::string what = text("planes of %d x %d, span %d, tile %d, level %d, %d elsewhere", (int)m.rows,
                                (int)m.columns, m.span, m.tile, level, m.absent);
        Listed of = random_levels(m.columns, level, m.absent);
        check_near(product(k, m, of), product(scalar_kernels, m, of), k.name, what, FINE,
                   COARSE * largest_norm(made, of, of.x.data()));
        if (!of.indices.empty()) {
            of.x[of.indices[of.indices.size() / 2]] *= 1000;
            check_near(product(k, m, of), product(scalar_kernels, m, of), k.name, what + ", one large", FINE,
                       COARSE * largest_norm(made, of, of.x.data()));
        }
        for (int positions : {1, 3, 8, 9, 50}) {
            if (m.absent) break;
            int32_t count = (int32_t)of.indices.size();
            int64_t x_stride = m.columns + below(3), y_stride = m.rows + 16;
            std::vector<float> x = normals(positions * x_stride), y[2];
            for (int s = 0; s < 2; s++) {
                y[s].assign(positions * y_stride, GUARD);
                for (int32_t quad = 0; quad < quads(&m); quad++) {
                    bool all = level == PLANES && positions % 2;
                    MatmulWork work = {
                        &m,       quad,     count,     all ? nullptr : of.indices.data(), x.data(), y[s].data(),
                        x_stride, y_stride, positions, level_ranges(&of.ends, count)};
                    (s ? k : scalar_kernels).zigzag_matmul(&work);
                }
            }
            float coarse = 0;  // these round inputs, too
            for (int p = 0; p < positions; p++)
                coarse = std::hypot(
                    coarse, (positions > 8 ? MANY : 2 * COARSE) * largest_norm(made, of, x.data() + p * x_stride));
            check_near(y[1], y[0], k.name, what + text(", %d positions", positions), positions > 8 ? MANY : FINE,
                       coarse + 1e-6f);
        }
    }
}

void check_not_finite(const Kernels& k, const Zigzag& m) {
    for (float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (int32_t level = m.absent + 1; level <= PLANES; level++) {
            Listed of = random_levels(m.columns, level, m.absent);
            of.x[below((int)m.columns)] = value;
            std::vector<float> y = product(k, m, of);
            check(std::none_of(y.begin(), y.begin() + m.rows, [](float y) { return std::isfinite(y); }), k.name,
                  text("planes of %d x %d with %f at level %d", (int)m.rows, (int)m.columns, value, level));
        }
    }
}

void check_collect_levels(const Kernels& k) {
    for (int n : {1, 2, 15, 16, 17, 33, 64, 255, 1000}) {
        for (int variant = 0; variant < 4; variant++) {
            bool offset = variant & 1, in_place = variant & 2;
            std::vector<float> x = normals(n), off = normals(n), threshold(n), steps(PLANES);
            float step = 0.3f + uniform();
            for (int l = 0; l < PLANES; l++, step += below(3) ? uniform() : 0) steps[l] = step;
            if (below(3) == 0) steps.back() = std::numeric_limits<float>::infinity();
            for (int i = 0; i < n; i++) {
                threshold[i] = i % 5 ? 0.3f * uniform() : std::numeric_limits<float>::infinity();
                if (i % 7 == 0) x[i] = (offset ? off[i] : 0) + threshold[i] * steps[2] * 1.25f;
            }
            if (n > 3) x[3] = std::numeric_limits<float>::quiet_NaN();
            std::vector<float> d[2] = {x, x};
            std::vector<int32_t> at[2];
            int32_t counts[2][PLANES];
            for (int s = 0; s < 2; s++) {
                d[s].resize(n + 1, GUARD);
                at[s].assign(PLANES * (n + 16) + 1, -7);
                (s ? k : scalar_kernels)
                    .collect_levels(in_place ? d[s].data() : x.data(), offset ? off.data() : nullptr, threshold.data(),
                                    steps.data(), 1.25f, n, 100, d[s].data(), at[s].data(), n + 16, counts[s]);
            }
            std::string what = text("levels of %d, variant %d", n, variant);
            for (int l = 0; l < PLANES; l++) {
                const int32_t* lists[2] = {at[0].data() + l * (n + 16), at[1].data() + l * (n + 16)};
                check(counts[0][l] == counts[1][l], k.name, what + ": count");
                check(std::equal(lists[0], lists[0] + counts[0][l], lists[1]), k.name, what + ": indices");
            }
            check(at[1].back() == -7, k.name, what + ": wrote beyond the indices");
            check(!std::memcmp(d[0].data(), d[1].data(), 4 * (n + 1)), k.name, what + ": d");
        }
    }
}

}  // namespace

void check_plane_kernels(const Kernels& k) {
    int shapes[][5] = {
        // rows, columns, span, tile, whether there is a tail
        {1, 1, 1, 8, 0},       {256, 33, 1, 64, 0},   {257, 31, 4, 64, 0},  {700, 130, 1, 8, 0},
        {1025, 70, 1, 256, 0}, {1300, 300, 2, 64, 0}, {4352, 40, 4, 24, 0}, {2304, 65, 16, 128, 0},
        {3000, 64, 3, 72, 0},  {64, 1, 1, 8, 1},      {447, 33, 1, 64, 1},  {576, 131, 1, 64, 1},
        {959, 130, 4, 256, 1}, {1153, 70, 2, 72, 1},  {2239, 65, 2, 24, 1},
    };
    check_collect_levels(k);
    for (auto& s : shapes) {
        for (int32_t absent = 0; absent < PLANES; absent++) {
            Made made = random_planes(s[0], s[1], s[2], s[3], s[4], absent);
            if (&k == &scalar_kernels) check_layout(made);
            check_products(k, made);
            check_not_finite(k, made.matrix.view);
        }
    }
}

}  // namespace sparsepack
