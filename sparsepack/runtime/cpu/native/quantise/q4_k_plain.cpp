// In plain C++, for every machine; on aarch64 the compiler makes it NEON.
#define SPARSEPACK_QUANTISE quantise_plain
#include "quantise/q4_k.inc"
