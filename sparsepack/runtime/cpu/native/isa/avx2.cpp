// The kernels with AVX2, FMA and F16C.
#include "isa/simd_avx2.h"

#define SPARSEPACK_KERNELS avx2_kernels
#define SPARSEPACK_ROWS "isa/rows_avx2.inc"
#define SPARSEPACK_NEURONS "isa/neurons_avx2.inc"
#define SPARSEPACK_NAME "avx2"
#include "kernels/kernels.inc"
