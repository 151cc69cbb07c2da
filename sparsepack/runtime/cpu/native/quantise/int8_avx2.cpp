// With AVX2.
#define SPARSEPACK_INT8 int8_avx2
#include "quantise/int8.inc"
