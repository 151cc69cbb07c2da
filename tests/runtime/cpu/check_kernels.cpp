// Compares every instruction set that this machine runs with the plain one, function by function, on random data.
// Without Python, so that it also runs where only an emulator does (`make test-neon`) and under sanitizers.
//
//     check_kernels [instruction set ...]
#include "check_kernels.h"
#include "layout/repack.h"
#include "layout/rows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

using namespace sparsepack;

namespace {

void check_collect(const Kernels& k) {
    for (int n : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1000, 4099}) {
        for (int variant = 0; variant < 8; variant++) {
            bool per_channel = variant & 1, offset = variant & 2, in_place = variant & 4;
            std::vector<float> x = normals(n), off = normals(n), limit = normals(per_channel ? n : 1);
            for (float& t : limit) t = std::fabs(t);
            for (int i = 0; i < n; i += 7) x[i] = (offset ? off[i] : 0) + limit[per_channel ? i : 0];
            if (n > 3) x[3] = std::numeric_limits<float>::quiet_NaN();
            if (n > 20) x[20] = -std::numeric_limits<float>::infinity();
            std::vector<float> d[2] = {x, x};
            std::vector<int32_t> at[2] = {std::vector<int32_t>(n + 17, -7), std::vector<int32_t>(n + 17, -7)};
            int32_t count[2];
            const Kernels* sets[2] = {&scalar_kernels, &k};
            for (int s = 0; s < 2; s++) {
                d[s].resize(n + 1, GUARD);
                count[s] = sets[s]->collect(in_place ? d[s].data() : x.data(), offset ? off.data() : nullptr,
                                            limit.data(), per_channel, n, 100, d[s].data(), at[s].data());
            }
            std::string what = text("collect of %d, variant %d", n, variant);
            check(count[0] == count[1], k.name, what + ": count");
            check(std::equal(at[0].begin(), at[0].begin() + count[0], at[1].begin()), k.name, what + ": indices");
            check(at[1][n + 16] == -7, k.name, what + ": wrote beyond the indices");
            check(!std::memcmp(d[0].data(), d[1].data(), 4 * (n + 1)), k.name, what + ": d");
        }
    }
}

std::vector<uint8_t> random_blocks(int64_t count, int64_t block_bytes, std::vector<int> scales_at) {
    std::vector<uint8_t> blocks(count * block_bytes);
    for (uint8_t& byte : blocks) byte = (uint8_t)bits();
    for (int64_t i = 0; i < count; i++) {
        for (int at : scales_at) {
            uint16_t scale = half(0.01f * normal());
            std::memcpy(&blocks[i * block_bytes + at], &scale, 2);
        }
    }
    return blocks;
}

ZigzagMatrix random_zigzag(int64_t rows, int64_t columns, int span, int tile) {
    static Pool pool(1);
    std::vector<uint8_t> blocks = random_blocks((rows + 255) / 256 * columns, sizeof(Q4KBlock), {0, 2});
    std::vector<uint8_t> back(blocks.size());
    ZigzagMatrix m = repack_zigzag(blocks.data(), rows, columns, span, tile, pool);
    unpack_zigzag(m.view, back.data(), pool);
    check(blocks == back, "repack", text("zigzag of %d x %d, span %d", (int)rows, (int)columns, span));
    return m;
}

// With a tail, whose pieces have one d and dmin in a column.
ZigzagMatrix random_with_tail(int64_t rows, int64_t columns, int span, int tile) {
    static Pool pool(1);
    std::vector<uint8_t> blocks = random_blocks(rows / 256 * columns, sizeof(Q4KBlock), {0, 2});
    std::vector<uint8_t> tail = random_blocks(tail_blocks(rows, columns), sizeof(Q4KBlock), {0, 2});
    for (int64_t i = 0; tail_pieces(rows) == 3 && i < tail_blocks(rows, columns); i++)
        std::memcpy(&tail[i * sizeof(Q4KBlock)], &tail[i / 3 * 3 * sizeof(Q4KBlock)], 4);
    ZigzagMatrix m = repack_zigzag(blocks.data(), rows, columns, span, tile, pool, tail.data());
    int64_t chunks = rows / 256 * 8 + tail_pieces(rows) * 2, quads = (rows / 256 + 4) / 4;
    check(zigzag_bytes(&m.view) == columns * (quads * 64 + chunks * 16), "repack", text("bytes of %d rows", (int)rows));
    return m;
}

// `count` of the columns, ascending.
std::vector<int32_t> some_of(int columns, int count) {
    std::vector<int32_t> indices;
    for (int32_t i = 0; i < columns; i++)
        if (below(columns - i) < count - (int)indices.size()) indices.push_back(i);
    return indices;
}

void check_gemv(const Kernels& k, const Zigzag& m, int count) {
    std::vector<float> x = normals(m.columns);
    x[below((int)m.columns)] *= 1000;
    std::vector<int32_t> indices = some_of((int)m.columns, count);
    for (int32_t span = 0; span < spans(&m); span++) {
        size_t rows = (size_t)span_bands(&m, span) * BAND_ROWS;
        std::vector<float> y[2];
        for (int s = 0; s < 2; s++) {
            y[s].assign(rows + 16, GUARD);
            GemvWork work = {&m, span, count, indices.data(), x.data(), y[s].data(), span % 2 == 0};
            GemvWork next = {&m, spans(&m) - 1 - span, count, indices.data(), x.data(), y[s].data(), false};
            (s ? k : scalar_kernels).zigzag_gemv(&work, span % 2 ? &next : nullptr);
        }
        check_near(
            y[1], y[0], k.name,
            text("gemv of %d x %d, span %d, tile %d, count %d", (int)m.rows, (int)m.columns, m.span, m.tile, count));
    }
}

// An input that is not finite must show in every row; nothing else says that a model went wrong.
void check_not_finite(const Kernels& k, const Zigzag& m, float value) {
    std::vector<float> x = normals(m.columns), y((size_t)m.bands * BAND_ROWS);
    std::vector<int32_t> indices(m.columns);
    for (int32_t i = 0; i < m.columns; i++) indices[i] = i;
    x[below((int)m.columns)] = value;
    auto none_finite = [&] {
        return std::none_of(y.begin(), y.begin() + m.rows, [](float value) { return std::isfinite(value); });
    };
    for (int32_t span = 0; span < spans(&m); span++) {
        float* to = y.data() + (size_t)span * m.span * QUAD_ROWS;
        GemvWork work = {&m, span, (int32_t)m.columns, indices.data(), x.data(), to, span % 2 == 1};
        k.zigzag_gemv(&work, nullptr);
    }
    check(none_finite(), k.name, text("gemv of %d x %d with %f", (int)m.rows, (int)m.columns, value));
    std::fill(y.begin(), y.end(), 0.0f);
    for (int32_t quad = 0; quad < quads(&m); quad++) {
        MatmulWork work = {&m, quad, (int32_t)m.columns, nullptr, x.data(), y.data(), m.columns, m.rows, 1};
        k.zigzag_matmul(&work);
    }
    check(none_finite(), k.name, text("matmul of %d x %d with %f", (int)m.rows, (int)m.columns, value));
}

// count: of the columns that are active; -1: all, without a list.
void check_zigzag_matmul(const Kernels& k, const Zigzag& m, int positions, int count) {
    int64_t x_stride = m.columns + below(3), y_stride = m.rows + 16;
    std::vector<int32_t> indices = some_of((int)m.columns, std::max(0, count));
    std::vector<float> x = normals(positions * x_stride), y[2];
    for (int s = 0; s < 2; s++) {
        y[s].assign(positions * y_stride, GUARD);
        for (int32_t quad = 0; quad < quads(&m); quad++) {
            MatmulWork work = {&m,
                               quad,
                               count < 0 ? (int32_t)m.columns : count,
                               count < 0 ? nullptr : indices.data(),
                               x.data(),
                               y[s].data(),
                               x_stride,
                               y_stride,
                               positions};
            (s ? k : scalar_kernels).zigzag_matmul(&work);
        }
    }
    check_near(y[1], y[0], k.name,
               text("matmul of %d x %d, span %d, tile %d, %d positions, %d active", (int)m.rows, (int)m.columns, m.span,
                    m.tile, positions, count),
               // Units follow from the largest weights that blocks can hold, here 10: one alone may be far smaller.
               positions > 8 ? MANY : NORMWISE, positions > 8 ? 1e-3f * std::sqrt((float)positions) : 1e-12f);
}

void check_zigzag(const Kernels& k) {
    int shapes[][5] = {
        // rows, columns, span, tile, whether there is a tail
        {1, 1, 1, 8, 0},        {256, 33, 1, 64, 0},   {257, 31, 4, 64, 0},  {700, 130, 1, 8, 0},
        {1025, 70, 1, 256, 0},  {1300, 300, 2, 64, 0}, {4352, 90, 4, 24, 0}, {4352, 65, 16, 128, 0},
        {2048, 257, 2, 256, 0}, {3000, 64, 3, 72, 0},  {64, 1, 1, 8, 1},     {447, 33, 1, 64, 1},
        {576, 131, 1, 64, 1},   {959, 130, 4, 256, 1}, {1153, 70, 2, 72, 1}, {4225, 65, 4, 24, 1},
        {1215, 40, 1, 8, 1},    {447, 1, 1, 64, 1},
    };
    for (auto& s : shapes) {
        ZigzagMatrix m = (s[4] ? random_with_tail : random_zigzag)(s[0], s[1], s[2], s[3]);
        for (int count : {0, 1, 2, 3, 5, 8, 9, 33, 63, 64, 65, 129, s[1] - 1, s[1]})
            if (count >= 0 && count <= s[1]) check_gemv(k, m.view, count);
        for (int positions : {1, 2, 3, 4, 5, 8, 9, 17, 33})
            for (int count : {-1, 0, s[1] / 2, s[1]}) check_zigzag_matmul(k, m.view, positions, count);
        for (float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
            check_not_finite(k, m.view, value);
    }
}

void check_rows(const Kernels& k) {
    static Pool pool(1);
    int shapes[][2] = {{1, 256}, {31, 512}, {32, 256}, {33, 768}, {200, 1024}};
    for (int32_t type : {F32, F16, BF16, Q4_K, Q6_K, Q8_0}) {
        for (auto& shape : shapes) {
            int64_t rows = shape[0], columns = shape[1], bytes = row_bytes(type, columns);
            bool floats = block_columns(type) == 1;
            if (floats) columns -= below(7);
            if (type == Q8_0) columns -= 32 * below(8);
            bytes = row_bytes(type, columns);
            std::vector<uint8_t> data;
            if (type == Q4_K) data = random_blocks(rows * columns / 256, sizeof(Q4KBlock), {0, 2});
            if (type == Q6_K) data = random_blocks(rows * columns / 256, sizeof(Q6KBlock), {208});
            if (type == Q8_0) data = random_blocks(rows * columns / Q8_0_COLUMNS, sizeof(Q80Block), {0});
            if (floats) data.resize(rows * bytes);
            for (int64_t i = 0; floats && i < rows * columns; i++) {
                float value = normal();
                uint32_t word;
                std::memcpy(&word, &value, 4);
                if (type == F16) word = half(value);
                if (type == BF16) word >>= 16;
                std::memcpy(&data[i * bytes / columns], &word, bytes / columns);
            }
            RowsMatrix m = repack_rows(data.data(), rows, columns, type, pool);
            std::vector<uint8_t> back(data.size());
            unpack_rows(m.view, back.data(), pool);
            check(data == back, "repack", text("type %d", type));
            Rows views[2] = {m.view, rows_in_place(data.data(), rows, columns, type)};
            for (const Rows& view : views) {
                for (int64_t row : {int64_t(0), rows / 2, rows - 1}) {
                    std::vector<float> y[2];
                    for (int s = 0; s < 2; s++) {
                        y[s].assign(columns + 16, GUARD);
                        (s ? k : scalar_kernels).decode_row(&view, row, y[s].data());
                    }
                    check_near(y[1], y[0], k.name, text("a row of type %d", view.type), 1e-6f);
                }
            }
            for (int positions : {1, 2, 3, 4, 5, 9, 40}) {
                int64_t x_stride = columns + below(3), y_stride = rows + 3, middle = rows > 64 ? 64 : rows;
                std::vector<float> x = normals(positions * x_stride), y[2];
                for (int s = 0; s < 2; s++) {
                    y[s].assign(positions * y_stride, GUARD);
                    auto product = (s ? k : scalar_kernels).rows_matmul;
                    product(&views[0], 0, middle, x.data(), x_stride, positions, y[s].data(), y_stride);
                    if (middle < rows)
                        product(&views[0], middle, rows, x.data(), x_stride, positions, y[s].data(), y_stride);
                }
                check_near(y[1], y[0], k.name,
                           text("rows of type %d, %d x %d, %d positions", type, (int)rows, (int)columns, positions),
                           positions > 8 ? MANY : NORMWISE);
                // The plain kernel itself: tiles and the file's bytes are the same matrix.
                y[1].assign(positions * y_stride, GUARD);
                scalar_kernels.rows_matmul(&views[1], 0, rows, x.data(), x_stride, positions, y[1].data(), y_stride);
                check_near(y[1], y[0], "scalar", text("rows of type %d in place", type));
            }
        }
    }
}

void check_elementwise(const Kernels& k) {
    for (int n : {1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 1000}) {
        std::vector<float> x = normals(n, 2), weight = normals(n), y[2];
        for (int s = 0; s < 2; s++) {
            y[s].assign(n + 16, GUARD);
            (s ? k : scalar_kernels).rms_norm(x.data(), weight.data(), n, 1e-5f, y[s].data());
        }
        check_near(y[1], y[0], k.name, text("rms_norm of %d", n), 1e-5f);

        std::vector<float> cos = normals(n), sin = normals(n), head = normals(2 * n);
        for (int s = 0; s < 2; s++) {
            y[s] = head;
            y[s].resize(2 * n + 16, GUARD);
            (s ? k : scalar_kernels).rotate(y[s].data(), cos.data(), sin.data(), n);
        }
        check_near(y[1], y[0], k.name, text("rotate of %d", n), 1e-6f);

        for (int32_t activation : {SILU, RELU, GELU, GELU_TANH, CLAMPED_SWIGLU, RELU2}) {
            std::vector<float> gate = normals(n, 4);
            gate[0] = n % 2 ? 90.0f : -90.0f;
            for (int s = 0; s < 2; s++) {
                y[s] = gate;
                y[s].resize(n + 16, GUARD);
                (s ? k : scalar_kernels).gate(activation, y[s].data(), weight.data(), n, y[s].data());
            }
            check_near(y[1], y[0], k.name, text("gate %d of %d", activation, n), 1e-5f, 1e-6f);
        }

        for (int variant = 0; variant < 4; variant++) {
            int parts = 1 + below(9);
            std::vector<float> each = normals(parts * (n + 5)), bias = normals(n);
            for (int s = 0; s < 2; s++) {
                y[s] = x;
                y[s].resize(n + 16, GUARD);
                (s ? k : scalar_kernels)
                    .sum(each.data(), n + 5, parts, variant & 1 ? bias.data() : nullptr, n, variant >> 1, y[s].data());
            }
            check_near(y[1], y[0], k.name, text("sum of %d x %d, variant %d", parts, n, variant), 1e-6f);
        }
    }
}

void check_states(const Kernels& k, void (*Kernels::*step)(const DeltaWork*), const char* what) {
    for (int keys : {1, 3, 8, 128}) {
        for (int values : {1, 7, 8, 12, 16, 17, 33, 64, 100, 128}) {
            std::vector<float> q = normals(keys, 0.2f), key = normals(keys, 0.2f), v = normals(values), y[2], state[2];
            std::vector<float> before = normals(size_t(keys) * values);
            for (int s = 0; s < 2; s++) {
                state[s] = before;
                state[s].resize(before.size() + 16, GUARD);
                y[s].assign(values + 16, GUARD);
                for (int token = 0; token < 3; token++) {
                    DeltaWork work = {q.data(), key.data(), v.data(),        0.9f,       0.6f,
                                      keys,     values,     state[s].data(), y[s].data()};
                    ((s ? k : scalar_kernels).*step)(&work);
                }
            }
            check_near(y[1], y[0], k.name, text("%s of %d x %d", what, keys, values), 1e-4f);
            check_near(state[1], state[0], k.name, text("%s of %d x %d: state", what, keys, values), 1e-5f);
        }
    }
}

void check_halves(const Kernels& k) {
    std::vector<float> x = normals(1000);
    for (float size : {1e-8f, 1e-6f, 1e-4f, 1e4f, 6e4f, 1e6f})
        for (int i = 0; i < 333; i++) x.push_back(size * normal());
    for (float special : {0.0f, -0.0f, 65504.0f, 65519.0f, 65520.0f, 5.9604645e-8f, 2.9802322e-8f, 2.9802326e-8f})
        x.push_back(special);
    for (int i = 0; i < 5000; i++) {  // half way between two halves, and around it
        uint32_t word = (bits() & 0x1fffe000u) + 0x30000000u + 0x1000u + (uint32_t)below(3) - 1;
        float value;
        std::memcpy(&value, &word, 4);
        x.push_back(value);
    }
    x.push_back(std::numeric_limits<float>::infinity());
    for (size_t n : {size_t(1), size_t(7), size_t(16), size_t(33), x.size()}) {
        std::vector<uint16_t> y[2];
        for (int s = 0; s < 2; s++) {
            y[s].assign(n + 16, 7);
            (s ? k : scalar_kernels).to_half(x.data(), (int32_t)n, y[s].data());
        }
        check(y[0] == y[1], k.name, text("to_half of %d", (int)n));
    }
    float nan = std::numeric_limits<float>::quiet_NaN();
    uint16_t h;
    k.to_half(&nan, 1, &h);
    check((h & 0x7fff) > 0x7c00, k.name, "to_half of NaN");
}

void check_set(const Kernels& k) {
    int before = checks;
    check_collect(k);
    check_zigzag(k);
    check_rows(k);
    check_elementwise(k);
    check_halves(k);
    check_states(k, &Kernels::delta_rule, "delta rule");
    check_states(k, &Kernels::state_space, "state-space model");
    check_attention_kernels(k);
    check_plane_kernels(k);
    check_neuron_kernels(k);
    check_cold_worker(k);
    std::printf("%s: %d checks\n", k.name, checks - before);
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> sets(argv + 1, argv + argc);
    if (sets.empty()) sets = instruction_sets();
    for (const std::string& set : sets) check_set(kernels(set));
    if (failures) std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
