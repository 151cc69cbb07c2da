// What the kernels share. sources.py puts this file before the others: torch compiles one string.
//
// Every kernel is launched with whole threadgroups, of whole simdgroups. What differs between launches is told by ints
// and by the bits of `with`; of a buffer that a bit leaves out nothing is read. No floats are added atomically, and all
// sums have an order of their own: the same bits every run.

#include <metal_stdlib>

using namespace metal;

enum { LANES = 32 };

// Columns of a segment of a list of active columns, which one threadgroup makes:
//
//     values, indices   [ segment 0: 1024 | segment 1: 1024 | .. ]   of each the first counts[segment] entries are there
//     counts            [ segments ], and behind them of each segment the sum of its columns' levels [ segments ]
//
// An index has its column's level above the column's 24 bits: how many planes are read; 0: the column is read whole.
enum { SEGMENT = 1024, COLUMN_BITS = 24, LEVELS = 5 };

// Rows of a band, which are the weights of a superblock.
enum { BAND_ROWS = 256 };

enum {
    WITH_NORM = 1,
    WITH_BIAS = 2,
    WITH_OFFSET = 4,
    WITH_THRESHOLD = 8,     // without: every column is active
    WITH_PER_CHANNEL = 16,  // a threshold for each column, else one for all
    WITH_SUM = 32,          // the sum is written
    WITH_Q_NORM = 64,
    WITH_K_NORM = 128,
    WITH_CANDIDATES = 256,
    WITH_LEVELS = 512,  // a threshold for each level and column, [LEVELS, columns]
};

// A row's sum of what the splits of a product left, in order: partials [splits, stride].
inline float sum_of_splits(device const float* partials, int splits, int stride, int row) {
    float sum = 0;
    for (int i = 0; i < splits; ++i) sum += partials[i * stride + row];
    return sum;
}

inline float half_of(uint word, int shift) { return float(as_type<half>(ushort(word >> shift & 0xffff))); }
