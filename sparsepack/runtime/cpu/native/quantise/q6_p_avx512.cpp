// With AVX-512.
#define SPARSEPACK_ENCODE encode_q6_p_avx512
#define SPARSEPACK_FEEDBACK feedback_q6_p_avx512
#define SPARSEPACK_LANES 16
#include "quantise/q6_p.inc"
