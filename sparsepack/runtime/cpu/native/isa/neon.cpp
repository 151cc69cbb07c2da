// The kernels with NEON.
#include "isa/simd_neon.h"

#define SPARSEPACK_KERNELS neon_kernels
#define SPARSEPACK_ROWS "isa/rows_neon.inc"
#define SPARSEPACK_NEURONS "isa/neurons_neon.inc"
#define SPARSEPACK_NAME "neon"
#include "kernels/kernels.inc"
