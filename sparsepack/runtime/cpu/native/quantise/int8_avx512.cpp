// With AVX-512.
#define SPARSEPACK_INT8 int8_avx512
#include "quantise/int8.inc"
