// In plain C++, for every machine; on aarch64 the compiler makes it NEON.
#define SPARSEPACK_INT8 int8_plain
#include "quantise/int8.inc"
