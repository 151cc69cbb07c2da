// Matrices in zigzag order, as they are stored (SpQt, section 4.1.2): blocks uchar [bands, columns, 144], or with planes
// [bands, columns, 200].
//
//                column 0        column 1               column K - 1
//     band 0   | superblock    | superblock    | ... | superblock |      rows   0 .. 255
//     band 1   | superblock    | superblock    | ... | superblock |      rows 256 .. 511
//
// A superblock (Q4_K, see formats/blocks/q4_k.py), in words of 32 bits:
//
//     word 0         1 .. 3                        4 .. 35
//        | d, dmin | 8 scales, 8 mins, 6 bit each | word 4 + lane: bytes 4 lane .. 4 lane + 3 of the nibbles |
//
// Lane l has with its word four rows of sub-block 2 (l / 8) in the low nibbles, 64 (l / 8) + 4 (l % 8) + 0 .. 3, and
// the rows 32 further on, of the next sub-block, in the high ones.

enum { BLOCK_BYTES = 144, PLANES_BYTES = 200, MOST_SIMDGROUPS = 8, COLUMNS_AT_ONCE = 4 };

inline int first_row_of(uint lane) { return 64 * int(lane / 8) + 4 * int(lane % 8); }

// What a lane needs of a superblock's header: steps and minima of its two sub-blocks.
struct Header {
    float scale[2], minimum[2];
};

inline Header header_of(device const uint* words, uint lane) {
    // The two sub-blocks' bytes are neighbours: both at once.
    const uint pair = lane / 8, shift = 16 * (pair % 2);
    const uint scale_bytes = words[1] >> shift, minimum_bytes = words[2] >> shift, mixed = words[3] >> shift;
    const bool whole = pair < 2;  // six bits together, else four and two
    const uint scales = whole ? scale_bytes & 0x3f3f : (mixed & 0x0f0f) | (scale_bytes & 0xc0c0) >> 2;
    const uint minima = whole ? minimum_bytes & 0x3f3f : (mixed >> 4 & 0x0f0f) | (minimum_bytes & 0xc0c0) >> 2;
    const float d = half_of(words[0], 0), dmin = half_of(words[0], 16);
    Header header;
    for (int i = 0; i < 2; ++i) {
        header.scale[i] = d * float(scales >> 8 * i & 255);
        header.minimum[i] = dmin * float(minima >> 8 * i & 255);
    }
    return header;
}

// The sums of a lane's rows. Nibbles are added where they stand in 16 bits: of the rows of one sub-block the second and
// the fourth count 256 times, all of the other sub-block 16 times as much, which is taken back in the end.
struct Sums {
    float low[4], high[4], minimum[2];
};

// Add columns that are listed one behind the other; all of their superblocks are on their way at once.
template <int COLUMNS>
inline void add_columns(thread Sums& sums, device const uchar* band, device const float* values,
                        device const int* indices, uint lane) {
    float x[COLUMNS];
    Header header[COLUMNS];
    uint nibbles[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) {
        device const uint* words = (device const uint*)(band + ulong(indices[c]) * BLOCK_BYTES);
        x[c] = values[c];
        nibbles[c] = words[4 + lane];
        header[c] = header_of(words, lane);
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const float low = x[c] * header[c].scale[0], high = x[c] * header[c].scale[1];
        for (int i = 0; i < 2; ++i) {
            const uint two = nibbles[c] >> 16 * i;
            sums.low[2 * i] += low * float(two & 0x000f);
            sums.low[2 * i + 1] += low * float(two & 0x0f00);
            sums.high[2 * i] += high * float(two & 0x00f0);
            sums.high[2 * i + 1] += high * float(two & 0xf000);
        }
        sums.minimum[0] += x[c] * header[c].minimum[0];
        sums.minimum[1] += x[c] * header[c].minimum[1];
    }
}

// The lane's rows of a simdgroup's sums [BAND_ROWS].
inline void put(thread const Sums& sums, threadgroup float* rows, uint lane) {
    const int row = first_row_of(lane);
    for (int i = 0; i < 4; ++i) {
        const float unit = i % 2 ? 1.0f / 256.0f : 1.0f;
        rows[row + i] = sums.low[i] * unit - sums.minimum[0];
        rows[row + 32 + i] = sums.high[i] * (unit / 16.0f) - sums.minimum[1];
    }
}

// A superblock with planes (Q6_P, see formats/blocks/q6_p.py), in words of 32 bits:
//
//     word 0                1               2 .. 17   18 .. 25, 26 .. 33, 34 .. 41, 42 .. 49
//        | s of groups      | b of groups   | plane 1 | planes 2 to 5, of one bit each        |
//
// Lane l has two bytes of plane 1, b = 0 and 1, with bits 2 g and 2 g + 1 of the rows 64 g + 2 l + b, g = 0 .. 3; of the
// other planes the two bytes l % 16, whose even bits are those rows' for l < 16, and whose odd bits are for l >= 16.

// Two planes of one bit as one like plane 1: a lane's two bytes.
inline uint two_bits(uint upper, uint lower, uint lane) {
    const uint shift = lane / 16;
    return (upper >> shift & 0x5555) << 1 | (lower >> shift & 0x5555);
}

// What a column's header says of its four groups, for an input x at a level: steps of the lowest bit of 6, and what is
// added to each row of a group.
struct Groups {
    float step[4], middle[4];
};

inline Groups groups_of(device const uint* words, float x, int level) {
    const float half_steps = level == 1 ? 90.0f : 128.0f - float(64 >> level);
    Groups groups;
    for (int g = 0; g < 4; ++g) {
        const uint s = words[0] >> 8 * g & 255, b = words[1] >> 8 * g & 255;
        groups.step[g] = x * as_type<float>((s << 20) + (b >> 6 << 18) + (103u << 23));
        const int m = (int(b << 26) >> 24) + 2;
        groups.middle[g] = groups.step[g] * (float(m) - half_steps);
    }
    return groups;
}

// The planes of a column that a level reads, of a lane's rows: the upper 4 bits of each row, those of even groups and those of
// odd ones a nibble each, and the lower two like plane 1. Planes that are not read are zeros.
struct Planes {
    uint even, odd, lower;
};

inline Planes planes_of(device const uint* words, int level, uint lane) {
    device const ushort* halves = (device const ushort*)(words + 2);
    device const ushort* single = halves + 32 + lane % 16;
    const uint first = halves[lane];
    const uint second = two_bits(level > 1 ? uint(single[0]) : 0, level > 2 ? uint(single[16]) : 0, lane);
    Planes planes;
    planes.even = (first & 0x3333) << 2 | (second & 0x3333);
    planes.odd = (first & 0xcccc) | (second >> 2 & 0x3333);
    planes.lower = two_bits(level > 3 ? uint(single[32]) : 0, level > 4 ? uint(single[48]) : 0, lane);
    return planes;
}

// The sums of a lane's rows, of each b and g: bits are added where they stand, so that they count 256^b 16^(g / 2) times.
struct PlaneSums {
    float row[2][4], middle[4];
};

template <int COLUMNS>
inline void add_columns(thread PlaneSums& sums, device const uchar* band, device const float* values,
                        device const int* indices, uint lane) {
    int level[COLUMNS];
    Groups groups[COLUMNS];
    Planes planes[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = indices[c] & ((1 << COLUMN_BITS) - 1);
        level[c] = indices[c] >> COLUMN_BITS;
        if (!level[c]) level[c] = LEVELS;
        device const uint* words = (device const uint*)(band + ulong(column) * PLANES_BYTES);
        planes[c] = planes_of(words, level[c], lane);
        groups[c] = groups_of(words, values[c], level[c]);
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const float upper = level[c] == 1 ? 15.0f : 16.0f;  // the first plane alone has 60 quarters of a step for 64
        for (int g = 0; g < 4; ++g) {
            const uint bits = g % 2 ? planes[c].odd : planes[c].even;
            const float step = groups[c].step[g];
            for (int b = 0; b < 2; ++b) sums.row[b][g] += upper * step * float(bits & 15u << (8 * b + g / 2 * 4));
            if (level[c] > 3) {
                const float lower = g % 2 ? step : 4.0f * step;  // those of odd groups stand two bits higher
                for (int b = 0; b < 2; ++b) sums.row[b][g] += lower * float(planes[c].lower & 3u << (8 * b + 2 * g));
            }
            sums.middle[g] += groups[c].middle[g];
        }
    }
}

inline void put(thread const PlaneSums& sums, threadgroup float* rows, uint lane) {
    for (int g = 0; g < 4; ++g) {
        const float unit = g / 2 ? 1.0f / 16.0f : 1.0f;
        for (int b = 0; b < 2; ++b) {
            const float scale = b ? unit / 256.0f : unit;
            rows[64 * g + 2 * int(lane) + b] = sums.row[b][g] * scale + sums.middle[g];
        }
    }
}

// Part of so many things: as many for everyone, and one more for the first ones.
struct Share {
    int begin, count;
};

inline Share share_of(int all, int number, int shares) {
    const int each = all / shares, remainder = all % shares;
    return Share{number * each + min(number, remainder), each + int(number < remainder)};
}

// The sum of the segments' counts.
inline int listed_in(device const int* counts, int columns, uint lane) {
    int listed = 0;
    for (int i = int(lane); i < (columns + SEGMENT - 1) / SEGMENT; i += LANES) listed += counts[i];
    return simd_sum(listed);
}

// Partial sums of y = W[:, active] x[active] (SpQt, sections 4.2.2 and 4.2.3): float [splits, bands * 256].
//
//     grid (splits, bands) threadgroups of 1 .. 8 simdgroups; a band's active columns are divided evenly among all of
//     its simdgroups, whichever columns they are
//
//     superblocks of active columns -> sums of a lane's 8 rows -> of a simdgroup -> of the threadgroup -> partials
//
// block_bytes: of a superblock; listed: active columns; sums [simdgroups * BAND_ROWS]
// row_scale [bands * 256]: what the sums of rows are multiplied by, read where has_row_scale
template <typename Of>
inline void multiply(Of of_lane, int block_bytes, device const uchar* blocks, device const float* values,
                     device const int* indices, device const int* counts, int listed, device float* partials,
                     int columns, device const float* row_scale, bool has_row_scale, threadgroup float* sums,
                     uint2 group, uint2 groups, uint index, uint simdgroup, uint simdgroups, uint lane) {
    const Share share = share_of(listed, int(group.x * simdgroups + simdgroup), int(groups.x * simdgroups));
    int segment = 0, at = share.begin, left = share.count;
    while (left && at >= counts[segment]) at -= counts[segment++];

    device const uchar* band = blocks + ulong(group.y) * ulong(columns) * ulong(block_bytes);
    while (left) {
        const int end = min(counts[segment], at + left);
        left -= end - at;
        device const float* x = values + segment * SEGMENT;
        device const int* column = indices + segment * SEGMENT;
        for (; at + COLUMNS_AT_ONCE <= end; at += COLUMNS_AT_ONCE) {
            add_columns<COLUMNS_AT_ONCE>(of_lane, band, x + at, column + at, lane);
        }
        for (; at < end; ++at) add_columns<1>(of_lane, band, x + at, column + at, lane);
        at = 0;
        ++segment;
    }

    put(of_lane, sums + simdgroup * BAND_ROWS, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device float* to = partials + (group.x * groups.y + group.y) * BAND_ROWS;
    for (uint r = index; r < BAND_ROWS; r += LANES * simdgroups) {
        float total = 0;
        for (uint i = 0; i < simdgroups; ++i) total += sums[i * BAND_ROWS + r];
        to[r] = has_row_scale ? total * row_scale[group.y * BAND_ROWS + r] : total;
    }
}

// active [1]: the number of active columns is added
kernel void zigzag_gemv(device const uchar* blocks [[buffer(0)]], device const float* values [[buffer(1)]],
                        device const int* indices [[buffer(2)]], device const int* counts [[buffer(3)]],
                        device float* partials [[buffer(4)]], device int* active [[buffer(5)]],
                        constant int& columns [[buffer(6)]], device const float* row_scale [[buffer(7)]],
                        constant int& has_row_scale [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                        uint2 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float sums[MOST_SIMDGROUPS * BAND_ROWS];
    const int listed = listed_in(counts, columns, lane);
    if (group.x + group.y + index == 0) active[0] += listed;
    const Sums none = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0}};
    multiply(none, BLOCK_BYTES, blocks, values, indices, counts, listed, partials, columns, row_scale,
             has_row_scale != 0, sums, group, groups, index, simdgroup, simdgroups, lane);
}

// The same of a matrix with planes, each column at its level. active [1]: the bytes that one row of superblocks is read of
// are added, 72 of a column at level 1 and 32 more for each level above it.
kernel void planes_gemv(device const uchar* blocks [[buffer(0)]], device const float* values [[buffer(1)]],
                        device const int* indices [[buffer(2)]], device const int* counts [[buffer(3)]],
                        device float* partials [[buffer(4)]], device int* active [[buffer(5)]],
                        constant int& columns [[buffer(6)]], device const float* row_scale [[buffer(7)]],
                        constant int& has_row_scale [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                        uint2 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float sums[MOST_SIMDGROUPS * BAND_ROWS];
    const int listed = listed_in(counts, columns, lane);
    const int levels = listed_in(counts + (columns + SEGMENT - 1) / SEGMENT, columns, lane);
    if (group.x + group.y + index == 0) active[0] += 40 * listed + 32 * levels;
    const PlaneSums none = {{{0, 0, 0, 0}, {0, 0, 0, 0}}, {0, 0, 0, 0}};
    multiply(none, PLANES_BYTES, blocks, values, indices, counts, listed, partials, columns, row_scale,
             has_row_scale != 0, sums, group, groups, index, simdgroup, simdgroups, lane);
}

// The transpose of some bands, dense, for products with many vectors: out [columns, bands here * 256].
//
//     grid (columns / 8 rounded up, bands here) threadgroups of 256 threads: a column for each simdgroup
kernel void zigzag_decode(device const uchar* blocks [[buffer(0)]], device float* out [[buffer(1)]],
                          constant int& columns [[buffer(2)]], constant int& first_band [[buffer(3)]],
                          uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const int column = int(8 * group.x + simdgroup);
    if (column >= columns) return;
    const ulong block = ulong(first_band + int(group.y)) * ulong(columns) + ulong(column);
    device const uint* words = (device const uint*)(blocks + block * BLOCK_BYTES);
    const Header header = header_of(words, lane);
    const uint nibbles = words[4 + lane];
    device float* to = out + (ulong(column) * groups.y + group.y) * BAND_ROWS + first_row_of(lane);
    for (int i = 0; i < 4; ++i) {
        to[i] = header.scale[0] * float(nibbles >> 8 * i & 15) - header.minimum[0];
        to[32 + i] = header.scale[1] * float(nibbles >> (8 * i + 4) & 15) - header.minimum[1];
    }
}

// The same of a matrix with planes, as a reader of so many has it.
kernel void planes_decode(device const uchar* blocks [[buffer(0)]], device float* out [[buffer(1)]],
                          constant int& columns [[buffer(2)]], constant int& first_band [[buffer(3)]],
                          constant int& level [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                          uint2 groups [[threadgroups_per_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    const int column = int(8 * group.x + simdgroup);
    if (column >= columns) return;
    const ulong block = ulong(first_band + int(group.y)) * ulong(columns) + ulong(column);
    device const uint* words = (device const uint*)(blocks + block * PLANES_BYTES);
    const Groups of = groups_of(words, 1.0f, level);
    const Planes planes = planes_of(words, level, lane);
    device float* to = out + (ulong(column) * groups.y + group.y) * BAND_ROWS + 2 * lane;
    for (int g = 0; g < 4; ++g) {
        for (int b = 0; b < 2; ++b) {
            const uint upper = (g % 2 ? planes.odd : planes.even) >> (8 * b + g / 2 * 4) & 15;
            const uint lower = planes.lower >> (8 * b + 2 * g) & 3;
            to[64 * g + b] = of.step[g] * float(upper * (level == 1 ? 15 : 16) + 4 * lower) + of.middle[g];
        }
    }
}
