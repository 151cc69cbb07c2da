// With AVX2 and FMA.
#define SPARSEPACK_QUANTISE quantise_avx2
#define SPARSEPACK_ENCODE encode_q4_k_avx2
#define SPARSEPACK_LANES 8
#include "quantise/q4_k.inc"
