// The encoder of quantise/q4_k.h on arrays that Python allocated; sizes are checked here.
#include "isa/dispatch.h"
#include "threads/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factor = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void quantise_q4_k(Matrix block, Blocks blocks, std::optional<Factor> factor, std::optional<Matrix> errors,
                   std::optional<Factor> steps, const std::string& instruction_set, int threads) {
    auto expect = [](bool met, const char* what) {
        if (!met) throw std::invalid_argument(what);
    };
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
    expect(threads > 0, "threads: expected at least 1");
    QuantiseWork work{block.data(),
                      factor ? factor->data() : nullptr,
                      errors ? errors->data() : nullptr,
                      blocks.data(),
                      steps ? steps->data() : nullptr,
                      (int64_t)columns,
                      (int64_t)rows,
                      (int64_t)bands};
    QuantiseBand kernel = quantise_kernel(instruction_set);
    // With errors fed back columns follow each other; without, they are shared out too.
    int64_t at_once = factor ? work.columns : 64, parts = (work.columns + at_once - 1) / at_once;
    Pool pool((int)std::min<int64_t>(threads, std::max<int64_t>(parts * work.bands, 1)));
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

}  // namespace

void bind_quantise(nb::module_& m) {
    m.def("quantise_q4_k", &quantise_q4_k, "block"_a, "blocks"_a, "factor"_a.none(), "errors"_a.none(),
          "steps"_a.none(), "instruction_set"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace sparsepack
