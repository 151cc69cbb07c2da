// The kernels with AVX-512 (F, BW, VL, DQ, VNNI).
#include "simd_avx512.h"

#define SPARSEPACK_KERNELS avx512_kernels
#define SPARSEPACK_NAME "avx512"
#include "kernels.inc"
