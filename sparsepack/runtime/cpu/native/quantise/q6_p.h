// Error feedback for Q6_P. The arithmetic is that of formats/gptq_planes.py, the oracle, but for the order of sums.
#pragma once
#include <stdint.h>

namespace sparsepack {

// A block of columns of one matrix, each column in one piece.
//
// block   [columns, rows]
// shares  [columns, 6]: the squares of each input that are read at no level, and at each one
// factor  [columns, columns], upper triangular: U of these columns
// errors  [columns, rows]: of each column, divided by its pivot
// each    [columns, groups, 2]: s and b
// numbers [columns, groups, 64]: q; rows beyond the last are padding
struct PlanesWork {
    const float *block, *shares, *factor;
    float* errors;
    uint8_t *each, *numbers;
    int64_t columns, rows, groups;
};

// Quantises the rows of one group, 64 or fewer: no row depends on those of another group.
using QuantiseGroup = void (*)(const PlanesWork& work, int64_t group);

extern const QuantiseGroup feedback_q6_p_plain;
extern const QuantiseGroup feedback_q6_p_avx2, feedback_q6_p_avx512;  // where the build has it

}  // namespace sparsepack
