// Matrices in zigzag order, as they are stored (SpQt, section 4.1.2): blocks uchar [bands, columns, 144].
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

enum { BLOCK_BYTES = 144, MOST_SIMDGROUPS = 8, COLUMNS_AT_ONCE = 4 };

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

// Part of so many things: as many for everyone, and one more for the first ones.
struct Share {
    int begin, count;
};

inline Share share_of(int all, int number, int shares) {
    const int each = all / shares, remainder = all % shares;
    return Share{number * each + min(number, remainder), each + int(number < remainder)};
}

// Partial sums of y = W[:, active] x[active] (SpQt, sections 4.2.2 and 4.2.3): float [splits, bands * 256].
//
//     grid (splits, bands) threadgroups of 1 .. 8 simdgroups; a band's active columns are divided evenly among all of
//     its simdgroups, whichever columns they are
//
//     superblocks of active columns -> sums of a lane's 8 rows -> of a simdgroup -> of the threadgroup -> partials
//
// active [1]: the number of active columns is added; row_scale [bands * 256]: what the sums of rows are multiplied by,
// read where has_row_scale
kernel void zigzag_gemv(device const uchar* blocks [[buffer(0)]], device const float* values [[buffer(1)]],
                        device const int* indices [[buffer(2)]], device const int* counts [[buffer(3)]],
                        device float* partials [[buffer(4)]], device int* active [[buffer(5)]],
                        constant int& columns [[buffer(6)]], device const float* row_scale [[buffer(7)]],
                        constant int& has_row_scale [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                        uint2 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float sums[MOST_SIMDGROUPS * BAND_ROWS];
    const int segments = (columns + SEGMENT - 1) / SEGMENT;
    int listed = 0;
    for (int i = int(lane); i < segments; i += LANES) listed += counts[i];
    listed = simd_sum(listed);
    if (group.x + group.y + index == 0) active[0] += listed;

    const Share share = share_of(listed, int(group.x * simdgroups + simdgroup), int(groups.x * simdgroups));
    int segment = 0, at = share.begin, left = share.count;
    while (left && at >= counts[segment]) at -= counts[segment++];

    Sums of_lane = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0}};
    device const uchar* band = blocks + ulong(group.y) * ulong(columns) * BLOCK_BYTES;
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

    const int row = int(simdgroup) * BAND_ROWS + first_row_of(lane);
    for (int i = 0; i < 4; ++i) {
        const float unit = i % 2 ? 1.0f / 256.0f : 1.0f;
        sums[row + i] = of_lane.low[i] * unit - of_lane.minimum[0];
        sums[row + 32 + i] = of_lane.high[i] * (unit / 16.0f) - of_lane.minimum[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device float* to = partials + (group.x * groups.y + group.y) * BAND_ROWS;
    for (uint r = index; r < BAND_ROWS; r += LANES * simdgroups) {
        float total = 0;
        for (uint i = 0; i < simdgroups; ++i) total += sums[i * BAND_ROWS + r];
        to[r] = has_row_scale ? total * row_scale[group.y * BAND_ROWS + r] : total;
    }
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
