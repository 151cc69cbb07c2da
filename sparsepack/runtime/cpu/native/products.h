// The products of the operations, shared out over a pool.
#pragma once
#include "buffer.h"
#include "kernels.h"
#include "pool.h"

#include <vector>

namespace sparsepack {

// y[rows] = W[:, indices] x[indices]. The active columns are cut into pieces that depend on the matrix, the count and
// the number of threads only, so these give the same bits every run. `parts` is scratch that grows as needed.
void gemv(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, const int32_t* indices,
          int32_t count, std::vector<float>& parts, float* y);

// y[positions][rows] = x[positions][columns] W^T
void matmul(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, int32_t positions, float* y);
void matmul(const Kernels& kernels, Pool& pool, const Rows& matrix, const float* x, int32_t positions, float* y);

// y[hidden] = sum over the listed neurons of gate (up . x) down, cut as `gemv` is. `input`: scratch, likewise.
void neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& neurons, const float* x, const float* gate,
                const int32_t* indices, int32_t count, Buffer<uint8_t>& input, std::vector<float>& parts, float* y);

// y[positions][hidden], of every neuron; gate [positions][neurons].
void neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& neurons, const float* x, const float* gate,
                   int32_t positions, float* y);

// In a region: the same, shared out by groups of positions.
void share_neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& neurons, const float* x, const float* gate,
                         int32_t positions, float* y);

}  // namespace sparsepack
