// The kernels with AVX-512 (VBMI, too), and tiles of AMX (TILE, INT8) for prompts and several sequences.
#include "isa/simd_avx512.h"

#define SPARSEPACK_KERNELS amx_kernels
#define SPARSEPACK_ROWS "isa/rows_avx512.inc"
#define SPARSEPACK_NEURONS "isa/neurons_avx512.inc"
#define SPARSEPACK_NAME "amx"
#define SPARSEPACK_TILES
#include "kernels/kernels.inc"
