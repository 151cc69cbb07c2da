#include "isa/dispatch.h"

#include <stdexcept>

namespace sparsepack {
namespace {

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> sets;
#ifdef SPARSEPACK_AVX2
    __builtin_cpu_init();  // else nothing is supported where the compiler's library has no constructor, as zig's for Windows
#endif
#ifdef SPARSEPACK_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        sets.push_back(&avx512_kernels);
#endif
#ifdef SPARSEPACK_AVXVNNI
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avxvnni"))
        sets.push_back(&avxvnni_kernels);
#endif
#ifdef SPARSEPACK_AVX2
    // No processor has AVX2 without F16C; some compilers cannot ask for the latter.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&avx2_kernels);
#endif
#ifdef SPARSEPACK_NEON
    sets.push_back(&neon_kernels);  // every aarch64 has it
#endif
    sets.push_back(&scalar_kernels);
    return sets;
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* set : usable()) names.push_back(set->name);
    return names;
}

const Kernels& kernels(const std::string& name) {
    std::string known;
    for (const Kernels* set : usable()) {
        if (name == set->name) return *set;
        known += (known.empty() ? "" : ", ") + std::string(set->name);
    }
    throw std::invalid_argument("instruction set '" + name + "': not available here; expected one of " + known);
}

Encoders encoders(const std::string& name) {
    const Kernels* set = &kernels(name);
#ifdef SPARSEPACK_AVX512
    if (set == &avx512_kernels)
        return {encode_q4_k_avx512, encode_q6_k_avx512, encode_q6_p_avx512, quantise_avx512, balance_avx512};
#endif
#ifdef SPARSEPACK_AVX2
    if (set != &scalar_kernels)
        return {encode_q4_k_avx2, encode_q6_k_avx2, encode_q6_p_avx2, quantise_avx2, balance_avx2};
#endif
    (void)set;
    return {encode_q4_k_plain, encode_q6_k_plain, encode_q6_p_plain, quantise_plain, balance_plain};
}

}  // namespace sparsepack
