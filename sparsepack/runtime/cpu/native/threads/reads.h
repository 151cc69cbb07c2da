// A product's reads without its arithmetic: the ceiling that the benchmarks compare products with.
#pragma once
#include "kernels/kernels.h"

namespace sparsepack {

// Takes the place of Kernels::zigzag_gemv: reads what it would, whole cache lines of one column after the other, fetches so
// many pieces of memory ahead, and computes nothing. Throws std::invalid_argument for a distance that there is not.
using ReadPieces = void (*)(const GemvWork* work, const GemvWork* next);
ReadPieces read_pieces(int ahead);

}  // namespace sparsepack
