// sparsepack.runtime.cpu._native
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace sparsepack {
void bind_kv_cache(nb::module_& m);
void bind_operations(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_placement(nb::module_& m);
void bind_quantise(nb::module_& m);
void bind_timing(nb::module_& m);
void bind_worker(nb::module_& m);
}  // namespace sparsepack

NB_MODULE(_native, m) {
    // Objects that a cache of Python's keeps until the interpreter ends leak nothing, and users would be told.
    nb::set_leak_warnings(false);
    sparsepack::bind_kv_cache(m);
    sparsepack::bind_operations(m);
    sparsepack::bind_decoder(m);
    sparsepack::bind_placement(m);
    sparsepack::bind_quantise(m);
    sparsepack::bind_timing(m);
    sparsepack::bind_worker(m);
}
