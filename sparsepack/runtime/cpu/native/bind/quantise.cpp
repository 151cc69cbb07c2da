// The encoders of quantise/ on arrays that Python allocated; sizes are checked here.
#include "isa/dispatch.h"
#include "quantise/decode.h"
#include "quantise/reorder.h"
#include "threads/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factor = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weight = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Divisors = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Means = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using StoredBlocks = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void expect(bool met, const char* what) {
    if (!met) throw std::invalid_argument(what);
}

// This thread's pool: error feedback comes here hundreds of times for a matrix, and starting threads takes as long as
// their work. They sleep at once, since what runs in between has threads of its own.
Pool& pool_of(int threads) {
    expect(threads > 0, "threads: expected at least 1");
    static thread_local std::unique_ptr<Pool> pool;
    if (!pool || pool->threads() != threads) {
        pool.reset();
        pool = std::make_unique<Pool>(threads, std::chrono::seconds(0));
    }
    return *pool;
}

void expect_order(const Order& order, size_t columns) {
    for (size_t i = 0; i < order.shape(0); i++)
        expect(order.data()[i] >= 0 && order.data()[i] < (int64_t)columns, "order: expected numbers of columns");
}

void quantise_q4_k(Matrix block, Blocks blocks, std::optional<Factor> factor, std::optional<Matrix> errors,
                   std::optional<Factor> steps, const std::string& instruction_set, int threads) {
    size_t columns = block.shape(0), rows = block.shape(1), bands = (rows + 255) / 256;
    expect(blocks.shape(0) == columns && blocks.shape(1) == bands && blocks.shape(2) == 144,
           "blocks: expected [columns, bands, 144]");
    expect(factor.has_value() == errors.has_value(), "factor and errors: expected both or none");
    if (factor) {
        expect(factor->shape(0) == columns && factor->shape(1) == columns, "factor: expected [columns, columns]");
        expect(errors->shape(0) == columns && errors->shape(1) == rows, "errors: expected [columns, rows]");
    }
    expect(!steps || (bands == 1 && steps->shape(0) == columns && steps->shape(1) == 2),
           "steps: expected [columns, 2], and one band");
    QuantiseWork work{block.data(),
                      factor ? factor->data() : nullptr,
                      errors ? errors->data() : nullptr,
                      blocks.data(),
                      steps ? steps->data() : nullptr,
                      (int64_t)columns,
                      (int64_t)rows,
                      (int64_t)bands};
    QuantiseBand kernel = encoders(instruction_set).feedback_q4_k;
    // With errors fed back columns follow each other; without, they are shared out too.
    int64_t at_once = factor ? work.columns : 64, parts = (work.columns + at_once - 1) / at_once;
    Pool& pool = pool_of(threads);
    pool.run([&](int) {
        pool.share((int)(parts * work.bands), [&](int item, int) {
            int64_t first = item / work.bands * at_once;
            QuantiseWork part = work;
            part.block += first * work.rows;
            part.blocks += first * work.bands * 144;
            if (work.steps) part.steps += 2 * first;
            part.columns = std::min(at_once, work.columns - first);
            kernel(part, item % work.bands);
        });
    });
}

void quantise_q6_p(Factor block, Factor shares, Factor factor, Matrix errors, Blocks each, Blocks numbers,
                   const std::string& instruction_set, int threads) {
    size_t columns = block.shape(0), rows = block.shape(1), groups = each.shape(1);
    expect(shares.shape(0) == columns && shares.shape(1) == 6, "shares: expected [columns, 6]");
    expect(factor.shape(0) == columns && factor.shape(1) == columns, "factor: expected [columns, columns]");
    expect(errors.shape(0) == columns && errors.shape(1) == rows, "errors: expected [columns, rows]");
    expect(each.shape(0) == columns && groups * 64 >= rows && each.shape(2) == 2,
           "each: expected [columns, groups, 2]");
    expect(numbers.shape(0) == columns && numbers.shape(1) == groups && numbers.shape(2) == 64,
           "numbers: expected [columns, groups, 64]");
    PlanesWork work{block.data(),   shares.data(),    factor.data(), errors.data(),  each.data(),
                    numbers.data(), (int64_t)columns, (int64_t)rows, (int64_t)groups};
    QuantiseGroup kernel = encoders(instruction_set).feedback_q6_p;
    Pool& pool = pool_of(threads);
    pool.run([&](int) { pool.share((int)groups, [&](int group, int) { kernel(work, group); }); });
}

void encode(const std::string& block, Weight weight, std::optional<Divisors> divisors, Blocks blocks,
            const std::string& instruction_set, int threads) {
    Encoders known = encoders(instruction_set);
    struct {
        const char* name;
        size_t bytes;
        Encode kernel;
    } of_blocks[] = {{"Q4_K", 144, known.q4_k}, {"Q6_K", 210, known.q6_k}, {"Q6_P", 200, known.q6_p}};
    auto of = std::find_if(std::begin(of_blocks), std::end(of_blocks), [&](auto& one) { return block == one.name; });
    expect(of != std::end(of_blocks), "block: expected Q4_K, Q6_K or Q6_P");
    int64_t rows = (int64_t)weight.shape(0), columns = (int64_t)weight.shape(1), bands = (rows + 255) / 256;
    expect((int64_t)blocks.shape(0) == bands && (int64_t)blocks.shape(1) == columns && blocks.shape(2) == of->bytes,
           "blocks: expected [bands, columns, bytes]");
    expect(!divisors || (int64_t)divisors->shape(0) == rows, "divisors: expected one for each row");
    EncodeWork work{
        weight.data(),   divisors ? divisors->data() : nullptr, blocks.data(), rows, columns, weight.stride(0),
        weight.stride(1)};
    const int64_t at_once = 256;
    int64_t parts = (columns + at_once - 1) / at_once;
    Pool& pool = pool_of(threads);
    pool.run([&](int) {
        pool.share((int)(parts * bands), [&](int item, int) {
            int64_t first = item % parts * at_once;
            of->kernel(work, item / parts, first, std::min(at_once, columns - first));
        });
    });
}

// means [rows]: of the squares of each row, after so many rounds in which rows and columns are divided in turns.
void balance(Factor weight, Means means, int rounds, const std::string& instruction_set, int threads) {
    int64_t rows = (int64_t)weight.shape(0), columns = (int64_t)weight.shape(1);
    expect((int64_t)means.shape(0) == rows, "means: expected one for each row");
    expect(rounds > 0, "rounds: expected at least 1");
    Balance kernel = encoders(instruction_set).balance;
    const int64_t at_once = 64;  // rows, whose sums are added in order: the result is that of any number of threads
    int64_t parts = (rows + at_once - 1) / at_once;
    Pool& pool = pool_of(threads);
    std::vector<double> inverse((size_t)columns, 1.0), sums((size_t)(parts * columns)), scratch;
    scratch.resize((size_t)(pool.threads() * columns));
    for (int round = 0; round < rounds; round++) {
        pool.run([&](int thread) {
            pool.share((int)parts, [&](int part, int) {
                int64_t first = part * at_once;
                kernel({weight.data() + first * columns, inverse.data(), means.data() + first,
                        sums.data() + part * columns, scratch.data() + thread * columns,
                        std::min(at_once, rows - first), columns});
            });
        });
        for (int64_t column = 0; column < columns; column++) {
            double sum = 0;
            for (int64_t part = 0; part < parts; part++) sum += sums[(size_t)(part * columns + column)];
            inverse[(size_t)column] = sum > 0 ? (double)rows / sum : 1;
        }
    }
}

void decode(const std::string& block, StoredBlocks blocks, Matrix weight, int threads) {
    struct {
        const char* name;
        size_t bytes;
        Decode kernel;
    } of_blocks[] = {{"Q4_K", 144, decode_q4_k}, {"Q6_P", 200, decode_q6_p}};
    auto of = std::find_if(std::begin(of_blocks), std::end(of_blocks), [&](auto& one) { return block == one.name; });
    expect(of != std::end(of_blocks), "block: expected Q4_K or Q6_P");
    int64_t rows = (int64_t)weight.shape(0), columns = (int64_t)weight.shape(1), bands = (rows + 255) / 256;
    expect((int64_t)blocks.shape(0) == bands && (int64_t)blocks.shape(1) == columns && blocks.shape(2) == of->bytes,
           "blocks: expected [bands, columns, bytes]");
    DecodeWork work{blocks.data(), weight.data(), rows, columns};
    const int64_t at_once = 256;
    int64_t parts = (columns + at_once - 1) / at_once;
    Pool& pool = pool_of(threads);
    pool.run([&](int) {
        pool.share((int)(parts * bands), [&](int item, int) {
            int64_t first = item % parts * at_once;
            of->kernel(work, item / parts, first, std::min(at_once, columns - first));
        });
    });
}

void mirror_square(Matrix matrix, float divisor, int threads) {
    expect(matrix.shape(0) == matrix.shape(1), "matrix: expected a square one");
    mirror(pool_of(threads), matrix.data(), (int64_t)matrix.shape(0), divisor);
}

void permute_square(Factor matrix, Order order, Matrix out, int threads) {
    size_t size = matrix.shape(0), count = order.shape(0);
    expect(matrix.shape(1) == size && out.shape(0) == count && out.shape(1) == count, "expected square matrices");
    expect_order(order, size);
    permute(pool_of(threads), matrix.data(), (int64_t)size, order.data(), out.data(), (int64_t)count);
}

void flip_square(Matrix matrix, int threads) {
    expect(matrix.shape(0) == matrix.shape(1), "matrix: expected a square one");
    flip_diagonal(pool_of(threads), matrix.data(), (int64_t)matrix.shape(0));
}

void transpose(Factor matrix, Order order, Matrix out, int threads) {
    size_t rows = matrix.shape(0), columns = matrix.shape(1);
    expect(order.shape(0) == columns && out.shape(0) == columns && out.shape(1) == rows,
           "order and out: expected [columns] and [columns, rows]");
    expect_order(order, columns);
    transpose_columns(pool_of(threads), matrix.data(), order.data(), out.data(), (int64_t)rows, (int64_t)columns);
}

}  // namespace

void bind_quantise(nb::module_& m) {
    m.def("quantise_q4_k", &quantise_q4_k, "block"_a, "blocks"_a, "factor"_a.none(), "errors"_a.none(),
          "steps"_a.none(), "instruction_set"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("quantise_q6_p", &quantise_q6_p, "block"_a, "shares"_a, "factor"_a, "errors"_a, "each"_a, "numbers"_a,
          "instruction_set"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("encode", &encode, "block"_a, "weight"_a, "divisors"_a.none(), "blocks"_a, "instruction_set"_a, "threads"_a,
          nb::call_guard<nb::gil_scoped_release>());
    m.def("decode", &decode, "block"_a, "blocks"_a, "weight"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("mirror", &mirror_square, "matrix"_a, "divisor"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("permute", &permute_square, "matrix"_a, "order"_a, "out"_a, "threads"_a,
          nb::call_guard<nb::gil_scoped_release>());
    m.def("flip_diagonal", &flip_square, "matrix"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("transpose_columns", &transpose, "matrix"_a, "order"_a, "out"_a, "threads"_a,
          nb::call_guard<nb::gil_scoped_release>());
    m.def("balance", &balance, "weight"_a, "means"_a, "rounds"_a, "instruction_set"_a, "threads"_a,
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace sparsepack
