// With AVX2 and AVX-512's products of whole numbers.
#define SPARSEPACK_QUANTISE quantise_avx512
#define SPARSEPACK_ENCODE encode_q4_k_avx512
#define SPARSEPACK_LANES 8
#include "quantise/q4_k.inc"
