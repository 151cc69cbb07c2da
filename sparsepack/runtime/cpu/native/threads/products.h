// How one product is divided over the threads of a pool: what the decoder runs, the operations compute and tuning
// times.
//
// A sparse product is divided into split-K slices of its active columns, and each slice into the spans of its rows: a
// work item is one span of one slice. A slice leaves one vector of partial sums, which `Kernels::sum` adds in order.
// The number of slices depends on the matrix, the number of active columns and the number of threads only: the same
// input gives the same bits every run.
//
// Functions named `share_...` are called in a region, by all threads of the pool, and return without a barrier.
#pragma once
#include "kernels/kernels.h"
#include "memory/buffer.h"
#include "threads/pool.h"

namespace sparsepack {

// The active columns of a product, or the active neurons of an MLP: numbers in ascending order, where the matrix has planes
// within each level.
struct Active {
    const int32_t* indices;
    int32_t count;
    LevelEnds ends = {};
};

// Bytes of a row of superblocks that a product of so many columns of a matrix of planes reads.
int64_t bytes_read(const Active& active);

// The slices of a product with so many active columns, or of an MLP with so many active neurons.
int32_t gemv_slices(const Zigzag& matrix, int32_t count, int32_t threads);
int32_t neuron_slices(int32_t count, int32_t threads);

// The floats between the partial sums of two slices.
inline int64_t gemv_stride(const Zigzag& matrix) { return int64_t(matrix.bands) * BAND_ROWS; }

// A product among several of one shape that are computed together: its input has all columns.
struct Product {
    const Zigzag* matrix;
    const float* x;
    Active active;
};

// The slices of a product with so many active columns among `together` of them.
int32_t gemv_slices(const Zigzag& matrix, int32_t count, int32_t threads, int32_t together);

// partial_sums[slice][padded rows] of one product after the other, each with the slices that it has among them.
void share_gemvs(const Kernels& kernels, Pool& pool, const Product* products, int32_t together, float* partial_sums);

// partial_sums[slice][padded rows] = W[:, active] x[active], where x has all columns.
void share_gemv(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, Active active,
                float* partial_sums);

// The slices of a product for several positions that share their active columns.
int32_t matmul_slices(const Zigzag& matrix, int32_t count, int32_t threads);

// partial_sums[slice][positions][rows] = x W[:, active]^T, where a row of x begins with the active columns alone and the
// next row is m.columns further.
void share_matmul(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, Active active,
                  int32_t positions, float* partial_sums);

// y[positions][rows] = x[positions][columns] W^T
// levels: MatmulWork::own_levels.
void share_matmul(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, int32_t positions, float* y,
                  const uint8_t* levels = nullptr);
void share_matmul(const Kernels& kernels, Pool& pool, const Rows& matrix, const float* x, int32_t positions, float* y);

// partial_sums[slice][hidden] = sum over the active neurons of gate (up . x) down; input: what neuron_input made of x.
void share_neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& neurons, const uint8_t* input,
                      const float* gate, Active active, float* partial_sums);

// y[positions][hidden] of every neuron whose gate is not zero; gate [positions][neurons].
void share_neuron_matmul(const Kernels& kernels, Pool& pool, const Neurons& neurons, const float* x, const float* gate,
                         int32_t positions, float* y);

// y[positions][gates] = x gates^T; inputs: what neuron_input made of each row of x, neuron_input_stride apart.
void share_gate_products(const Kernels& kernels, Pool& pool, const Gates& gates, const uint8_t* inputs,
                         int32_t positions, float* y);

// Memory that grows as the products below need it.
struct ProductScratch {
    Buffer<float> partial_sums;
    Buffer<uint8_t> neuron_input;
};

// `share_gemv` and `share_neuron_ffn` as regions of their own, with their partial sums added: y[rows], y[hidden].
void gemv(const Kernels& kernels, Pool& pool, const Zigzag& matrix, const float* x, Active active,
          ProductScratch& scratch, float* y);
void neuron_ffn(const Kernels& kernels, Pool& pool, const Neurons& neurons, const float* x, const float* gate,
                Active active, ProductScratch& scratch, float* y);
// `share_gate_products` likewise: x [positions][hidden], y[positions][gates].
void gate_products(const Kernels& kernels, Pool& pool, const Gates& gates, const float* x, int32_t positions,
                   ProductScratch& scratch, float* y);

}  // namespace sparsepack
