// With AVX2 and FMA.
#define SPARSEPACK_ENCODE encode_q6_p_avx2
#define SPARSEPACK_FEEDBACK feedback_q6_p_avx2
#define SPARSEPACK_LANES 8
#include "quantise/q6_p.inc"
