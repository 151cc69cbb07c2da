// The kernels with AVX2, FMA and F16C.
#include "simd_avx2.h"

#define SPARSEPACK_KERNELS avx2_kernels
#define SPARSEPACK_NAME "avx2"
#include "kernels.inc"
