// The kernels with AVX2 and AVX-VNNI, whose dot products are one instruction: processors without AVX-512 since 2021.
#include "isa/simd_avx2.h"

#define SPARSEPACK_KERNELS avxvnni_kernels
#define SPARSEPACK_ROWS "isa/rows_avx2.inc"
#define SPARSEPACK_NEURONS "isa/neurons_avx2.inc"
#define SPARSEPACK_NAME "avxvnni"
#include "kernels/kernels.inc"
