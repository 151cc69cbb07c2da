// The kernels with NEON.
#include "simd_neon.h"

#define SPARSEPACK_KERNELS neon_kernels
#define SPARSEPACK_NAME "neon"
#include "kernels.inc"
