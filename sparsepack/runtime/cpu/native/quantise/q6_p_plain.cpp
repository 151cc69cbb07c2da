// In plain C++, for every machine; on aarch64 the compiler makes it NEON.
#define SPARSEPACK_ENCODE encode_q6_p_plain
#define SPARSEPACK_FEEDBACK feedback_q6_p_plain
#define SPARSEPACK_LANES 4
#include "quantise/q6_p.inc"
