// Slid Linears: inputs rounded to 8 bits with a scale for each row, as formats/orders/slide.py does it, and products of int8.
#pragma once
#include <stdint.h>

namespace sparsepack {

// x       [rows, columns]: float32, or the bits of bfloat16; the other pointer is null
// y       [rows, columns]: what x became, multiplied by the row's scale unless `scales` takes that
// scales  [rows], or null
// steps   what the largest value of a row becomes
// fp8     to FP8 (e4m3) in place of whole numbers
//
// A row with a value that is not finite has the scale NaN.
struct RoundWork {
    const float* x;
    const uint16_t* bfloats;
    float *y, *scales;
    int64_t rows, columns;
    float steps;
    bool fp8;
};

using RoundRows = void (*)(const RoundWork& work);

// Products of rows rounded to int8 with rows of int8 weights, of `first_row` to before `last_row` of these. Sums are exact.
//
// x         [tokens, stride]: what words_of_rows made of the inputs
// weights   [rows, stride], beyond the columns zeros; the stride is a multiple of INT8_STEP
// y         [tokens, rows] = (sum of x weight) * x_scales [tokens] * scales [rows] + bias [rows], or null
enum { INT8_STEP = 32, MOST_INT8_COLUMNS = 1 << 17 };  // 2^17 * 127^2 < 2^31
struct Int8Work {
    const int16_t* x;
    const float* x_scales;
    const int8_t* weights;
    const float *scales, *bias;
    float* y;
    int64_t tokens, rows, stride, first_row, last_row;
};
using Int8Matmul = void (*)(const Int8Work& work);

// RoundWork to whole numbers, which lie `stride` apart in `words`, with zeros behind them; y is not read.
using WordsOfRows = void (*)(const RoundWork& work, int16_t* words, int64_t stride);
using BytesOfRows = void (*)(const RoundWork& work, int8_t* bytes, int64_t stride);

// What Int8Matmul makes of its sums, of tokens [first, last).
//
// y  [tokens, rows]: before, the bits of the sums, int32: memory that is new costs more than the rest
struct ScaleWork {
    const float *x_scales, *scales, *bias;
    float* y;
    int64_t rows, first, last;
};
using ScaleSums = void (*)(const ScaleWork& work);

// What an instruction set has of these.
struct Int8Kernels {
    RoundRows round_rows;
    WordsOfRows words_of_rows;
    BytesOfRows bytes_of_rows;
    Int8Matmul matmul;
    ScaleSums scale_sums;
};
extern const Int8Kernels int8_plain;
extern const Int8Kernels int8_avx2;    // where the build has it
extern const Int8Kernels int8_avx512;  // likewise

}  // namespace sparsepack
