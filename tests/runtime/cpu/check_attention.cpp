// Attention to all tokens and to listed ones, labels and selection, beside the plain instruction set; see
// check_kernels.cpp.
#include "check_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sparsepack {
namespace {

void check_attention(const Kernels& k) {
    for (int head_dim : {8, 16, 20, 64, 80, 128}) {
        for (int heads : {1, 2, 3, 4, 5, 7}) {
            for (int position : {0, 1, 6, 40, 300, 700}) {
                for (int positions : {1, 2, 5, 19}) {
                    int window = (int[]){0, 0, 1, 3, 50}[below(5)], total = position + positions;
                    float cap = (float[]){0, 0, 0.7f, 30}[below(4)];
                    int64_t q_stride = heads * head_dim + 3, kv_stride = head_dim + 16, y_stride = q_stride + 1;
                    std::vector<float> q = normals(positions * q_stride, 2), sinks = normals(heads, 3), y[2];
                    bool has_sinks = below(2);
                    std::vector<uint16_t> keys = halves(total * kv_stride), values = halves(total * kv_stride);
                    for (int s = 0; s < 2; s++) {
                        std::vector<float> scores((size_t)heads * positions * total);
                        y[s].assign(positions * y_stride, GUARD);
                        AttentionWork work = {q.data(),
                                              keys.data(),
                                              values.data(),
                                              y[s].data(),
                                              scores.data(),
                                              q_stride,
                                              kv_stride,
                                              y_stride,
                                              heads,
                                              head_dim,
                                              position,
                                              positions,
                                              window,
                                              1 / std::sqrt((float)head_dim),
                                              cap,
                                              nullptr,
                                              0,
                                              has_sinks ? sinks.data() : nullptr};
                        (s ? k : scalar_kernels).attention(&work);
                    }
                    check_near(y[1], y[0], k.name,
                               text("attention of %d heads of %d, position %d + %d, window %d", heads, head_dim,
                                    position, positions, window),
                               1e-5f);
                }
            }
        }
    }
}

void check_listed_attention(const Kernels& k) {
    for (int head_dim : {8, 20, 64, 128}) {
        for (int heads : {1, 2, 4, 7}) {
            for (int listed : {1, 2, 15, 16, 17, 255, 257, 600}) {
                int total = listed + below(2 * listed), kv_stride = head_dim + 16;
                std::vector<int32_t> tokens;
                for (int t = 0; t < total; t++)
                    if (below(total - t) < listed - (int)tokens.size()) tokens.push_back(t);
                std::vector<float> q = normals(heads * head_dim, 2), sinks = normals(heads, 3), y[2];
                std::vector<uint16_t> keys = halves(total * kv_stride), values = halves(total * kv_stride);
                for (int s = 0; s < 2; s++) {
                    std::vector<float> scores((size_t)heads * total);
                    y[s].assign(heads * head_dim + 16, GUARD);
                    AttentionWork work = {q.data(),
                                          keys.data(),
                                          values.data(),
                                          y[s].data(),
                                          scores.data(),
                                          0,
                                          kv_stride,
                                          0,
                                          heads,
                                          head_dim,
                                          total - 1,
                                          1,
                                          3,
                                          1 / std::sqrt((float)head_dim),
                                          listed % 2 ? 0 : 0.7f,
                                          tokens.data(),
                                          listed,
                                          listed % 3 ? nullptr : sinks.data()};
                    (s ? k : scalar_kernels).attention(&work);
                }
                check_near(y[1], y[0], k.name,
                           text("attention of %d heads of %d to %d of %d tokens", heads, head_dim, listed, total),
                           1e-5f);
            }
        }
    }
}

// To the bit: scores decide what is read.
void check_labels(const Kernels& k) {
    for (int channels : {1, 4, 8, 12, 16, 23, 24, 32, 33, 40, 64, 128}) {
        int padded = (channels + 7) / 8 * 8, bytes = padded / 2;
        for (int count : {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 257, 1000}) {
            std::vector<uint8_t> codes[2];
            std::vector<uint16_t> scales[2];
            std::vector<int16_t> scores[2];
            std::vector<int8_t> query(padded);
            for (int c = 0; c < channels; c++) query[c] = (int8_t)(below(255) - 127);
            std::vector<uint16_t> keys = halves((size_t)count * 128);
            for (int t = 0; t < count; t += 5) {  // zero, denormal, large
                for (int c = 0; c < 128; c++) keys[t * 128 + c] = half(normal() * (float[]){0, 1e-7f, 5e4f}[t % 3]);
            }
            std::vector<int32_t> at(channels);
            for (int c = 0; c < channels; c++) at[c] = c * 128 / channels;
            for (int s = 0; s < 2; s++) {
                const Kernels& set = s ? k : scalar_kernels;
                codes[s].assign(count * bytes + 16, 77), scales[s].assign(count + 16, 77),
                    scores[s].assign(count + 16, 77);
                for (int t = 0; t < count; t++)
                    set.label_key(&keys[t * 128], at.data(), channels, &codes[s][t * bytes], &scales[s][t]);
                set.label_scores(query.data(), padded, codes[s].data(), scales[s].data(), count, scores[s].data());
            }
            std::string what = text("%d labels of %d channels", count, channels);
            check(codes[0] == codes[1] && scales[0] == scales[1], k.name, what);
            check(scores[0] == scores[1], k.name, what + ": scores");
        }
    }
}

void check_selection(const Kernels& k) {
    for (int count : {1, 2, 8, 15, 16, 17, 32, 33, 100, 1000, 40000}) {
        for (int kinds : {1, 2, 50, 65536}) {  // of scores
            for (int wanted : {1, count / 16, count / 2, count - 1, count}) {
                if (wanted < 1) continue;
                std::vector<int16_t> scores(count);
                for (int16_t& score : scores) score = (int16_t)(below(kinds) - kinds / 2);
                std::vector<int32_t> tokens[2], order(count);
                for (int s = 0; s < 2; s++) {
                    tokens[s].assign(wanted + 1, -7);
                    (s ? k : scalar_kernels).select_tokens(scores.data(), count, wanted, 100, tokens[s].data());
                }
                std::string what = text("%d of %d scores of %d kinds", wanted, count, kinds);
                check(tokens[0] == tokens[1], k.name, what);
                for (int t = 0; t < count; t++) order[t] = t;
                std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
                std::sort(order.begin(), order.begin() + wanted);
                for (int n = 0; n < wanted; n++) order[n] += 100;
                check(std::equal(order.begin(), order.begin() + wanted, tokens[0].begin()), "scalar", what);
            }
        }
    }
}

}  // namespace

void check_attention_kernels(const Kernels& k) {
    check_attention(k);
    check_listed_attention(k);
    check_labels(k);
    check_selection(k);
}

}  // namespace sparsepack
