// With AVX2 and FMA.
#define SPARSEPACK_BALANCE balance_avx2
#define SPARSEPACK_LANES 8
#include "quantise/balance.inc"
