// Lists of active columns, and what makes the vectors whose columns they are (SpQt, section 4.2.3).
//
//     x + partial sums ---------------> norm --\
//     gate's and up's partial sums -> gated ----> - offset -> |.| > threshold -> list (common.metal)
//     chunks of attention ---> put together --/
//
// Launch: a threadgroup of 1024 threads for each segment of the list, a column for each thread. Only the norm needs all
// columns: then every threadgroup adds up all of x for itself, which is less than another launch would take.

// Lists a threadgroup's active columns in ascending order; every thread calls it. found [32]: how many each simdgroup has
inline void list_active(float x, int column, int columns, device const float* offset, device const float* threshold,
                        int with, uint segment, uint index, uint simdgroup, uint lane, threadgroup int* found,
                        device float* values, device int* indices, device int* counts) {
    int level = 0;
    if (column < columns) {
        if (with & WITH_OFFSET) x -= offset[column];
        if (with & WITH_LEVELS) {
            for (int l = 0; l < LEVELS; ++l) level += int(fabs(x) > threshold[l * columns + column]);
        } else if (!(with & WITH_THRESHOLD) || fabs(x) > threshold[with & WITH_PER_CHANNEL ? column : 0]) {
            level = LEVELS;
        }
    }
    // Columns in the lower 16 bits, the sum of their levels above.
    const int mine = level << 16 | int(level > 0);
    const int before = simd_prefix_exclusive_sum(mine);
    if (lane == LANES - 1) found[simdgroup] = before + mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int of_simdgroup = found[lane];
    const int first = simd_shuffle(simd_prefix_exclusive_sum(of_simdgroup), ushort(simdgroup));
    const int all = simd_sum(of_simdgroup);
    if (level) {
        const int at = int(segment) * SEGMENT + ((first + before) & 0xffff);
        values[at] = x;
        indices[at] = with & WITH_LEVELS ? level << COLUMN_BITS | column : column;
    }
    if (index == 0) {
        counts[segment] = all & 0xffff;
        counts[(columns + SEGMENT - 1) / SEGMENT + int(segment)] = all >> 16;
    }
}

// Of x + partial sums + bias, which is written to `sum` (another buffer than x), normed (RMSNorm).
//
// splits: 0 where x is all that there is
kernel void collect(device const float* x [[buffer(0)]], device const float* partials [[buffer(1)]],
                    device const float* bias [[buffer(2)]], device const float* norm [[buffer(3)]],
                    device const float* offset [[buffer(4)]], device const float* threshold [[buffer(5)]],
                    device float* sum [[buffer(6)]], device float* values [[buffer(7)]],
                    device int* indices [[buffer(8)]], device int* counts [[buffer(9)]],
                    constant int& columns [[buffer(10)]], constant int& splits [[buffer(11)]],
                    constant int& stride [[buffer(12)]], constant int& with [[buffer(13)]],
                    constant float& eps [[buffer(14)]], uint segment [[threadgroup_position_in_grid]],
                    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup int found[LANES];
    threadgroup float squares_of[LANES];
    const int column = int(segment) * SEGMENT + int(index);
    float mine = 0, squares = 0;
    // Without a norm only the thread's own column counts.
    const int first = with & WITH_NORM ? int(index) : column,
              end = with & WITH_NORM ? columns : min(columns, column + 1);
    for (int i = first; i < end; i += SEGMENT) {
        float v = x[i] + sum_of_splits(partials, splits, stride, i);
        if (with & WITH_BIAS) v += bias[i];
        squares += v * v;
        if (i == column) mine = v;
    }
    if (column < columns && with & WITH_SUM) sum[column] = mine;
    if (with & WITH_NORM) {
        squares = simd_sum(squares);
        if (lane == 0) squares_of[simdgroup] = squares;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float all = simd_sum(squares_of[lane]);
        if (column < columns) mine = mine * rsqrt(all / float(columns) + eps) * norm[column];
    }
    list_active(mine, column, columns, offset, threshold, with, segment, index, simdgroup, lane, found, values, indices,
                counts);
}

// The error function, within 1 unit in the last place or two (N. Juffa's approximation, 2 intervals).
inline float erf_of(float x) {
    const float t = fabs(x), s = x * x;
    if (t > 0.927734375f) {
        const float u = fma(-3.88396438e-3f, t, 2.42546219e-2f);
        float r = fma(fma(-1.72853470e-5f, t, 3.83197126e-4f), s, u);
        r = fma(r, t, -1.06777877e-1f);
        r = fma(r, t, -6.34846687e-1f);
        r = fma(r, t, -1.28717512e-1f);
        r = 1.0f - exp(fma(r, t, -t));
        return x < 0 ? -r : r;
    }
    float r = fma(-5.96761703e-4f, s, 4.99119423e-3f);
    r = fma(r, s, -2.67681349e-2f);
    r = fma(r, s, 1.12819925e-1f);
    r = fma(r, s, -3.76125336e-1f);
    r = fma(r, s, 1.28379166e-1f);
    return fma(r, x, x);
}

enum { SILU = 0, RELU = 1, GELU = 2, GELU_TANH = 3 };

inline float activated(float x, int activation) {
    switch (activation) {
        case SILU: return x / (1.0f + exp(-x));
        case RELU: return x < 0 ? 0.0f : x;
        case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
        default: {
            // tanh of a large number may be computed from an exponential that overflows.
            const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
            return 0.5f * x * (1.0f + tanh(max(-15.0f, min(15.0f, inner))));
        }
    }
}

// Of activation(gate) * up: rows 0 .. columns - 1 of the partial sums are gate's, the next as many are up's. bias [2 columns]
kernel void collect_gated(device const float* partials [[buffer(0)]], device const float* bias [[buffer(1)]],
                          device const float* offset [[buffer(2)]], device const float* threshold [[buffer(3)]],
                          device float* values [[buffer(4)]], device int* indices [[buffer(5)]],
                          device int* counts [[buffer(6)]], constant int& columns [[buffer(7)]],
                          constant int& splits [[buffer(8)]], constant int& stride [[buffer(9)]],
                          constant int& with [[buffer(10)]], constant int& activation [[buffer(11)]],
                          uint segment [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup int found[LANES];
    const int column = int(segment) * SEGMENT + int(index);
    float mine = 0;
    if (column < columns) {
        float gate = sum_of_splits(partials, splits, stride, column);
        float up = sum_of_splits(partials, splits, stride, columns + column);
        if (with & WITH_BIAS) {
            gate += bias[column];
            up += bias[columns + column];
        }
        mine = activated(gate, activation) * up;
    }
    list_active(mine, column, columns, offset, threshold, with, segment, index, simdgroup, lane, found, values, indices,
                counts);
}

// Of what `attend` made of chunks of positions:
//
//     attended  [chunks, columns]      sums of exp(score - largest) v
//     softmax   [chunks, heads, 2]     the largest score, and the sum of exp(score - largest)
kernel void collect_attended(device const float* attended [[buffer(0)]], device const float* softmax [[buffer(1)]],
                             device const float* offset [[buffer(2)]], device const float* threshold [[buffer(3)]],
                             device float* values [[buffer(4)]], device int* indices [[buffer(5)]],
                             device int* counts [[buffer(6)]], constant int& columns [[buffer(7)]],
                             constant int& head_dim [[buffer(8)]], constant int& chunks [[buffer(9)]],
                             constant int& with [[buffer(10)]], uint segment [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
    threadgroup int found[LANES];
    const int column = int(segment) * SEGMENT + int(index);
    float mine = 0;
    if (column < columns) {
        const int head = column / head_dim, heads = columns / head_dim;
        float largest = softmax[2 * head];
        for (int i = 1; i < chunks; ++i) largest = fmax(largest, softmax[2 * (i * heads + head)]);
        float sum = 0, weight = 0;
        for (int i = 0; i < chunks; ++i) {
            const float share = exp(softmax[2 * (i * heads + head)] - largest);
            sum += share * attended[i * columns + column];
            weight += share * softmax[2 * (i * heads + head) + 1];
        }
        mine = sum / weight;
    }
    list_active(mine, column, columns, offset, threshold, with, segment, index, simdgroup, lane, found, values, indices,
                counts);
}
