// One round of balancing the rows and columns of a matrix by their mean squares (formats/orders/zigzag.py, row_scales).
#pragma once
#include <stdint.h>

namespace sparsepack {

// Rows of a contiguous matrix, `columns` floats each.
//
// inverse  [columns]: 1 / what each column's squares are divided by
// means    [rows]: of each row's squares, so divided
// sums     [columns]: of the squares in each column, each divided by its row's mean; a row of zeros counts nothing
// scratch  [columns]
struct BalanceWork {
    const float* weight;
    const double* inverse;
    double *means, *sums, *scratch;
    int64_t rows, columns;
};

using Balance = void (*)(const BalanceWork& work);

extern const Balance balance_plain;
extern const Balance balance_avx2;    // where the build has it
extern const Balance balance_avx512;  // likewise

}  // namespace sparsepack
