// Attention of one position, over keys and values in half precision: [kv_heads, context, head_dim].
//
//     partial sums of q, k, v + bias -> heads' norms -> rotary embedding -> q, and k and v into the cache
//     positions that are seen, in chunks: scores -> softmax -> values (collect_attended puts the chunks together)
//
// Launch: grid (chunks, kv_heads) threadgroups of 256 threads. A threadgroup has the queries of one key head; its
// simdgroups divide queries, and where there are fewer of them than simdgroups, positions too. The last chunk has the
// position itself, and its threadgroup puts key and value into the cache.
//
// At most 16 queries of a key head, at most 256 channels of a head, as many as are whole pairs.

enum { ATTEND_SIMDGROUPS = 8, MOST_QUERIES = 16, MOST_HEAD_DIM = 256, MOST_OF_LANE = MOST_HEAD_DIM / LANES };

// A head's channels: the sums of its rows and bias, normed where there is a norm, rotated by an angle's cos and sin.
// Halves are apart: channel i turns together with i + head_dim / 2. A lane has every 32nd pair.
struct Pairs {
    float first[MOST_OF_LANE / 2], second[MOST_OF_LANE / 2];
};

inline Pairs head_of(device const float* partials, device const float* bias, device const float* norm,
                     device const float* cos, device const float* sin, int splits, int stride, int row, int head_dim,
                     bool biased, bool normed, bool rotated, float eps, uint lane) {
    const int pairs = head_dim / 2;
    Pairs head;
    float squares = 0;
    for (int i = 0; i < MOST_OF_LANE / 2; ++i) {
        const int channel = int(lane) + i * LANES;
        head.first[i] = head.second[i] = 0;
        if (channel >= pairs) continue;
        head.first[i] = sum_of_splits(partials, splits, stride, row + channel);
        head.second[i] = sum_of_splits(partials, splits, stride, row + pairs + channel);
        if (biased) {
            head.first[i] += bias[row + channel];
            head.second[i] += bias[row + pairs + channel];
        }
        squares += head.first[i] * head.first[i] + head.second[i] * head.second[i];
    }
    const float scale = rsqrt(simd_sum(squares) / float(head_dim) + eps);
    for (int i = 0; i < MOST_OF_LANE / 2; ++i) {
        const int channel = int(lane) + i * LANES;
        if (channel >= pairs) continue;
        if (normed) {
            head.first[i] = head.first[i] * scale * norm[channel];
            head.second[i] = head.second[i] * scale * norm[pairs + channel];
        }
        if (rotated) {
            const float first = head.first[i], second = head.second[i];
            head.first[i] = first * cos[channel] - second * sin[channel];
            head.second[i] = second * cos[channel] + first * sin[channel];
        }
    }
    return head;
}

// first .. position are seen, in chunks of `chunk`. attended, softmax: see collect_attended
kernel void attend(device const float* partials [[buffer(0)]], device const float* bias [[buffer(1)]],
                   device const float* q_norm [[buffer(2)]], device const float* k_norm [[buffer(3)]],
                   device const float* cos [[buffer(4)]], device const float* sin [[buffer(5)]],
                   device half* keys [[buffer(6)]], device half* values [[buffer(7)]],
                   device float* attended [[buffer(8)]], device float* softmax [[buffer(9)]],
                   constant int& splits [[buffer(10)]], constant int& stride [[buffer(11)]],
                   constant int& heads [[buffer(12)]], constant int& kv_heads [[buffer(13)]],
                   constant int& head_dim [[buffer(14)]], constant int& context [[buffer(15)]],
                   constant int& position [[buffer(16)]], constant int& first [[buffer(17)]],
                   constant int& chunk [[buffer(18)]], constant int& with [[buffer(19)]],
                   constant float& eps [[buffer(20)]], uint2 group [[threadgroup_position_in_grid]],
                   uint2 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float q[MOST_QUERIES * MOST_HEAD_DIM];
    threadgroup float sums[ATTEND_SIMDGROUPS * MOST_HEAD_DIM];
    threadgroup float of_softmax[2 * ATTEND_SIMDGROUPS];
    const int queries = heads / kv_heads, kv_head = int(group.y), pairs = head_dim / 2;
    const bool last = group.x == groups.x - 1;
    device half* const head_keys = keys + ulong(kv_head) * ulong(context) * ulong(head_dim);
    device half* const head_values = values + ulong(kv_head) * ulong(context) * ulong(head_dim);
    device const float* const angle_cos = cos + position * pairs;
    device const float* const angle_sin = sin + position * pairs;

    // The queries' heads, then the key's and the value's own.
    for (int i = int(simdgroup); i < queries + (last ? 2 : 0); i += ATTEND_SIMDGROUPS) {
        const bool is_query = i<queries, is_value = i> queries;
        const int head = is_query ? kv_head * queries + i : heads + (is_value ? kv_heads : 0) + kv_head;
        const bool normed = !is_value && with & (is_query ? WITH_Q_NORM : WITH_K_NORM);
        const Pairs found = head_of(partials, bias, is_query ? q_norm : k_norm, angle_cos, angle_sin, splits, stride,
                                    head * head_dim, head_dim, with & WITH_BIAS, normed, !is_value, eps, lane);
        device half* const to = (is_value ? head_values : head_keys) + ulong(position) * ulong(head_dim);
        for (int j = 0; j < MOST_OF_LANE / 2; ++j) {
            const int channel = int(lane) + j * LANES;
            if (channel >= pairs) continue;
            if (is_query) {
                q[i * MOST_HEAD_DIM + channel] = found.first[j];
                q[i * MOST_HEAD_DIM + pairs + channel] = found.second[j];
            } else {
                to[channel] = half(found.first[j]);
                to[pairs + channel] = half(found.second[j]);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);

    const int begin = first + int(group.x) * chunk, end = min(begin + chunk, position + 1);
    const int slices = queries < ATTEND_SIMDGROUPS ? ATTEND_SIMDGROUPS / queries : 1;  // of the positions
    const float scale = rsqrt(float(head_dim));
    device float* const out = attended + (int(group.x) * heads + kv_head * queries) * head_dim;
    device float* const out_softmax = softmax + 2 * (int(group.x) * heads + kv_head * queries);
    for (int i = int(simdgroup); i < queries * slices; i += ATTEND_SIMDGROUPS) {
        const int query = i / slices;
        float largest = -INFINITY, weight = 0, sum[MOST_OF_LANE];
        for (int j = 0; j < MOST_OF_LANE; ++j) sum[j] = 0;
        for (int p = begin + i % slices; p < end; p += slices) {
            device const half* const key = head_keys + ulong(p) * ulong(head_dim);
            device const half* const value = head_values + ulong(p) * ulong(head_dim);
            float score = 0;
            for (int c = int(lane); c < head_dim; c += LANES) score += q[query * MOST_HEAD_DIM + c] * float(key[c]);
            score = simd_sum(score) * scale;
            const float larger = fmax(largest, score);
            const float before = exp(largest - larger), now = exp(score - larger);
            largest = larger;
            weight = weight * before + now;
            for (int j = 0; j < MOST_OF_LANE; ++j) {
                const int c = int(lane) + j * LANES;
                if (c < head_dim) sum[j] = sum[j] * before + now * float(value[c]);
            }
        }
        for (int j = 0; j < MOST_OF_LANE; ++j) {
            const int c = int(lane) + j * LANES;
            if (c >= head_dim) continue;
            if (slices > 1) {
                sums[i * MOST_HEAD_DIM + c] = sum[j];
            } else {
                out[query * head_dim + c] = sum[j];
            }
        }
        if (lane == 0) {
            if (slices > 1) {
                of_softmax[2 * i] = largest;
                of_softmax[2 * i + 1] = weight;
            } else {
                out_softmax[2 * query] = largest;
                out_softmax[2 * query + 1] = weight;
            }
        }
    }
    if (slices == 1) return;

    // Slices of a query in order. One that had no position has the weight 0.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(index); i < queries * head_dim; i += ATTEND_SIMDGROUPS * LANES) {
        const int query = i / head_dim, c = i % head_dim;
        float largest = -INFINITY, sum = 0, weight = 0;
        for (int j = query * slices; j < (query + 1) * slices; ++j) largest = fmax(largest, of_softmax[2 * j]);
        for (int j = query * slices; j < (query + 1) * slices; ++j) {
            const float share = exp(of_softmax[2 * j] - largest);
            sum += share * sums[j * MOST_HEAD_DIM + c];
            weight += share * of_softmax[2 * j + 1];
        }
        out[i] = sum;
        if (c) continue;
        out_softmax[2 * query] = largest;
        out_softmax[2 * query + 1] = weight;
    }
}
