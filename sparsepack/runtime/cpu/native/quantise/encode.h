// Encoders of whole matrices in zigzag order, each weight rounded by itself. Bytes equal those of formats/blocks.
#pragma once
#include <stdint.h>

namespace sparsepack {

// A matrix of finite weights, `row_step` floats from one row to the next and `column_step` from one column to the next.
//
// divisors [rows]: what each row is divided by first; null: nothing
// blocks   [bands, columns, bytes]: band b of column c has rows 256 b to 256 b + 255 of it, missing ones as zeros
struct EncodeWork {
    const float *weight, *divisors;
    uint8_t* blocks;
    int64_t rows, columns, row_step, column_step;
};

// Encodes so many columns of one band, from `first` on.
using Encode = void (*)(const EncodeWork& work, int64_t band, int64_t first, int64_t count);

extern const Encode encode_q4_k_plain, encode_q6_k_plain, encode_q6_p_plain;
extern const Encode encode_q4_k_avx2, encode_q6_k_avx2, encode_q6_p_avx2;        // where the build has it
extern const Encode encode_q4_k_avx512, encode_q6_k_avx512, encode_q6_p_avx512;  // likewise

}  // namespace sparsepack
