// With AVX-512.
#define SPARSEPACK_ENCODE encode_q6_k_avx512
#define SPARSEPACK_LANES 16
#include "quantise/q6_k.inc"
