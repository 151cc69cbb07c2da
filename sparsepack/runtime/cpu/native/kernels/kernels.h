// What each instruction set brings: a table of plain functions on one thread, no allocation, no exceptions.
//
// The files that implement it are compiled with flags of their own, so they include no header of the C++ library and no
// template: the linker could keep a copy of an inline function that other machines cannot run.
#pragma once
#include "layout/planes.h"

namespace sparsepack {

// Of a list of columns of a matrix of planes, in the order of their levels: where those of level 1 end, of 2, of 3 and of 4.
// All others are of the last level; so zeros say that whole columns are read.
struct LevelEnds {
    int32_t of[PLANES - 1];
};
static inline int32_t level_end(const LevelEnds* ends, int32_t level, int32_t count) {
    return level < PLANES ? ends->of[level - 1] : count;
}
static inline int32_t level_begin(const LevelEnds* ends, int32_t level) { return level > 1 ? ends->of[level - 2] : 0; }
// Of such a list, columns of each level from 1 on: from `first` to before `last`.
struct LevelRanges {
    int32_t first[PLANES], last[PLANES];
};
static inline LevelRanges level_ranges(const LevelEnds* ends, int32_t count) {
    LevelRanges all;
    for (int32_t i = 0; i < PLANES; i++)
        all.first[i] = level_begin(ends, i + 1), all.last[i] = level_end(ends, i + 1, count);
    return all;
}

// A work item of a sparse product: a slice of the active columns, the rows of one span.
struct GemvWork {
    const Zigzag* matrix;
    int32_t span;
    int32_t count;            // of indices; 0 gives zeros
    const int32_t* indices;   // ascending, of a matrix of planes within each level
    const float* x;           // [columns], read at the indices
    float* y;                 // [span_bands * 256], overwritten, in the order of the rows, padding rows too
    bool cold;                // no work item before has fetched its first columns
    LevelRanges levels = {};  // of the list, where the matrix has planes; `count` is not read then
    int32_t first_quad = 0, end_quad = MAX_SPAN;  // there: of the span; rows of other quads are left alone
};

// A work item of a product for several positions: the rows of one quad.
struct MatmulWork {
    const Zigzag* matrix;
    int32_t quad;
    int32_t count;           // of indices; 0 gives zeros
    const int32_t* indices;  // the columns of the matrix that x has, in the order of GemvWork; null: all
    const float* x;          // column `indices[i]` of position p at x + p * x_stride + i
    float* y;  // [positions][y_stride], overwritten at the rows' numbers, the logical rows of the quad only
    int64_t x_stride, y_stride;
    int32_t positions;
    LevelRanges levels = {};  // as in GemvWork
    // [positions][x_stride]: the level of each column for each position, 0: not read; null: `levels` are those of all. Of a
    // matrix of planes, all columns.
    const uint8_t* own_levels = nullptr;
};

// How `zigzag_matmul` takes many positions: so many at a time, of which the last `step` take as long as whole ones, after
// unpacking weights for as long as `unpacking` positions take.
struct MatmulPanel {
    int32_t positions, step, unpacking;
};

// Attention of consecutive positions, for the query heads that share one key head. Query position p (0 ... positions -
// 1) is `position + p` in the text and sees the positions up to its own, with a window at most that many; or, alone,
// those that are listed.
struct AttentionWork {
    const float* q;          // position p, head h at q + p * q_stride + h * head_dim; normed and rotated
    const uint16_t* keys;    // fp16, position t at keys + t * kv_stride, [head_dim]; the queries' own are in it already
    const uint16_t* values;  // likewise
    float* y;                // position p, head h at y + p * y_stride + h * head_dim
    float* scores;           // scratch: heads * positions * (position + positions) floats
    int64_t q_stride, kv_stride, y_stride;
    int32_t heads;
    int32_t head_dim;
    int32_t position;
    int32_t positions;
    int32_t window;         // 0: no limit
    float scale;            // usually 1 / sqrt(head_dim)
    float cap;              // a score s becomes cap tanh(s / cap); 0: it stays
    const int32_t* tokens;  // [listed]: what the one position reads, whatever its window; null: all that it sees
    int32_t listed;
    const float* sinks = nullptr;  // [heads]: scores beside those of keys, for which nothing is added; null: none
};

// A work item of an MLP by neurons: a slice of the active ones.
struct NeuronWork {
    const Neurons* neurons;
    int32_t count;           // of indices; 0 gives zeros
    const int32_t* indices;  // ascending
    const float* gate;       // [neurons], read at the indices
    const uint8_t* input;    // what neuron_input made
    float* y;                // [hidden], overwritten
};

// The same for several positions.
struct NeuronsWork {
    const Neurons* neurons;
    int32_t count;           // of indices
    const int32_t* indices;  // ascending; null: all neurons, and count is theirs
    const float* x;          // [positions][hidden]
    const float* gate;       // [positions][neurons], read at the indices
    int32_t positions;       // at most MOST_NEURON_POSITIONS
    float* y;                // [positions][hidden], overwritten
};

// A work item of products with gates by rows.
struct GatesWork {
    const Gates* gates;
    int32_t first, count;    // those from the first on, or where there are indices the listed ones from the first on
    const int32_t* indices;  // or null
    const uint8_t* inputs;   // what neuron_input made of each position, neuron_input_stride apart
    int32_t positions;
    float* y;  // [positions][y_stride], overwritten from `first` on: products, in the order of the list
    int64_t y_stride;
};

// A token of one head of a gated delta net: S = decay S, S += k beta (v - S^T k), y = S^T q.
struct DeltaWork {
    const float *q, *k, *v;  // [key_dim], likewise, [value_dim]
    float decay, beta;
    int32_t key_dim, value_dim;
    float* state;  // S [key_dim][value_dim]
    float* y;      // [value_dim]
};

enum { MATMUL_TILE = 128 };

// RELU2: max(g, 0)^2 u. CLAMPED_SWIGLU: with g = min(gate, 7) and u = up kept within -7 and 7, g sigmoid(1.702 g) (u + 1).
enum Activation { SILU = 0, RELU = 1, GELU = 2, GELU_TANH = 3, CLAMPED_SWIGLU = 4, RELU2 = 5 };

struct Kernels {
    const char* name;

    // d = x - offset (offset may be null: then d = x; d may be x itself); lists the columns with |d| > threshold in
    // ascending order and returns their count. threshold: [n] if per_channel, else [1]. NaN is never active. indices
    // has room for n + 16; what lies beyond the count is unspecified. `base` is added to each index.
    int32_t (*collect)(const float* x, const float* offset, const float* threshold, int32_t per_channel, int32_t n,
                       int32_t base, float* d, int32_t* indices);

    // The same for a matrix of planes, where the level of a column is the number of `steps` [PLANES] that, times its threshold
    // and `scale`, are below its |d|; they never fall. Lists the columns of level l at indices + (l - 1) * stride, each list
    // with room for n + 16, and their number at counts [PLANES].
    void (*collect_levels)(const float* x, const float* offset, const float* threshold, const float* steps, float scale,
                           int32_t n, int32_t base, float* d, int32_t* indices, int64_t stride, int32_t* counts);

    // Computes `work`; while it ends, fetches the first tile of `next` (null: none) into the cache.
    void (*zigzag_gemv)(const GemvWork* work, const GemvWork* next);

    // Y = X W^T for several positions, MATMUL_TILE columns at a time.
    void (*zigzag_matmul)(const MatmulWork* work);
    MatmulPanel panel;

    // Makes of x [bands * 256] the input that neuron_ffn reads, which has neuron_input_bytes(bands) bytes.
    void (*neuron_input)(const float* x, int32_t bands, uint8_t* input);

    // y = sum over the work item's neurons of gate (up . x) down; fetches the tile after the present one, and at the
    // end the first tile of `next` (null: none).
    void (*neuron_ffn)(const NeuronWork* work, const NeuronWork* next);

    // `neuron_ffn` for several positions, of every neuron whose gate is not zero; a record is read once for all of them.
    void (*neuron_matmul)(const NeuronsWork* work);

    // Products of gates with inputs; a gate is read once for all positions.
    void (*gate_products)(const GatesWork* work);

    // Y = X W^T for rows first ... last - 1 (first a multiple of ROW_TILE, last too or the number of rows), written to
    // y[position * y_stride + row].
    void (*rows_matmul)(const Rows* matrix, int64_t first, int64_t last, const float* x, int64_t x_stride,
                        int32_t positions, float* y, int64_t y_stride);

    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    void (*rms_norm)(const float* x, const float* weight, int32_t n, float eps, float* y);

    // Rotary embedding of the first 2 half channels of one head in place, halves apart: cos, sin [half].
    void (*rotate)(float* x, const float* cos, const float* sin, int32_t half);

    // x = cap tanh(x / cap)
    void (*soft_cap)(float* x, int64_t n, float cap);

    // softmax(q k^T scale) v; see AttentionWork.
    void (*attention)(const AttentionWork* work);

    // The delta rule; see DeltaWork.
    void (*delta_rule)(const DeltaWork* work);

    // A step of a state-space model: S = decay S + k v^T, y = S^T q; beta is not read.
    void (*state_space)(const DeltaWork* work);

    // Double Sparsity's label of a cached key (formats/blocks/labels.py): of its channels at `channels` [count], codes
    // [padded / 2], where padded is the count rounded up to a multiple of 8, and a scale.
    void (*label_key)(const uint16_t* key, const int32_t* channels, int32_t count, uint8_t* codes, uint16_t* scale);

    // The scores by which tokens rank: query [padded] times the numbers in codes [count][padded / 2], an integer, times
    // scales [count], rounded to bfloat16. A score is written as an integer; the integer of a larger score is larger.
    void (*label_scores)(const int8_t* query, int32_t padded, const uint8_t* codes, const uint16_t* scales,
                         int32_t count, int16_t* scores);

    // The `wanted` best of `count` scores, ascending, of equal ones the earlier: tokens [wanted], base + their numbers.
    void (*select_tokens)(const int16_t* scores, int32_t count, int32_t wanted, int32_t base, int32_t* tokens);

    // y = activation(gate) * up, or what CLAMPED_SWIGLU makes of both; y may be gate.
    void (*gate)(int32_t activation, const float* gate, const float* up, int32_t n, float* y);

    // y[i] = sum over slices of partial_sums[slice * stride + i], in order, + bias[i] where bias is not null; adds to y
    // instead of overwriting it if `add`.
    void (*sum)(const float* partial_sums, int64_t stride, int32_t slices, const float* bias, int32_t n, int32_t add,
                float* y);

    void (*to_half)(const float* x, int32_t n, uint16_t* y);

    // y [columns] = one row: looking up an embedding.
    void (*decode_row)(const Rows* matrix, int64_t row, float* y);
};

extern const Kernels scalar_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avxvnni_kernels;
extern const Kernels avx512_kernels;
extern const Kernels amx_kernels;
extern const Kernels neon_kernels;

}  // namespace sparsepack
