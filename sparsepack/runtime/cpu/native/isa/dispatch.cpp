#include "isa/dispatch.h"

#include <stdexcept>

#include "system/system.h"

#ifdef SPARSEPACK_AVX2
#include <cpuid.h>
#endif

namespace sparsepack {
namespace {

#ifdef SPARSEPACK_AVX2
// What processor and system support, by cpuid: __builtin_cpu_supports asks the compiler's own library, which is not
// linked, or says no to everything, with some compilers for Windows.
struct Supported {
    bool avx2 = false, avxvnni = false, avx512 = false, amx = false;

    Supported() {
        constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, AVX2 = 1u << 5, AVXVNNI = 1u << 4;
        constexpr unsigned AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
        constexpr unsigned AVX512_VNNI = 1u << 11, AVX512_VBMI = 1u << 1;
        constexpr unsigned AMX = 1u << 24 | 1u << 25;  // TILE, INT8
        constexpr unsigned YMM_STATE = 0x06, ZMM_STATE = 0xe6, TILE_STATE = 0x60000;
        unsigned a, b, c, d, state, high;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & FMA) || !(c & OSXSAVE)) return;
        __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
        if ((state & YMM_STATE) != YMM_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = b & AVX2;  // no processor has it without F16C
        const bool tiles = (d & AMX) == AMX && (state & TILE_STATE) == TILE_STATE;
        avx512 = (state & ZMM_STATE) == ZMM_STATE && (b & AVX512) == AVX512 && (c & AVX512_VNNI);
        amx = avx512 && (c & AVX512_VBMI) && tiles && allow_tiles();
        avxvnni = avx2 && a && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVXVNNI);
    }
};
#endif

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> sets;
#ifdef SPARSEPACK_AVX2
    static const Supported supported;
#endif
#ifdef SPARSEPACK_AMX
    if (supported.amx) sets.push_back(&amx_kernels);
#endif
#ifdef SPARSEPACK_AVX512
    if (supported.avx512) sets.push_back(&avx512_kernels);
#endif
#ifdef SPARSEPACK_AVXVNNI
    if (supported.avxvnni) sets.push_back(&avxvnni_kernels);
#endif
#ifdef SPARSEPACK_AVX2
    if (supported.avx2) sets.push_back(&avx2_kernels);
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
    bool wide = set == &avx512_kernels;
#ifdef SPARSEPACK_AMX
    wide |= set == &amx_kernels;
#endif
    if (wide)
        return {encode_q4_k_avx512,   encode_q6_k_avx512, encode_q6_p_avx512, quantise_avx512,
                feedback_q6_p_avx512, balance_avx512,     int8_avx512};
#endif
#ifdef SPARSEPACK_AVX2
    if (set != &scalar_kernels)
        return {encode_q4_k_avx2,   encode_q6_k_avx2, encode_q6_p_avx2, quantise_avx2,
                feedback_q6_p_avx2, balance_avx2,     int8_avx2};
#endif
    (void)set;
    return {encode_q4_k_plain,   encode_q6_k_plain, encode_q6_p_plain, quantise_plain,
            feedback_q6_p_plain, balance_plain,     int8_plain};
}

}  // namespace sparsepack
