#include "decoder_embedding.h"

#include <string.h>

#include <cmath>

namespace sparsepack {
namespace {

constexpr int BLOCK = 256;
constexpr int Q4_K_BLOCK_BYTES = 144, Q6_K_BLOCK_BYTES = 210, Q8_0_BLOCK = 32, Q8_0_BLOCK_BYTES = 34;

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

// The format is drawn in sparsepack/codecs/q4_k.py.
void q4_k(const uint8_t* block, float* y) {
    float d = from_half(read<uint16_t>(block)), dmin = from_half(read<uint16_t>(block + 2));
    const uint8_t *a = block + 4, *b = block + 8, *c = block + 12;
    for (int sub = 0; sub < 8; ++sub) {
        int low = sub & 3;
        int scale = sub < 4 ? a[low] & 63 : (c[low] & 15) | a[low] >> 6 << 4;
        int min = sub < 4 ? b[low] & 63 : c[low] >> 4 | b[low] >> 6 << 4;
        float s = d * float(scale), m = dmin * float(min);
        for (int i = 0; i < 32; ++i) *y++ = s * float(block[16 + sub / 2 * 32 + i] >> 4 * (sub & 1) & 15) - m;
    }
}

// The format is drawn in sparsepack/codecs/q6_k.py.
void q6_k(const uint8_t* block, float* y) {
    float d = from_half(read<uint16_t>(block + 208));
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        const uint8_t* scales = block + 192 + 8 * half;
        for (int quarter = 0; quarter < 4; ++quarter) {
            for (int i = 0; i < 32; ++i) {
                int q = low[32 * (quarter & 1) + i] >> 4 * (quarter >> 1) & 15;
                q |= (high[i] >> 2 * quarter & 3) << 4;
                *y++ = d * float(int8_t(scales[2 * quarter + i / 16])) * float(q - 32);
            }
        }
    }
}

// The format is drawn in sparsepack/codecs/q8_0.py.
void q8_0(const uint8_t* block, float* y) {
    float d = from_half(read<uint16_t>(block));
    for (int i = 0; i < Q8_0_BLOCK; ++i) y[i] = d * float(int8_t(block[2 + i]));
}

}  // namespace

void embed(const Rows& table, int64_t row, float* y) {
    int64_t n = table.columns, blocks = n / BLOCK;
    switch (table.type) {
        case F32:
            memcpy(y, table.data + row * n * 4, n * 4);
            break;
        case F16:
            for (int64_t i = 0; i < n; ++i) y[i] = from_half(read<uint16_t>(table.data + (row * n + i) * 2));
            break;
        case BF16:
            for (int64_t i = 0; i < n; ++i)
                y[i] = from_bits(uint32_t(read<uint16_t>(table.data + (row * n + i) * 2)) << 16);
            break;
        case Q4_K:
            for (int64_t b = 0; b < blocks; ++b) q4_k(table.data + (row * blocks + b) * Q4_K_BLOCK_BYTES, y + b * BLOCK);
            break;
        case Q6_K:
            for (int64_t b = 0; b < blocks; ++b) q6_k(table.data + (row * blocks + b) * Q6_K_BLOCK_BYTES, y + b * BLOCK);
            break;
        case Q8_0:
            for (int64_t b = 0, across = n / Q8_0_BLOCK; b < across; ++b)
                q8_0(table.data + (row * across + b) * Q8_0_BLOCK_BYTES, y + b * Q8_0_BLOCK);
            break;
    }
}

}  // namespace sparsepack
