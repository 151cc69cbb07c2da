// Vectors as wide as the registers, by the vector extension of GCC and Clang: operators work lane by lane, and one loop
// serves every instruction set. Included by simd_*.h, which defines SPARSEPACK_WIDTH, the lanes of a vector, and adds
// what takes instructions of one set.
#pragma once
#include "layout/rows.h"

#define INLINE static inline __attribute__((always_inline))

namespace sparsepack {
namespace {
namespace vectors {

enum { WIDTH = SPARSEPACK_WIDTH, SHORTS = 2 * WIDTH };
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t VecInt __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t VecUnsigned __attribute__((vector_size(4 * WIDTH)));  // whose products may go beyond 32 bits
typedef int16_t VecShort __attribute__((vector_size(2 * SHORTS)));

INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE Vec splat(float a) { return a - Vec{}; }
INLINE VecInt splat_int(int32_t a) { return a - VecInt{}; }
INLINE Vec as_floats(VecInt v) { return (Vec)v; }
INLINE VecInt as_ints(Vec v) { return (VecInt)v; }
INLINE VecInt lane_numbers() {
    VecInt v;
    for (int32_t i = 0; i < WIDTH; i++) v[i] = i;
    return v;
}
INLINE VecInt load_ints(const void* p) {
    VecInt v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_ints(void* p, VecInt v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE VecShort load_shorts(const int16_t* p) {
    VecShort v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
INLINE Vec to_floats(VecInt v) { return __builtin_convertvector(v, Vec); }

}  // namespace vectors
}  // namespace
}  // namespace sparsepack
