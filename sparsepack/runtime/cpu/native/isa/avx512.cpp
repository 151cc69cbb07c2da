// The kernels with AVX-512 (F, BW, VL, DQ, VNNI).
#include "isa/simd_avx512.h"

#define SPARSEPACK_KERNELS avx512_kernels
#define SPARSEPACK_ROWS "isa/rows_avx512.inc"
#define SPARSEPACK_NEURONS "isa/neurons_avx512.inc"
#define SPARSEPACK_NAME "avx512"
#include "kernels/kernels.inc"
