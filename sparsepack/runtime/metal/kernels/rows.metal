// Matrices stored by rows, as they are stored: embedding, output matrix, change of basis.
//
//     weights uchar [rows, row_bytes]    type 0 .. 5: F32, F16, BF16, Q4_K, Q6_K, Q8_0 (formats/codecs/)

enum { F32 = 0, F16 = 1, BF16 = 2, Q4_K = 3, Q6_K = 4, Q8_0 = 5 };

struct Quad {
    float w[4];
};

inline uint two_bytes(device const uchar* at) { return *(device const ushort*)at; }
inline uint four_bytes(device const uchar* at) { return two_bytes(at) | two_bytes(at + 2) << 16; }
inline float half_at(device const uchar* at) { return float(*(device const half*)at); }

// Four columns of a row from 4 * quad on, zeros beyond its end. Blocks are whole quads.
inline Quad quad_of(device const uchar* row, int type, int quad, int columns) {
    Quad found;
    const int column = 4 * quad;
    if (type == Q4_K) {
        device const uchar* const block = row + column / 256 * 144;
        const int sub = column % 256 / 32, shift = 8 * (sub % 4);
        const uint scales = four_bytes(block + 4) >> shift, minima = four_bytes(block + 8) >> shift;
        const uint low = four_bytes(block + 12) >> shift;
        const uint scale = sub < 4 ? scales & 63 : (low & 15) | (scales >> 6 & 3) << 4;
        const uint minimum = sub < 4 ? minima & 63 : (low >> 4 & 15) | (minima >> 6 & 3) << 4;
        const uint nibbles = four_bytes(block + 16 + 32 * (sub / 2) + column % 32) >> 4 * (sub % 2);
        const float step = half_at(block) * float(scale), least = half_at(block + 2) * float(minimum);
        for (int i = 0; i < 4; ++i) found.w[i] = step * float(nibbles >> 8 * i & 15) - least;
    } else if (type == Q6_K) {
        device const uchar* const block = row + column / 256 * 210;
        const int half_block = column % 256 / 128, k = column % 128 / 32, at = column % 32;
        const uint low = four_bytes(block + 64 * half_block + 32 * (k % 2) + at) >> 4 * (k / 2);
        const uint high = four_bytes(block + 128 + 32 * half_block + at) >> 2 * k;
        const int scale = int(block[192 + 8 * half_block + at / 16 + 2 * k] ^ 128) - 128;
        const float step = half_at(block + 208) * float(scale);
        for (int i = 0; i < 4; ++i) {
            const uint q = (low >> 8 * i & 15) | (high >> 8 * i & 3) << 4;
            found.w[i] = step * float(int(q) - 32);
        }
    } else if (type == Q8_0) {
        device const uchar* const block = row + column / 32 * 34;
        const uint q = four_bytes(block + 2 + column % 32) ^ 0x80808080;
        const float d = half_at(block);
        for (int i = 0; i < 4; ++i) found.w[i] = d * float(int(q >> 8 * i & 255) - 128);
    } else {
        for (int i = 0; i < 4; ++i) {
            found.w[i] = 0;
            if (column + i >= columns) continue;
            if (type == F32) found.w[i] = ((device const float*)row)[column + i];
            if (type == F16) found.w[i] = float(((device const half*)row)[column + i]);
            if (type == BF16) found.w[i] = as_type<float>(uint(((device const ushort*)row)[column + i]) << 16);
        }
    }
    return found;
}

// Rows by their ids: out [ids, columns]. An id that is no row gives NaN.
//
//     grid (columns / 1024 rounded up, ids) threadgroups of 256 threads of four columns each
kernel void embed(device const int* ids [[buffer(0)]], device const uchar* weights [[buffer(1)]],
                  device float* out [[buffer(2)]], constant int& type [[buffer(3)]], constant int& rows [[buffer(4)]],
                  constant int& columns [[buffer(5)]], constant int& row_bytes [[buffer(6)]],
                  uint2 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
    const int quad = int(group.x * 256 + index), id = ids[group.y];
    if (4 * quad >= columns) return;
    Quad found;
    for (int i = 0; i < 4; ++i) found.w[i] = as_type<float>(0x7fc00000u);
    if (id >= 0 && id < rows) found = quad_of(weights + ulong(id) * ulong(row_bytes), type, quad, columns);
    for (int i = 0; i < 4; ++i) {
        if (4 * quad + i < columns) out[ulong(group.y) * ulong(columns) + ulong(4 * quad + i)] = found.w[i];
    }
}

enum { ROWS_OF_SIMDGROUP = 4, ROWS_SIMDGROUPS = 4, ROWS_OF_GROUP = ROWS_OF_SIMDGROUP * ROWS_SIMDGROUPS };

// Integers in the order of floats; a NaN is the largest, and zeros are equal.
inline uint order_of(float x) {
    const uint bits = as_type<uint>(x + 0.0f);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0xffffffff;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// y = W x.
//
//     grid rows / 16 rounded up, threadgroups of 128 threads: four rows for each simdgroup
//
// WITH_CANDIDATES: best [threadgroups] and best_row, the largest value of each threadgroup and its row, the lowest of equals
kernel void rows_product(device const uchar* weights [[buffer(0)]], device const float* x [[buffer(1)]],
                         device float* y [[buffer(2)]], device float* best [[buffer(3)]],
                         device int* best_row [[buffer(4)]], constant int& type [[buffer(5)]],
                         constant int& rows [[buffer(6)]], constant int& columns [[buffer(7)]],
                         constant int& row_bytes [[buffer(8)]], constant int& with [[buffer(9)]],
                         uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float found[ROWS_OF_GROUP];
    const int first = int(group) * ROWS_OF_GROUP + int(simdgroup) * ROWS_OF_SIMDGROUP;
    float sum[ROWS_OF_SIMDGROUP] = {0, 0, 0, 0};
    for (int quad = int(lane); 4 * quad < columns; quad += LANES) {
        float of_x[4];
        for (int i = 0; i < 4; ++i) of_x[i] = 4 * quad + i < columns ? x[4 * quad + i] : 0.0f;
        for (int r = 0; r < ROWS_OF_SIMDGROUP; ++r) {
            const ulong row = ulong(min(first + r, rows - 1));  // beyond the end nothing is written
            const Quad of_row = quad_of(weights + row * ulong(row_bytes), type, quad, columns);
            for (int i = 0; i < 4; ++i) sum[r] += of_row.w[i] * of_x[i];
        }
    }
    for (int r = 0; r < ROWS_OF_SIMDGROUP; ++r) {
        const float all = simd_sum(sum[r]);
        if (lane > 0) continue;
        found[simdgroup * ROWS_OF_SIMDGROUP + r] = all;
        if (first + r < rows) y[first + r] = all;
    }
    if (!(with & WITH_CANDIDATES)) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index > 0) return;
    int at = 0;
    for (int r = 1; r < min(int(ROWS_OF_GROUP), rows - int(group) * ROWS_OF_GROUP); ++r) {
        if (order_of(found[r]) > order_of(found[at])) at = r;
    }
    best[group] = found[at];
    best_row[group] = int(group) * ROWS_OF_GROUP + at;
}

// The likeliest of the candidates, the lowest id of equals; a NaN is larger than everything: id [1], top [1], its value.
//
//     one threadgroup of 1024 threads
kernel void pick_likeliest(device const float* best [[buffer(0)]], device const int* best_row [[buffer(1)]],
                           device int* id [[buffer(2)]], device float* top [[buffer(3)]],
                           constant int& candidates [[buffer(4)]], uint index [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint largest_of[LANES];
    threadgroup int first_of[LANES];
    // Candidates come in the order of their rows: the first of equals has the lowest.
    uint largest = 0;
    int first = 0x7fffffff;
    for (int i = int(index); i < candidates; i += 1024) {
        const uint order = order_of(best[i]);
        if (order > largest || first == 0x7fffffff) {
            largest = order;
            first = i;
        }
    }
    uint most = simd_max(largest);
    int at = simd_min(largest == most ? first : 0x7fffffff);
    if (lane == 0) {
        largest_of[simdgroup] = most;
        first_of[simdgroup] = at;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    most = simd_max(largest_of[lane]);
    at = simd_min(largest_of[lane] == most ? first_of[lane] : 0x7fffffff);
    if (index > 0) return;
    id[0] = best_row[at];
    top[0] = best[at];
}
