// Matrices in zigzag order, as they are stored (SpQt, section 4.1.2): blocks uchar [bands, columns, 144].
//
//                column 0        column 1               column K - 1
//     band 0   | superblock    | superblock    | ... | superblock |      rows   0 .. 255
//     band 1   | superblock    | superblock    | ... | superblock |      rows 256 .. 511
//
// A superblock (Q4_K, see formats/codecs/q4_k.py), in words of 32 bits:
//
//     word 0         1 .. 3                        4 .. 35
//        | d, dmin | 8 scales, 8 mins, 6 bit each | word 4 + lane: bytes 4 lane .. 4 lane + 3 of the nibbles |
//
// Lane l has with its word four rows of sub-block 2 (l / 8) in the low nibbles, 64 (l / 8) + 4 (l % 8) + 0 .. 3, and
// the rows 32 further on, of the next sub-block, in the high ones.

enum { BLOCK_BYTES = 144, MOST_SIMDGROUPS = 8 };

inline int first_row_of(uint lane) { return 64 * int(lane / 8) + 4 * int(lane % 8); }

// What a lane needs of a superblock's header: steps and minima of its two sub-blocks.
struct Header {
    float scale[2], minimum[2];
};

inline Header header_of(device const uint* words, uint lane) {
    const uint ends = words[0], scales = words[1], minima = words[2], mixed = words[3];
    const float d = half_of(ends, 0), dmin = half_of(ends, 16);
    Header header;
    for (int i = 0; i < 2; ++i) {
        const uint sub = 2 * (lane / 8) + i, shift = 8 * (sub % 4);
        const uint low = mixed >> shift;
        const uint scale = sub < 4 ? scales >> shift & 63 : (low & 15) | (scales >> shift >> 6 & 3) << 4;
        const uint minimum = sub < 4 ? minima >> shift & 63 : (low >> 4 & 15) | (minima >> shift >> 6 & 3) << 4;
        header.scale[i] = d * float(scale);
        header.minimum[i] = dmin * float(minimum);
    }
    return header;
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
// active [1]: the number of active columns is added
kernel void zigzag_gemv(device const uchar* blocks [[buffer(0)]], device const float* values [[buffer(1)]],
                        device const int* indices [[buffer(2)]], device const int* counts [[buffer(3)]],
                        device float* partials [[buffer(4)]], device int* active [[buffer(5)]],
                        constant int& columns [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
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

    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, minimum[2] = {0, 0};
    device const uchar* band = blocks + ulong(group.y) * ulong(columns) * BLOCK_BYTES;
    while (left) {
        const int end = min(counts[segment], at + left);
        left -= end - at;
        for (; at < end; ++at) {
            const float x = values[segment * SEGMENT + at];
            device const uint* words =
                (device const uint*)(band + ulong(indices[segment * SEGMENT + at]) * BLOCK_BYTES);
            const Header header = header_of(words, lane);
            const uint nibbles = words[4 + lane];
            const float low = x * header.scale[0], high = x * header.scale[1];
            for (int i = 0; i < 4; ++i) {
                sum[i] += low * float(nibbles >> 8 * i & 15);
                sum[4 + i] += high * float(nibbles >> (8 * i + 4) & 15);
            }
            minimum[0] += x * header.minimum[0];
            minimum[1] += x * header.minimum[1];
        }
        at = 0;
        ++segment;
    }

    const int row = int(simdgroup) * BAND_ROWS + first_row_of(lane);
    for (int i = 0; i < 4; ++i) {
        sums[row + i] = sum[i] - minimum[0];
        sums[row + 32 + i] = sum[4 + i] - minimum[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device float* to = partials + (group.x * groups.y + group.y) * BAND_ROWS;
    for (uint r = index; r < BAND_ROWS; r += LANES * simdgroups) {
        float total = 0;
        for (uint i = 0; i < simdgroups; ++i) total += sums[i * BAND_ROWS + r];
        to[r] = total;
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
