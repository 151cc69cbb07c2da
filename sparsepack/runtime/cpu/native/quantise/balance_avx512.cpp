// With AVX-512.
#define SPARSEPACK_BALANCE balance_avx512
#define SPARSEPACK_LANES 16
#include "quantise/balance.inc"
