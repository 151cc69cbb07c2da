// The embedding as it lies in the file: rows decoded as they are looked up.
#pragma once
#include "layout/rows.h"

namespace sparsepack {

// y[columns] = row `row` of `table`. Q6_K here is the file's, row by row, not the tiles of layout.h.
void embed(const Rows& table, int64_t row, float* y);

}  // namespace sparsepack
