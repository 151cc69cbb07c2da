// The kernels in plain C++: the oracle of the other instruction sets, with which it shares no kernel and no vector, and
// what runs where none of them does.
#include "kernels/kernels.h"
#include "layout/rows.h"

#include <math.h>
#include <string.h>

namespace sparsepack {
namespace {

float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0) {  // zero or denormal: mantissa * 2^-24
        float magnitude = (float)mantissa * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// One column of a quad: d * scale and dmin * min of each band and sub-block.
void read_header(const QuadHeader& header, int32_t bands, float scale[QUAD_BANDS][8], float min[QUAD_BANDS][8]) {
    static const int32_t first_slot[QUAD_BANDS] = {0, 16, 8, 24};
    const uint8_t *low = header.low, *high = header.high;
    for (int32_t band = 0; band < bands; band++) {
        float d = from_half(header.d[band]), dmin = from_half(header.dmin[band]);
        for (int32_t sub = 0; sub < 8; sub++) {
            int32_t slot = first_slot[band] + sub;
            int32_t bits = slot < 16 ? high[slot] : high[slot - 16] >> 2;
            scale[band][sub] = d * (float)((low[slot] & 15) | (bits & 0x30));
            min[band][sub] = dmin * (float)((low[slot] >> 4) | (bits & 3) << 4);
        }
    }
}

// y[chunks * 32] += x * one column of a quad of Q4_K
void add_column(ZigzagQ4_K, const uint8_t* column, int32_t chunks, float x, float* y) {
    auto* quad = (const Quad*)column;
    float scale[QUAD_BANDS][8], min[QUAD_BANDS][8];
    read_header(quad->header, (chunks + 7) / 8, scale, min);
    for (int32_t i = 0; i < chunks; i++) {
        int32_t band = i / 8, sub = i % 8;
        const uint8_t* chunk = quad->bands[band].chunks[sub];
        float s = scale[band][sub] * x, m = min[band][sub] * x;
        float* rows = y + 32 * i;
        for (int32_t word = 0; word < 8; word++) {
            for (int32_t nibble = 0; nibble < 4; nibble++) {
                int32_t q = chunk[2 * word + nibble / 2] >> 4 * (nibble & 1) & 15;
                rows[8 * nibble + word] += s * (float)q - m;
            }
        }
    }
}

// The same of another block.
template <class Block>
void add_column(Block, const uint8_t* column, int32_t chunks, float x, float* y) {
    auto& header = *(const typename Block::Header*)column;
    auto* chunk = (const typename Block::Chunk*)(&header + 1);
    for (int32_t first = 0; first < chunks * CHUNK_ROWS; first += Block::SUB_ROWS, y += Block::SUB_ROWS) {
        float scale = Block::scale(header, first / Block::SUB_ROWS, from_half);
        for (int32_t i = 0; i < Block::SUB_ROWS; i++)
            y[i] += scale * (float)Block::number(chunk[first / CHUNK_ROWS], first % CHUNK_ROWS + i) * x;
    }
}

#include "isa/planes_scalar.inc"

void add_column(const Zigzag* m, const uint8_t* column, int32_t chunks, float x, float* y) {
    ZigzagBlocks::find(m->block, [=](auto block) { add_column(block, column, chunks, x, y); });
}

void zigzag_gemv(const GemvWork* work, const GemvWork*) {
    const Zigzag* m = work->matrix;
    if (m->block == Q6_P) return planes_gemv(work);
    const uint8_t* data = span_data(m, work->span);
    int64_t stride = span_stride(m, work->span);
    int32_t bands = span_bands(m, work->span);
    memset(work->y, 0, sizeof(float) * BAND_ROWS * bands);
    for (int32_t i = 0; i < work->count; i++) {
        const uint8_t* column = data + stride * work->indices[i];
        float x = work->x[work->indices[i]];
        for (int32_t band = 0; band < bands; band += QUAD_BANDS) {
            int32_t quad = work->span * m->span + band / QUAD_BANDS;
            add_column(m, column + band / QUAD_BANDS * quad_bytes(m), quad_chunks(m, quad), x,
                       work->y + band * BAND_ROWS);
        }
    }
    scale_rows(m, (int64_t)work->span * m->span * QUAD_ROWS, bands * BAND_ROWS, work->y);
}

void zigzag_matmul(const MatmulWork* work) {
    const Zigzag* m = work->matrix;
    if (m->block == Q6_P) return planes_matmul(work);
    int32_t quad = work->quad, span = quad / m->span, chunks = quad_chunks(m, quad);
    const uint8_t* data = span_data(m, span) + quad % m->span * quad_bytes(m);
    int64_t stride = span_stride(m, span), first = (int64_t)quad * QUAD_ROWS, left = m->rows - first;
    int64_t rows = left < QUAD_ROWS ? left : (int64_t)QUAD_ROWS;
    for (int32_t p = 0; p < work->positions; p++) {
        float sums[QUAD_ROWS] = {};
        for (int64_t i = 0; i < work->count; i++) {
            int64_t column = work->indices ? work->indices[i] : i;
            add_column(m, data + stride * column, chunks, work->x[p * work->x_stride + i], sums);
        }
        scale_rows(m, first, (int32_t)rows, sums);
        memcpy(work->y + p * work->y_stride + first, sums, sizeof(float) * rows);
    }
}

int32_t collect(const float* x, const float* offset, const float* threshold, int32_t per_channel, int32_t n,
                int32_t base, float* d, int32_t* indices) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        d[i] = offset ? x[i] - offset[i] : x[i];
        if (fabsf(d[i]) > threshold[per_channel ? i : 0]) indices[count++] = base + i;
    }
    return count;
}

void collect_levels(const float* x, const float* offset, const float* threshold, const float* steps, float scale,
                    int32_t n, int32_t base, float* d, int32_t* indices, int64_t stride, int32_t* counts) {
    for (int32_t l = 0; l < PLANES; l++) counts[l] = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t level = 0;
        d[i] = offset ? x[i] - offset[i] : x[i];
        while (level < PLANES && fabsf(d[i]) > threshold[i] * steps[level] * scale) level++;
        if (level) indices[(level - 1) * stride + counts[level - 1]++] = base + i;
    }
}

float from_bfloat(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float q4_k_weight(const Q4KBlock& block, int32_t i) {
    int32_t sub = i / 32, q = block.nibbles[sub / 2][i % 32] >> 4 * (sub & 1) & 15, scale, min;
    const uint8_t *a = block.header.scales, *b = a + 4, *c = a + 8;
    if (sub < 4) {
        scale = a[sub] & 63, min = b[sub] & 63;
    } else {
        scale = (c[sub - 4] & 15) | a[sub - 4] >> 6 << 4, min = c[sub - 4] >> 4 | b[sub - 4] >> 6 << 4;
    }
    return from_half(block.header.d) * (float)scale * (float)q - from_half(block.header.dmin) * (float)min;
}

float q6_k_weight(const Q6KBlock& block, int32_t i) {
    int32_t half = i / 128, l = i % 128;
    int32_t low = block.low[half][l % 64] >> 4 * (l / 64) & 15;
    int32_t high = block.high[half][l % 32] >> 2 * (l / 32) & 3;
    return from_half(block.d) * (float)block.scales[i / 16] * (float)((low | high << 4) - 32);
}

float q8_0_weight(const Q80Block& block, int32_t i) { return from_half(block.d) * (float)block.weights[i]; }

// A weight of a tile of rows.h.
float tiled_q6_k_weight(const Q6KTile& tile, int32_t row, int32_t column) {
    int32_t group = column / GROUP_COLUMNS, i = column % GROUP_COLUMNS;
    const HalfGroup& half = tile.groups[group][row / 16];
    int32_t q = 0;
    if (i < 12) {
        q = half.words[i / 4][row % 16][i % 4] & 63;
    } else {
        for (int32_t word = 0; word < 3; word++) q |= half.words[word][row % 16][i % 4] >> 6 << 2 * word;
    }
    return from_half(tile.d[row]) * (float)tile.scales[group][row] * (float)(q - 32);
}

float row_weight(const Rows* m, int64_t row, int64_t column) {
    int64_t at = row * m->columns + column;
    uint16_t h;
    float f;
    switch (m->type) {
        case F32: memcpy(&f, m->data + 4 * at, 4); return f;
        case F16: memcpy(&h, m->data + 2 * at, 2); return from_half(h);
        case BF16: memcpy(&h, m->data + 2 * at, 2); return from_bfloat(h);
        case Q4_K: return q4_k_weight(((const Q4KBlock*)m->data)[at / 256], (int32_t)(at % 256));
        case Q8_0: return q8_0_weight(((const Q80Block*)m->data)[at / 32], (int32_t)(at % 32));
        case Q6_K_ROWS: return q6_k_weight(((const Q6KBlock*)m->data)[at / 256], (int32_t)(at % 256));
        default: break;
    }
    int64_t tile = row / ROW_TILE * (m->columns / 256) + column / 256;
    return tiled_q6_k_weight(((const Q6KTile*)m->data)[tile], (int32_t)(row % ROW_TILE), (int32_t)(column % 256));
}

void rows_matmul(const Rows* m, int64_t first, int64_t last, const float* x, int64_t x_stride, int32_t positions,
                 float* y, int64_t y_stride) {
    for (int64_t row = first; row < last; row++) {
        for (int32_t p = 0; p < positions; p++) y[p * y_stride + row] = 0;
        for (int64_t column = 0; column < m->columns; column++) {
            float weight = row_weight(m, row, column);
            for (int32_t p = 0; p < positions; p++) y[p * y_stride + row] += weight * x[p * x_stride + column];
        }
    }
}

#include "isa/neurons_scalar.inc"

void rms_norm(const float* x, const float* weight, int32_t n, float eps, float* y) {
    float sum = 0;
    for (int32_t i = 0; i < n; i++) sum += x[i] * x[i];
    float factor = 1 / sqrtf(sum / (float)n + eps);
    for (int32_t i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, int32_t half) {
    for (int32_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

void soft_cap(float* x, int64_t n, float cap) {
    for (int64_t i = 0; i < n; i++) x[i] = tanhf(x[i] / cap) * cap;
}

void attention(const AttentionWork* u) {
    for (int32_t h = 0; h < u->heads; h++) {
        for (int32_t p = 0; p < u->positions; p++) {
            const float* q = u->q + p * u->q_stride + h * u->head_dim;
            float *y = u->y + p * u->y_stride + h * u->head_dim, largest = u->sinks ? u->sinks[h] : -INFINITY, sum = 0;
            int32_t last = u->position + p + 1, first = u->window && last > u->window ? last - u->window : 0;
            int32_t count = u->tokens ? u->listed : last - first;
            auto row = [&](int32_t n) { return (u->tokens ? u->tokens[n] : first + n) * u->kv_stride; };
            for (int32_t n = 0; n < count; n++) {
                float score = 0;
                for (int32_t i = 0; i < u->head_dim; i++) score += q[i] * from_half(u->keys[row(n) + i]);
                u->scores[n] = score * u->scale;
                if (u->cap) u->scores[n] = tanhf(u->scores[n] / u->cap) * u->cap;
                if (u->scores[n] > largest) largest = u->scores[n];
            }
            if (u->sinks) sum = expf(u->sinks[h] - largest);
            for (int32_t n = 0; n < count; n++) sum += u->scores[n] = expf(u->scores[n] - largest);
            for (int32_t i = 0; i < u->head_dim; i++) {
                float attn_output = 0;
                for (int32_t n = 0; n < count; n++)
                    attn_output += u->scores[n] / sum * from_half(u->values[row(n) + i]);
                y[i] = attn_output;
            }
        }
    }
}

float activated(int32_t activation, float x) {
    switch (activation) {
        case SILU: return x / (1 + expf(-x));
        case RELU: return x > 0 ? x : 0;
        case RELU2: return x > 0 ? x * x : 0;
        case GELU: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
        default: return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    }
}

void gate(int32_t activation, const float* gate, const float* up, int32_t n, float* y) {
    for (int32_t i = 0; i < n && activation == CLAMPED_SWIGLU; i++) {
        float g = gate[i] < 7 ? gate[i] : 7, u = up[i] < -7 ? -7 : up[i] > 7 ? 7 : up[i];
        y[i] = g / (1 + expf(-1.702f * g)) * (u + 1);
    }
    if (activation == CLAMPED_SWIGLU) return;
    for (int32_t i = 0; i < n; i++) y[i] = activated(activation, gate[i]) * up[i];
}

void sum(const float* partial_sums, int64_t stride, int32_t slices, const float* bias, int32_t n, int32_t add,
         float* y) {
    for (int32_t i = 0; i < n; i++) {
        float total = 0;
        for (int32_t slice = 0; slice < slices; slice++) total += partial_sums[slice * stride + i];
        if (bias) total += bias[i];
        y[i] = add ? y[i] + total : total;
    }
}

void delta_rule(const DeltaWork* w) {
    for (int32_t c = 0; c < w->value_dim; c++) {
        float recalled = 0, y = 0;
        for (int32_t i = 0; i < w->key_dim; i++) {
            float& state = w->state[(int64_t)i * w->value_dim + c];
            state *= w->decay;
            recalled += w->k[i] * state;
        }
        float error = (w->v[c] - recalled) * w->beta;
        for (int32_t i = 0; i < w->key_dim; i++) {
            float& state = w->state[(int64_t)i * w->value_dim + c];
            state += w->k[i] * error;
            y += w->q[i] * state;
        }
        w->y[c] = y;
    }
}

void state_space(const DeltaWork* w) {
    for (int32_t c = 0; c < w->value_dim; c++) {
        float y = 0;
        for (int32_t i = 0; i < w->key_dim; i++) {
            float& state = w->state[(int64_t)i * w->value_dim + c];
            state = state * w->decay + w->k[i] * w->v[c];
            y += w->q[i] * state;
        }
        w->y[c] = y;
    }
}

uint16_t half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);   // NaN
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                                   // denormal: units of 2^-24, rounded to even
        float y;
        memcpy(&y, &magnitude, 4);
        return (uint16_t)(sign | (uint32_t)rintf(y * 16777216.0f));
    }
    uint32_t rounded = (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13;  // to nearest, half way to even
    return (uint16_t)(sign | (rounded - (112 << 10)));
}

void to_half(const float* x, int32_t n, uint16_t* y) {
    for (int32_t i = 0; i < n; i++) y[i] = half_of(x[i]);
}

void label_key(const uint16_t* key, const int32_t* channels, int32_t count, uint8_t* codes, uint16_t* scale) {
    float largest = 0;
    for (int32_t c = 0; c < count; c++) {
        float size = fabsf(from_half(key[channels[c]]));
        if (size > largest) largest = size;
    }
    *scale = half_of(fminf(largest / 7, 65504));
    int32_t half = (count + 7) / 8 * 4;
    for (int32_t c = 0; c < 2 * half; c++) {
        float number = c < count ? from_half(key[channels[c]]) / from_half(*scale) : 0;  // NaN: zero by zero
        int32_t code = number != number ? 8 : number >= 7 ? 15 : number <= -8 ? 0 : 8 + (int32_t)rintf(number);
        codes[c % half] = c < half ? code : codes[c % half] | code << 4;
    }
}

void label_scores(const int8_t* query, int32_t padded, const uint8_t* codes, const uint16_t* scales, int32_t count,
                  int16_t* scores) {
    int32_t half = padded / 2;
    for (int32_t t = 0; t < count; t++) {
        int32_t sum = 0;
        for (int32_t j = 0; j < half; j++) {
            int32_t code = codes[(int64_t)t * half + j];
            sum += query[j] * ((code & 15) - 8) + query[half + j] * ((code >> 4) - 8);
        }
        float score = (float)sum * from_half(scales[t]) + 0.0f;  // never -0, which ranks as 0 does
        uint32_t bits;
        memcpy(&bits, &score, 4);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        scores[t] = (int16_t)(bits & 0x8000 ? bits ^ 0x7fff : bits);
    }
}

void select_tokens(const int16_t* scores, int32_t count, int32_t wanted, int32_t base, int32_t* tokens) {
    auto above = [&](int32_t limit) {
        int32_t found = 0;
        for (int32_t t = 0; t < count; t++) found += scores[t] > limit;
        return found;
    };
    int32_t below = -32769, lowest = 32767;  // that is wanted: the smallest that fewer than `wanted` exceed
    while (lowest - below > 1) {
        int32_t middle = (lowest + below) >> 1;
        (above(middle) < wanted ? lowest : below) = middle;
    }
    int32_t ties = wanted - above(lowest);
    for (int32_t t = 0; t < count; t++)
        if (scores[t] > lowest || (scores[t] == lowest && ties-- > 0)) *tokens++ = base + t;
}

void decode_row(const Rows* m, int64_t row, float* y) {
    for (int64_t column = 0; column < m->columns; column++) y[column] = row_weight(m, row, column);
}

}  // namespace

// clang-format off: the order of the table, a kernel a line.
const Kernels scalar_kernels = {
    "scalar",
    collect,
    collect_levels,
    zigzag_gemv,
    zigzag_matmul,
    {1, 1, 0},
    neuron_input,
    neuron_ffn,
    neuron_matmul,
    gate_products,
    rows_matmul,
    rms_norm,
    rotate,
    soft_cap,
    attention,
    delta_rule,
    state_space,
    label_key,
    label_scores,
    select_tokens,
    gate,
    sum,
    to_half,
    decode_row,
};
// clang-format on

}  // namespace sparsepack
