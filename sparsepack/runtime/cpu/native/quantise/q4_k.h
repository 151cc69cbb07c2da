// Q4_K's encoder, with error feedback where it is asked for. Bytes equal those of formats/blocks/q4_k.py, the oracle.
#pragma once
#include <stdint.h>

namespace sparsepack {

// A block of columns of one matrix, each column in one piece.
//
// block   [columns, rows]: with a factor the columns as decoded afterwards, else unchanged
// factor  [columns, columns], upper triangular: U of these columns; null: each column is rounded by itself
// errors  [columns, rows]: of each column, divided by its pivot; with a factor only
// blocks  [columns, bands, 144]
// steps   [columns, 2]: d and dmin of each column, which is one band; null: those that suit it best
struct QuantiseWork {
    float* block;
    const float* factor;
    float* errors;
    uint8_t* blocks;
    const float* steps;
    int64_t columns, rows, bands;
};

// Quantises the rows of one band, 256 or fewer: no row depends on those of another band.
using QuantiseBand = void (*)(const QuantiseWork& work, int64_t band);

extern const QuantiseBand quantise_plain;
extern const QuantiseBand quantise_avx2, quantise_avx512;  // where the build has it

}  // namespace sparsepack
