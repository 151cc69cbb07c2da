// In plain C++, for every machine; on aarch64 the compiler makes it NEON.
#define SPARSEPACK_BALANCE balance_plain
#define SPARSEPACK_LANES 4
#include "quantise/balance.inc"
