// sparsepack.runtime.cpu._native.ColdWorker, which runtime/cpu/operations.py makes.
#include "isa/dispatch.h"
#include "layout/repack.h"
#include "worker/cold_worker.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Released = nb::call_guard<nb::gil_scoped_release>;

// layout: mailbox.Mailbox
Mailbox layout_of(nb::handle layout) {
    auto number = [&](const char* name) { return nb::cast<int64_t>(layout.attr(name)); };
    using ProductParts =
        std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
    std::vector<MailboxProduct> products;
    for (auto [block, columns, rows, skips, begins, request, x, answer, y, levels] :
         nb::cast<std::vector<ProductParts>>(layout.attr("product_parts")))
        products.push_back({block, columns, rows, skips, begins, request, x, answer, y, levels});
    return {int32_t(number("blocks")),
            int32_t(number("neurons")),
            int32_t(number("hidden")),
            int32_t(number("sequences")),
            number("size"),
            number("abort"),
            number("requests"),
            number("request_size"),
            number("count"),
            number("indices"),
            number("gates"),
            number("x"),
            number("answers"),
            number("answer_size"),
            number("y"),
            std::move(products)};
}

// The worker and what it looks at.
class Worker {
public:
    Worker(const std::string& instruction_set, std::vector<std::shared_ptr<NeuronMatrix>> records, Bytes memory,
           nb::handle layout, int threads, double limit, std::vector<std::shared_ptr<ZigzagMatrix>> products,
           std::vector<std::shared_ptr<GateMatrix>> gates)
        : records_(std::move(records)),
          products_(std::move(products)),
          gates_(std::move(gates)),
          memory_(std::move(memory)) {
        Mailbox at = layout_of(layout);
        if (threads < 1 || !(limit > 0)) throw std::invalid_argument("expected threads and seconds");
        if (int64_t(memory_.shape(0)) != at.size || reinterpret_cast<uintptr_t>(memory_.data()) % 4)
            throw std::invalid_argument("memory: expected the size of the mailbox, at a multiple of 4 bytes");
        std::vector<const Neurons*> views;
        for (const auto& matrix : records_) views.push_back(&matrix->view);
        std::vector<const Zigzag*> matrices;
        for (const auto& matrix : products_) matrices.push_back(&matrix->view);
        std::vector<const Gates*> of_blocks;
        for (const auto& matrix : gates_) of_blocks.push_back(matrix ? &matrix->view : nullptr);
        worker_ = std::make_unique<ColdWorker>(kernels(instruction_set), std::move(views), at, memory_.data(), threads,
                                               limit, std::move(matrices), std::move(of_blocks));
    }

    ColdWorker& worker() { return *worker_; }

    // Ctrl-C is looked for every LOOK seconds, and ends both sides.
    void end(int32_t number) {
        constexpr double LOOK = 0.05;  // seconds
        for (;;) {
            {
                nb::gil_scoped_release release;
                if (worker_->wait(number, LOOK)) return;
            }
            if (PyErr_CheckSignals()) {
                worker_->interrupt();
                throw nb::python_error();
            }
        }
    }

private:
    std::vector<std::shared_ptr<NeuronMatrix>> records_;
    std::vector<std::shared_ptr<ZigzagMatrix>> products_;
    std::vector<std::shared_ptr<GateMatrix>> gates_;
    Bytes memory_;
    std::unique_ptr<ColdWorker> worker_;
};

}  // namespace

void bind_worker(nb::module_& m) {
    nb::class_<Worker>(m, "ColdWorker")
        .def(nb::init<const std::string&, std::vector<std::shared_ptr<NeuronMatrix>>, Bytes, nb::handle, int, double,
                      std::vector<std::shared_ptr<ZigzagMatrix>>, std::vector<std::shared_ptr<GateMatrix>>>(),
             "instruction_set"_a, "records"_a, "memory"_a, "layout"_a, "threads"_a, "limit"_a,
             "products"_a = std::vector<std::shared_ptr<ZigzagMatrix>>{},
             "gates"_a = std::vector<std::shared_ptr<GateMatrix>>{})
        .def(
            "begin", [](Worker& self, int32_t number, int32_t sequences) { self.worker().begin(number, sequences); },
            "number"_a, "sequences"_a = 1, Released())
        .def("end", &Worker::end, "number"_a)
        .def("interrupt", [](Worker& self) { self.worker().interrupt(); })
        .def("stop", [](Worker& self) { self.worker().stop(); })
        .def_prop_ro("threads", [](Worker& self) { return self.worker().threads(); })
        .def_prop_ro("neurons", [](Worker& self) { return self.worker().neurons(); })
        .def_prop_ro("seconds", [](Worker& self) { return self.worker().seconds(); })
        .def_prop_ro("product_seconds", [](Worker& self) { return self.worker().product_seconds(); });
}

}  // namespace sparsepack
