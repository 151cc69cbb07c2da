// The operations of runtime/cpu/operations.py on arrays that Python allocated and checked for kind; sizes are checked
// here, so that no call can read or write beyond an array.
#include "decoder/kv_cache.h"
#include "isa/dispatch.h"
#include "layout/repack.h"
#include "memory/buffer.h"
#include "threads/products.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

template <class T, int dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Released = nb::call_guard<nb::gil_scoped_release>;

void expect(bool met, const char* what) {
    if (!met) throw std::invalid_argument(what);
}

void expect_tile(int32_t tile) {
    expect(tile >= 8 && tile <= MAX_TILE && tile % 8 == 0, "tile: expected a multiple of 8 up to 256");
}

// The kernels of one instruction set and the threads that run them; one call at a time.
class Operations {
public:
    Operations(const std::string& instruction_set, int threads)
        : kernels_(kernels(instruction_set)),
          int8_(encoders(instruction_set).int8),
          pool_((expect(threads > 0, "threads: expected at least 1"), threads)) {}

    ZigzagMatrix load_zigzag(Array<const uint8_t, 3> blocks, int64_t rows, int32_t span, int32_t tile,
                             std::optional<Array<const uint8_t, 2>> tail,
                             std::optional<Array<const float, 1>> row_scale, int32_t block, int32_t absent) {
        expect(absent >= 0 && absent < (block == Q6_P ? PLANES : 1), "absent: expected fewer planes than there are");
        int64_t columns = blocks.shape(1), superblock = expect_block(block);
        expect((int64_t)blocks.shape(2) == superblock, "blocks: expected [bands, columns, superblock bytes]");
        expect_matrix(blocks.shape(0), rows, columns, span, tile, bool(tail));
        expect(
            !tail || ((int64_t)tail->shape(0) == tail_blocks(rows, columns) && (int64_t)tail->shape(1) == superblock),
            "tail: expected [superblocks, superblock bytes]");
        expect(!row_scale || (int64_t)row_scale->shape(0) == rows, "row_scale: expected [rows]");
        std::lock_guard<std::mutex> lock(mutex_);
        auto made = repack_zigzag(blocks.data(), rows, columns, span, tile, pool_, tail ? tail->data() : nullptr, block,
                                  absent);
        if (row_scale) {
            made.row_scale.assign(row_scale->data(), row_scale->data() + rows);
            made.row_scale.resize((size_t)made.view.bands * BAND_ROWS);
            made.view.row_scale = made.row_scale.data();  // which moves with the vector
        }
        return made;
    }

    ExpertsMatrix load_experts(Array<const uint8_t, 4> blocks, int64_t rows, int32_t span, int32_t tile,
                               std::optional<Array<const uint8_t, 3>> tail, int32_t block) {
        int64_t columns = blocks.shape(2), superblock = expect_block(block);
        expect((int64_t)blocks.shape(3) == superblock, "blocks: expected [experts, bands, columns, superblock bytes]");
        expect(blocks.shape(0) > 0, "no experts");
        expect_matrix(blocks.shape(1), rows, columns, span, tile, bool(tail));
        expect(!tail || (tail->shape(0) == blocks.shape(0) && (int64_t)tail->shape(1) == tail_blocks(rows, columns) &&
                         (int64_t)tail->shape(2) == superblock),
               "tail: expected [experts, superblocks, superblock bytes]");
        std::lock_guard<std::mutex> lock(mutex_);
        return repack_experts(blocks.data(), blocks.shape(0), rows, columns, span, tile, pool_,
                              tail ? tail->data() : nullptr, block);
    }

    void unpack_zigzag(const ZigzagMatrix& m, Array<uint8_t, 3> blocks) {
        expect(m.view.pieces == 0 && m.view.block == Q4_K, "matrix with a tail, or not of Q4_K");
        expect((int64_t)blocks.shape(0) == m.view.bands && (int64_t)blocks.shape(1) == m.view.columns &&
                   blocks.shape(2) == sizeof(Q4KBlock),
               "blocks: expected [bands, columns, 144]");
        std::lock_guard<std::mutex> lock(mutex_);
        sparsepack::unpack_zigzag(m.view, blocks.data(), pool_);
    }

    RowsMatrix load_rows(Array<const uint8_t, 2> data, int64_t columns, int32_t type) {
        expect(block_columns(type) > 0, "type: no kernels for rows of that type");
        expect(data.shape(0) > 0 && columns > 0, "matrix without rows or columns");
        expect(columns % block_columns(type) == 0, "columns: expected whole blocks");
        expect((int64_t)data.shape(1) == row_bytes(type, columns), "data: expected [rows, bytes per row]");
        std::lock_guard<std::mutex> lock(mutex_);
        return repack_rows(data.data(), data.shape(0), columns, type, pool_);
    }

    void unpack_rows(const RowsMatrix& m, Array<uint8_t, 2> data) {
        expect(
            (int64_t)data.shape(0) == m.view.rows && (int64_t)data.shape(1) == row_bytes(m.view.type, m.view.columns),
            "data: expected [rows, bytes per row]");
        std::lock_guard<std::mutex> lock(mutex_);
        sparsepack::unpack_rows(m.view, data.data(), pool_);
    }

    int32_t collect(Array<const float, 1> x, std::optional<Array<const float, 1>> offset,
                    Array<const float, 1> threshold, int32_t base, Array<float, 1> d, Array<int32_t, 1> indices) {
        size_t n = x.shape(0);
        bool per_channel = threshold.shape(0) != 1;
        expect(!per_channel || threshold.shape(0) == n, "threshold: expected [1] or [columns]");
        expect(!offset || offset->shape(0) == n, "offset: expected [columns]");
        expect(d.shape(0) == n && indices.shape(0) >= n + 16, "d: expected [columns]; indices: [columns + 16]");
        return kernels_.collect(x.data(), offset ? offset->data() : nullptr, threshold.data(), per_channel, (int32_t)n,
                                base, d.data(), indices.data());
    }

    void zigzag_gemv(const ZigzagMatrix& m, Array<const float, 1> x, Array<const int32_t, 1> indices, int32_t count,
                     Array<float, 1> y) {
        expect((int64_t)x.shape(0) == m.view.columns, "x: expected [columns]");
        expect((int64_t)y.shape(0) == m.view.rows, "y: expected [rows]");
        expect_ascending(indices, count, m.view.columns);
        std::lock_guard<std::mutex> lock(mutex_);
        gemv(kernels_, pool_, m.view, x.data(), {indices.data(), count}, products_, y.data());
    }

    // indices: columns of level 1, then those of level 2, ..., each ascending; ends: where each level ends, but the last.
    void planes_gemv(const ZigzagMatrix& m, Array<const float, 1> x, Array<const int32_t, 1> indices,
                     Array<const int32_t, 1> ends, Array<float, 1> y) {
        expect(m.view.block == Q6_P, "matrix without planes");
        expect((int64_t)x.shape(0) == m.view.columns, "x: expected [columns]");
        expect((int64_t)y.shape(0) == m.view.rows, "y: expected [rows]");
        expect(ends.shape(0) == PLANES - 1, "ends: expected [4]");
        Active active = {indices.data(), (int32_t)indices.shape(0)};
        for (int32_t i = 0; i < PLANES - 1; i++) active.ends.of[i] = ends.data()[i];
        for (int32_t level = 1; level <= PLANES; level++) {
            int32_t first = level_begin(&active.ends, level), last = level_end(&active.ends, level, active.count);
            expect(0 <= first && first <= last && last <= active.count, "ends: expected ascending numbers");
            expect_ascending(indices.data() + first, last - first, m.view.columns);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        gemv(kernels_, pool_, m.view, x.data(), active, products_, y.data());
    }

    void zigzag_matmul(const ZigzagMatrix& m, Array<const float, 2> x, Array<float, 2> y) { product(m.view, x, y); }
    void rows_matmul(const RowsMatrix& m, Array<const float, 2> x, Array<float, 2> y) { product(m.view, x, y); }

    NeuronMatrix load_neurons(Array<const uint8_t, 2> records, bool gated) {
        Neurons one = {nullptr, 0, 1, !gated};
        int64_t bands = int64_t(records.shape(1)) / neuron_file_bytes(&one);
        expect(records.shape(0) > 0 && bands > 0 && int64_t(records.shape(1)) == bands * neuron_file_bytes(&one),
               "records: expected [neurons, a multiple of 288 bytes, or of 144 without gates]");
        expect(bands <= MOST_NEURON_BANDS, "records: wider than 16384 channels");
        std::lock_guard<std::mutex> lock(mutex_);
        return repack_neurons(records.data(), int64_t(records.shape(0)), int32_t(bands), pool_, !gated);
    }

    void unpack_neurons(const NeuronMatrix& m, Array<uint8_t, 2> records) {
        expect((int64_t)records.shape(0) == m.view.count && (int64_t)records.shape(1) == neuron_file_bytes(&m.view),
               "records: expected [neurons, bytes of a record]");
        std::lock_guard<std::mutex> lock(mutex_);
        sparsepack::unpack_neurons(m.view, records.data(), pool_);
    }

    void neuron_ffn(const NeuronMatrix& m, Array<const float, 1> x, Array<const float, 1> gate,
                    Array<const int32_t, 1> indices, int32_t count, Array<float, 1> y) {
        expect((int64_t)x.shape(0) == neuron_hidden(&m.view) && y.shape(0) == x.shape(0), "x, y: expected [hidden]");
        expect((int64_t)gate.shape(0) == m.view.count, "gate: expected [neurons]");
        expect_ascending(indices, count, m.view.count);
        std::lock_guard<std::mutex> lock(mutex_);
        sparsepack::neuron_ffn(kernels_, pool_, m.view, x.data(), gate.data(), {indices.data(), count}, products_,
                               y.data());
    }

    void neuron_matmul(const NeuronMatrix& m, Array<const float, 2> x, Array<const float, 2> gate, Array<float, 2> y) {
        expect((int64_t)x.shape(1) == neuron_hidden(&m.view), "x: expected [positions, hidden]");
        expect(gate.shape(0) == x.shape(0) && (int64_t)gate.shape(1) == m.view.count, "gate: [positions, neurons]");
        expect(y.shape(0) == x.shape(0) && y.shape(1) == x.shape(1), "y: expected [positions, hidden]");
        std::lock_guard<std::mutex> lock(mutex_);
        if (!x.shape(0)) return;
        pool_.run([&](int) {
            share_neuron_matmul(kernels_, pool_, m.view, x.data(), gate.data(), int32_t(x.shape(0)), y.data());
        });
    }

    GateMatrix load_gates(Array<const uint8_t, 2> rows) {
        int64_t bands = int64_t(rows.shape(1)) / int64_t(sizeof(Q4KBlock));
        expect(rows.shape(0) > 0 && bands > 0 && int64_t(rows.shape(1)) == bands * int64_t(sizeof(Q4KBlock)),
               "gates: expected [neurons, a multiple of 144 bytes]");
        expect(bands <= MOST_NEURON_BANDS, "gates: wider than 16384 channels");
        std::lock_guard<std::mutex> lock(mutex_);
        return repack_gates(rows.data(), int64_t(rows.shape(0)), int32_t(bands), pool_);
    }

    void gate_products(const GateMatrix& m, Array<const float, 2> x, Array<float, 2> y) {
        expect((int64_t)x.shape(1) == m.view.bands * BAND_ROWS, "x: expected [positions, hidden]");
        expect((int64_t)y.shape(1) == m.view.count && y.shape(0) == x.shape(0), "y: expected [positions, neurons]");
        std::lock_guard<std::mutex> lock(mutex_);
        if (!x.shape(0)) return;
        sparsepack::gate_products(kernels_, pool_, m.view, x.data(), int32_t(x.shape(0)), products_, y.data());
    }

    // The queries in qkv are normed and rotated in place, as `attend` takes them.
    void append(KvCache& cache, int layer, Array<float, 2> qkv) {
        expect_positions(cache, layer, qkv.shape(0), qkv.shape(1));
        std::lock_guard<std::mutex> lock(mutex_);
        int64_t count = int64_t(qkv.shape(0)), threads = pool_.threads();
        pool_.run([&](int thread) {
            cache.append_rows(layer, qkv.data(), int32_t(count * thread / threads),
                              int32_t(count * (thread + 1) / threads));
        });
    }

    void attend(const KvCache& cache, int layer, Array<const float, 2> qkv, Array<float, 2> y, bool sparse) {
        expect_positions(cache, layer, qkv.shape(0), qkv.shape(1));
        expect(y.shape(0) == qkv.shape(0) && (int64_t)y.shape(1) == cache.shape(layer).q_rows(),
               "y: expected [positions, heads * head_dim]");
        std::lock_guard<std::mutex> lock(mutex_);
        scratch_.resize(pool_.threads());
        for (Buffer<float>& own : scratch_) own.grow(cache.scratch(KvCache::BLOCK));  // a region must not throw
        pool_.run([&](int thread) {
            int32_t count = int32_t(qkv.shape(0));
            pool_.share(cache.attend_items(layer, count), [&](int item, int) {
                cache.attend_item(item, layer, qkv.data(), 0, count, y.data(), scratch_[thread].data(), sparse);
            });
        });
    }

    // RoundWork by addresses, since an array would take Python longer than a row takes here; y has the size of x.
    void round_rows(uintptr_t x, bool bfloats, uintptr_t y, uintptr_t scales, int64_t rows, int64_t columns,
                    float steps, bool fp8) {
        expect(x && y && rows >= 0 && columns >= 0, "x, y, rows, columns: expected addresses and sizes");
        auto some = [&](int64_t first, int64_t count) {
            int64_t from = first * columns;
            int8_.round_rows({bfloats ? nullptr : (const float*)x + from, bfloats ? (const uint16_t*)x + from : nullptr,
                              (float*)y + from, scales ? (float*)scales + first : nullptr, count, columns, steps, fp8});
        };
        share_rows(rows, columns, some);
    }

    // RoundWork to int8, q [rows, stride].
    void int8_rows(uintptr_t x, bool bfloats, uintptr_t q, uintptr_t scales, int64_t rows, int64_t columns,
                   int64_t stride) {
        expect(x && q && scales && rows >= 0 && columns >= 0 && columns <= stride, "x, q, scales: expected addresses");
        expect(stride <= MOST_INT8_COLUMNS, "columns: more than a sum of 32 bits holds");
        share_rows(rows, columns, [&](int64_t first, int64_t count) {
            int64_t from = first * columns;
            int8_.bytes_of_rows(
                {bfloats ? nullptr : (const float*)x + from, bfloats ? (const uint16_t*)x + from : nullptr, nullptr,
                 (float*)scales + first, count, columns, 127, false},
                (int8_t*)q + first * stride, stride);
        });
    }

    // ScaleWork by addresses; bias may be 0.
    void scale_sums(uintptr_t x_scales, uintptr_t scales, uintptr_t bias, uintptr_t y, int64_t tokens, int64_t rows) {
        expect(x_scales && scales && y && tokens >= 0 && rows >= 0, "x_scales, scales, y: expected addresses");
        share_rows(tokens, rows, [&](int64_t first, int64_t count) {
            int8_.scale_sums({(const float*)x_scales, (const float*)scales, (const float*)bias, (float*)y, rows, first,
                              first + count});
        });
    }

    // Int8Work of inputs as round_rows takes them, weights [rows, stride], and the other addresses; bias may be 0.
    void int8_linear(uintptr_t x, bool bfloats, uintptr_t weights, uintptr_t scales, uintptr_t bias, uintptr_t y,
                     int64_t tokens, int64_t rows, int64_t columns, int64_t stride) {
        expect(x && weights && scales && y, "x, weights, scales, y: expected addresses");
        expect(tokens > 0 && rows > 0 && columns > 0 && columns <= stride && stride % INT8_STEP == 0,
               "expected sizes, and weights padded to whole steps");
        expect(stride <= MOST_INT8_COLUMNS, "columns: more than a sum of 32 bits holds");
        std::lock_guard<std::mutex> lock(mutex_);
        words_.grow(tokens * stride);
        word_scales_.grow(tokens);
        auto round = [&](int64_t first, int64_t count) {
            int64_t from = first * columns;
            int8_.words_of_rows(
                {bfloats ? nullptr : (const float*)x + from, bfloats ? (const uint16_t*)x + from : nullptr, nullptr,
                 word_scales_.data() + first, count, columns, 127, false},
                words_.data() + first * stride, stride);
        };
        Int8Work work = {words_.data(),
                         word_scales_.data(),
                         (const int8_t*)weights,
                         (const float*)scales,
                         (const float*)bias,
                         (float*)y,
                         tokens,
                         rows,
                         stride,
                         0,
                         rows};
        constexpr int64_t ALONE = 1 << 20, ROWS_AT_ONCE = 32;  // products, in some tens of microseconds
        if (tokens * rows * stride < ALONE || pool_.threads() == 1) {
            round(0, tokens);
            return int8_.matmul(work);
        }
        int64_t threads = pool_.threads(), each = (tokens + threads - 1) / threads;
        pool_.run([&](int thread) {
            int64_t first = std::min(thread * each, tokens);
            round(first, std::min(each, tokens - first));
            pool_.barrier();
            pool_.share((int)((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE), [&](int part, int) {
                Int8Work some = work;
                some.first_row = part * ROWS_AT_ONCE;
                some.last_row = std::min(some.first_row + ROWS_AT_ONCE, rows);
                int8_.matmul(some);
            });
        });
    }

private:
    // some(first, count) for all rows of so many values: by the threads where there are many.
    template <class Some>
    void share_rows(int64_t rows, int64_t columns, const Some& some) {
        constexpr int64_t AT_ONCE = 1 << 16;  // values, in some ten microseconds: as long as threads take to wake
        int64_t each = std::max<int64_t>(AT_ONCE / std::max<int64_t>(columns, 1), 1), parts = (rows + each - 1) / each;
        if (parts <= 2) return some(0, rows);
        std::lock_guard<std::mutex> lock(mutex_);
        pool_.run([&](int) {
            pool_.share((int)parts, [&](int part, int) { some(part * each, std::min(each, rows - part * each)); });
        });
    }

    // Bytes of a superblock of that type.
    static int64_t expect_block(int32_t block) {
        int64_t bytes = zigzag_block(block).superblock;
        expect(bytes > 0, "block: no kernels for blocks of that type");
        return bytes;
    }

    static void expect_matrix(size_t bands, int64_t rows, int64_t columns, int32_t span, int32_t tile, bool has_tail) {
        expect(rows > 0 && columns > 0, "matrix without rows or columns");
        expect(!has_tail || tail_pieces(rows) > 0, "tail: the rows have none");
        expect((int64_t)bands == (has_tail ? rows : rows + BAND_ROWS - 1) / BAND_ROWS,
               "blocks: too few or too many bands");
        expect(span >= 1 && span <= MAX_SPAN, "span: expected 1 to 16");
        expect_tile(tile);
    }

    static void expect_ascending(const Array<const int32_t, 1>& indices, int32_t count, int64_t most) {
        expect(count >= 0 && (size_t)count <= indices.shape(0), "count: expected 0 to the number of indices");
        expect_ascending(indices.data(), count, most);
    }
    static void expect_ascending(const int32_t* indices, int32_t count, int64_t most) {
        for (int32_t i = 0; i < count; i++) {
            int32_t index = indices[i], before = i ? indices[i - 1] : -1;
            expect(index > before && index < most, "indices: expected ascending numbers of columns or neurons");
        }
    }

    static void expect_positions(const KvCache& cache, int layer, size_t positions, size_t rows) {
        expect(layer >= 0 && layer < cache.layers(), "layer: the cache has no such");
        expect((int64_t)rows == cache.shape(layer).qkv_rows(),
               "qkv: expected [positions, (heads + 2 kv_heads) * head_dim]");
        expect(cache.length() + (int64_t)positions <= cache.shape().context, "positions: more than there is room for");
    }

    template <class Matrix>
    void product(const Matrix& m, const Array<const float, 2>& x, const Array<float, 2>& y) {
        expect((int64_t)x.shape(1) == m.columns, "x: expected [positions, columns]");
        expect((int64_t)y.shape(1) == m.rows && y.shape(0) == x.shape(0), "y: expected [positions, rows]");
        std::lock_guard<std::mutex> lock(mutex_);
        if (!x.shape(0)) return;
        pool_.run([&](int) { share_matmul(kernels_, pool_, m, x.data(), (int32_t)x.shape(0), y.data()); });
    }

    const Kernels& kernels_;
    Int8Kernels int8_;
    Pool pool_;
    std::mutex mutex_;
    ProductScratch products_;
    std::vector<Buffer<float>> scratch_;
    Buffer<int16_t> words_;
    Buffer<float> word_scales_;
};

}  // namespace

void bind_operations(nb::module_& m) {
    m.def("instruction_sets", &instruction_sets);
    m.def(
        "give_back", [](Array<const uint8_t, 1> bytes) { return give_back(bytes.data(), bytes.shape(0)); }, "bytes"_a,
        Released());
    nb::class_<ExpertsMatrix>(m, "ExpertsMatrix")
        .def_prop_ro("experts", [](const ExpertsMatrix& m) { return m.views.size(); })
        .def_prop_ro("bytes", [](const ExpertsMatrix& m) { return m.memory.bytes(); });
    nb::class_<ZigzagMatrix>(m, "ZigzagMatrix")
        .def_prop_ro("rows", [](const ZigzagMatrix& m) { return m.view.rows; })
        .def_prop_ro("columns", [](const ZigzagMatrix& m) { return m.view.columns; })
        .def_prop_ro("bands", [](const ZigzagMatrix& m) { return m.view.bands; })
        .def_prop_ro("span", [](const ZigzagMatrix& m) { return m.view.span; })
        .def_prop_rw(
            "tile", [](const ZigzagMatrix& m) { return m.view.tile; },
            [](ZigzagMatrix& m, int32_t tile) {
                expect_tile(tile);
                m.view.tile = tile;
            })
        .def_prop_ro("bytes", [](const ZigzagMatrix& m) { return m.memory.bytes() + 4 * m.row_scale.size(); });
    nb::class_<RowsMatrix>(m, "RowsMatrix")
        .def_prop_ro("rows", [](const RowsMatrix& m) { return m.view.rows; })
        .def_prop_ro("columns", [](const RowsMatrix& m) { return m.view.columns; })
        .def_prop_ro("bytes", [](const RowsMatrix& m) { return m.memory.bytes(); });
    nb::class_<NeuronMatrix>(m, "NeuronMatrix")
        .def_prop_ro("neurons", [](const NeuronMatrix& m) { return m.view.count; })
        .def_prop_ro("hidden", [](const NeuronMatrix& m) { return neuron_hidden(&m.view); })
        .def_prop_ro("address", [](const NeuronMatrix& m) { return reinterpret_cast<uintptr_t>(m.view.data); })
        .def_prop_ro("bytes", [](const NeuronMatrix& m) { return m.memory.bytes(); });
    nb::class_<GateMatrix>(m, "GateMatrix")
        .def_prop_ro("neurons", [](const GateMatrix& m) { return m.view.count; })
        .def_prop_ro("hidden", [](const GateMatrix& m) { return m.view.bands * BAND_ROWS; })
        .def_prop_ro("bytes", [](const GateMatrix& m) { return m.memory.bytes(); });
    nb::class_<Operations>(m, "Operations")
        .def(nb::init<const std::string&, int>(), "instruction_set"_a, "threads"_a)
        .def("load_zigzag", &Operations::load_zigzag, "blocks"_a, "rows"_a, "span"_a, "tile"_a,
             "tail"_a.none() = nb::none(), "row_scale"_a.none() = nb::none(), "block"_a = int32_t(Q4_K), "absent"_a = 0,
             Released())
        .def("load_experts", &Operations::load_experts, "blocks"_a, "rows"_a, "span"_a, "tile"_a,
             "tail"_a.none() = nb::none(), "block"_a = int32_t(Q4_K), Released())
        .def("unpack_zigzag", &Operations::unpack_zigzag, "matrix"_a, "blocks"_a, Released())
        .def("load_rows", &Operations::load_rows, "data"_a, "columns"_a, "type"_a, Released())
        .def("unpack_rows", &Operations::unpack_rows, "matrix"_a, "data"_a, Released())
        .def("collect", &Operations::collect, "x"_a, "offset"_a.none(), "threshold"_a, "base"_a, "d"_a, "indices"_a,
             Released())
        .def("zigzag_gemv", &Operations::zigzag_gemv, "matrix"_a, "x"_a, "indices"_a, "count"_a, "y"_a, Released())
        .def("planes_gemv", &Operations::planes_gemv, "matrix"_a, "x"_a, "indices"_a, "ends"_a, "y"_a, Released())
        .def("zigzag_matmul", &Operations::zigzag_matmul, "matrix"_a, "x"_a, "y"_a, Released())
        .def("rows_matmul", &Operations::rows_matmul, "matrix"_a, "x"_a, "y"_a, Released())
        .def("load_neurons", &Operations::load_neurons, "records"_a, "gated"_a = true, Released())
        .def("unpack_neurons", &Operations::unpack_neurons, "neurons"_a, "records"_a, Released())
        .def("neuron_ffn", &Operations::neuron_ffn, "neurons"_a, "x"_a, "gate"_a, "indices"_a, "count"_a, "y"_a,
             Released())
        .def("neuron_matmul", &Operations::neuron_matmul, "neurons"_a, "x"_a, "gate"_a, "y"_a, Released())
        .def("load_gates", &Operations::load_gates, "rows"_a, Released())
        .def("gate_products", &Operations::gate_products, "gates"_a, "x"_a, "y"_a, Released())
        .def("append", &Operations::append, "cache"_a, "layer"_a, "qkv"_a, Released())
        .def("round_rows", &Operations::round_rows, "x"_a, "bfloats"_a, "y"_a, "scales"_a, "rows"_a, "columns"_a,
             "steps"_a, "fp8"_a, Released())
        .def("int8_rows", &Operations::int8_rows, "x"_a, "bfloats"_a, "q"_a, "scales"_a, "rows"_a, "columns"_a,
             "stride"_a, Released())
        .def("scale_sums", &Operations::scale_sums, "x_scales"_a, "scales"_a, "bias"_a, "y"_a, "tokens"_a, "rows"_a,
             Released())
        .def("int8_linear", &Operations::int8_linear, "x"_a, "bfloats"_a, "weights"_a, "scales"_a, "bias"_a, "y"_a,
             "tokens"_a, "rows"_a, "columns"_a, "stride"_a, Released())
        .def("attend", &Operations::attend, "cache"_a, "layer"_a, "qkv"_a, "y"_a, "sparse"_a = false, Released());
}

}  // namespace sparsepack
