#include "quantise/decode.h"

#include <algorithm>
#include <math.h>
#include <string.h>

namespace sparsepack {
namespace {

constexpr int BAND = 256, TILE = 64, LINE = 16;  // a tile has four cache lines of each row

float from_half(const uint8_t* bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    float size = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    if (exponent == 31) size = mantissa ? NAN : INFINITY;
    return half & 0x8000 ? -size : size;
}

void superblock_q4_k(const uint8_t* block, float* weights) {
    float d = from_half(block), dmin = from_half(block + 2);
    const uint8_t *a = block + 4, *b = block + 8, *c = block + 12, *nibbles = block + 16;
    for (int sub = 0; sub < 8; sub++) {
        int i = sub % 4;
        int scale = sub < 4 ? a[i] & 63 : (c[i] & 15) | a[i] >> 6 << 4;
        int least = sub < 4 ? b[i] & 63 : c[i] >> 4 | b[i] >> 6 << 4;
        float step = d * (float)scale, offset = dmin * (float)least;
        const uint8_t* q = nibbles + sub / 2 * 32;
        for (int j = 0; j < 32; j++) weights[sub * 32 + j] = (float)(sub % 2 ? q[j] >> 4 : q[j] & 15) * step - offset;
    }
}

void superblock_q6_p(const uint8_t* block, float* weights) {
    const uint8_t *first = block + 8, *others = block + 72;
    for (int group = 0; group < 4; group++) {
        int s = block[group], b = block[4 + group];
        uint32_t bits = ((uint32_t)(s << 2 | b >> 6) << 18) + (103u << 23);
        float scale, m = (float)((int8_t)(b << 2) + 2);
        memcpy(&scale, &bits, 4);
        for (int i = 0; i < 64; i++) {
            int q = (first[i] >> 2 * group & 3) << 4, half = 2 * group + i / 32;
            for (int bit = 0; bit < 4; bit++) q |= (others[32 * (3 - bit) + i % 32] >> half & 1) << bit;
            weights[group * 64 + i] = ((float)(4 * q - 126) + m) * scale;
        }
    }
}

template <int BYTES, class Superblock>
void decode(const DecodeWork& work, int64_t band, int64_t first, int64_t count, Superblock superblock) {
    int64_t top = band * BAND, held = std::min<int64_t>(work.rows - top, BAND);
    float tile[TILE][BAND];
    for (int64_t begin = first; begin < first + count; begin += TILE) {
        int columns = (int)std::min<int64_t>(first + count - begin, TILE);
        for (int column = 0; column < columns; column++)
            superblock(work.blocks + (band * work.columns + begin + column) * BYTES, tile[column]);
        for (int64_t first_row = 0; first_row < held; first_row += LINE)
            for (int64_t row = first_row; row < std::min(first_row + LINE, held); row++) {
                float* out = work.weight + (top + row) * work.columns + begin;
                for (int column = 0; column < columns; column++) out[column] = tile[column][row];
            }
    }
}

}  // namespace

void decode_q4_k(const DecodeWork& work, int64_t band, int64_t first, int64_t count) {
    decode<144>(work, band, first, count, superblock_q4_k);
}

void decode_q6_p(const DecodeWork& work, int64_t band, int64_t first, int64_t count) {
    decode<200>(work, band, first, count, superblock_q6_p);
}

}  // namespace sparsepack
