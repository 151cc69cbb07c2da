#include "decoder/embedding.h"

#include <string.h>

#include <cmath>

namespace sparsepack {
namespace {

template <class T>
T read(const uint8_t* bytes) {
    T value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float from_half(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, from_bits(sign | 0x3f800000));
    return from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

void q4_k(const Q4KBlock& block, float* y) {
    float d = from_half(block.header.d), dmin = from_half(block.header.dmin);
    const uint8_t *a = block.header.scales, *b = a + 4, *c = a + 8;
    for (int sub = 0; sub < 8; ++sub) {
        int low = sub & 3;
        int scale = sub < 4 ? a[low] & 63 : (c[low] & 15) | a[low] >> 6 << 4;
        int min = sub < 4 ? b[low] & 63 : c[low] >> 4 | b[low] >> 6 << 4;
        float s = d * float(scale), m = dmin * float(min);
        for (int i = 0; i < 32; ++i) *y++ = s * float(block.nibbles[sub / 2][i] >> 4 * (sub & 1) & 15) - m;
    }
}

void q6_k(const Q6KBlock& block, float* y) {
    float d = from_half(block.d);
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = block.low[half], *high = block.high[half];
        const int8_t* scales = block.scales + 8 * half;
        for (int quarter = 0; quarter < 4; ++quarter) {
            for (int i = 0; i < 32; ++i) {
                int q = low[32 * (quarter & 1) + i] >> 4 * (quarter >> 1) & 15;
                q |= (high[i] >> 2 * quarter & 3) << 4;
                *y++ = d * float(scales[2 * quarter + i / 16]) * float(q - 32);
            }
        }
    }
}

void q8_0(const Q80Block& block, float* y) {
    float d = from_half(block.d);
    for (int i = 0; i < Q8_0_COLUMNS; ++i) y[i] = d * float(block.weights[i]);
}

// One row of a table of blocks, each of `columns` weights.
template <class Block>
void decode(const Rows& table, int64_t row, int columns, void (*decode_block)(const Block&, float*), float* y) {
    int64_t across = table.columns / columns;
    auto* blocks = (const Block*)table.data + row * across;
    for (int64_t i = 0; i < across; ++i) decode_block(blocks[i], y + i * columns);
}

}  // namespace

void embed(const Rows& table, int64_t row, float* y) {
    int64_t n = table.columns;
    switch (table.type) {
        case F32: memcpy(y, table.data + row * n * 4, n * 4); break;
        case F16:
            for (int64_t i = 0; i < n; ++i) y[i] = from_half(read<uint16_t>(table.data + (row * n + i) * 2));
            break;
        case BF16:
            for (int64_t i = 0; i < n; ++i)
                y[i] = from_bits(uint32_t(read<uint16_t>(table.data + (row * n + i) * 2)) << 16);
            break;
        case Q4_K: decode(table, row, BLOCK_COLUMNS, q4_k, y); break;
        case Q6_K: decode(table, row, BLOCK_COLUMNS, q6_k, y); break;
        case Q8_0: decode(table, row, Q8_0_COLUMNS, q8_0, y); break;
    }
}

}  // namespace sparsepack
