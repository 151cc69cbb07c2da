// Bands in zigzag order as a matrix: the inverse of quantise/encode.h, for the types that error feedback makes. Bytes
// equal those of formats/blocks.
#pragma once
#include <stdint.h>

namespace sparsepack {

// blocks [bands, columns, bytes]; weight [rows, columns], rows at most 256 for each band
struct DecodeWork {
    const uint8_t* blocks;
    float* weight;
    int64_t rows, columns;
};

// Decodes so many columns of one band, from `first` on.
using Decode = void (*)(const DecodeWork& work, int64_t band, int64_t first, int64_t count);

void decode_q4_k(const DecodeWork& work, int64_t band, int64_t first, int64_t count);
void decode_q6_p(const DecodeWork& work, int64_t band, int64_t first, int64_t count);

}  // namespace sparsepack
