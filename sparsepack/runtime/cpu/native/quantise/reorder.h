// Matrices in another order, each in one pass over memory that all threads share: what lies between the products of a
// matrix's inputs and the factor by which errors are fed back (reconstruction.py). Values are copied, not computed.
#pragma once
#include "threads/pool.h"

#include <stdint.h>

namespace sparsepack {

// matrix [size, size], of which the upper triangle is known: all of it is divided, and the lower one mirrors the upper.
void mirror(Pool& pool, float* matrix, int64_t size, float divisor);

// out[i, j] = matrix[order[i], order[j]], of a matrix [size, size]; out [count, count].
void permute(Pool& pool, const float* matrix, int64_t size, const int64_t* order, float* out, int64_t count);

// In place, of an upper triangular matrix [size, size]: [i, j] and [size - 1 - j, size - 1 - i] change places.
void flip_diagonal(Pool& pool, float* matrix, int64_t size);

// out[j, i] = matrix[i, order[j]] of a matrix [rows, columns].
void transpose_columns(Pool& pool, const float* matrix, const int64_t* order, float* out, int64_t rows,
                       int64_t columns);

}  // namespace sparsepack
