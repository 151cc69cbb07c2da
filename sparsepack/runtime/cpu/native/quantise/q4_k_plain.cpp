// In plain C++, for every machine; on aarch64 the compiler makes it NEON.
#define SPARSEPACK_QUANTISE quantise_plain
#define SPARSEPACK_ENCODE encode_q4_k_plain
#define SPARSEPACK_LANES 4
#include "quantise/q4_k.inc"
