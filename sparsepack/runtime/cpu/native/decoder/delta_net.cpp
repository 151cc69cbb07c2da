#include "decoder/delta_net.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

namespace sparsepack {
namespace {

constexpr float L2_EPS = 1e-6f;  // runtime/reference/delta_net.py

// `count` channels from `channel` on of a convolution [taps][stride], in place; x is kept in `inputs`.
void convolve(const std::vector<float>& conv, int32_t taps, int64_t stride, DeltaState& state, int64_t channel,
              int32_t count, float* x) {
    const float* weight = conv.data() + channel;
    float* input = state.inputs.data() + channel;
    const int32_t before = taps - 1;
    for (int32_t c = 0; c < count; ++c) {
        float sum = 0, latest = x[c];
        for (int32_t tap = 0; tap < before; ++tap) {
            sum += input[tap * stride + c] * weight[tap * stride + c];
            input[tap * stride + c] = tap + 1 < before ? input[(tap + 1) * stride + c] : latest;
        }
        x[c] = sum + latest * weight[before * stride + c];
    }
}

// x / sqrt(sum of squares + eps) * scale
void normalise(float* x, int32_t n, float scale) {
    float sums[8] = {};
    for (int32_t i = 0; i < n; ++i) sums[i % 8] += x[i] * x[i];
    float sum = 0;
    for (float part : sums) sum += part;
    scale /= sqrtf(sum + L2_EPS);
    for (int32_t i = 0; i < n; ++i) x[i] *= scale;
}

float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

}  // namespace

void DeltaState::clear() {
    std::fill_n(state.data(), state.size(), 0.0f);
    std::fill_n(inputs.data(), inputs.size(), 0.0f);
}

void DeltaState::copy(const DeltaState& other) {
    std::copy_n(other.state.data(), state.size(), state.data());
    std::copy_n(other.inputs.data(), inputs.size(), inputs.data());
}

void DeltaStates::clear() {
    for (DeltaState& layer : layers) layer.clear();
    tokens = 0;
}

void DeltaStates::copy(const DeltaStates& other) {
    if (this == &other) return;
    for (size_t i = 0; i < layers.size(); ++i) layers[i].copy(other.layers[i]);
    tokens = other.tokens;
}

void DeltaStates::begin(int64_t length) {
    if (layers.empty()) return;
    if (!length && tokens) clear();
    if (tokens != length)
        throw std::runtime_error("the state of a sequence is not that after its tokens; begin the sequence anew");
}

void mix_head(const Kernels& k, const DeltaNet& net, DeltaState& state, int32_t head, int32_t positions,
              const DeltaRows& rows, const float* gates, float eps, float* y, float* scratch) {
    const DeltaShape& s = net.shape;
    const int32_t ratio = s.ratio(), width = ratio * s.value_dim, first = head * ratio;
    float *q = scratch, *key = q + s.key_dim, *v = key + s.key_dim, *z = v + width, *ones = z + width;
    float* made = ones + width;
    std::fill_n(ones, width, 1.0f);
    auto activate = [&](float* x, int32_t count) {
        for (int32_t i = 0; i < count; i += width) {
            int32_t n = std::min(width, count - i);
            k.gate(SILU, x + i, ones, n, x + i);
        }
    };
    for (int32_t p = 0; p < positions; ++p) {
        const int64_t at[3] = {int64_t(head) * s.key_dim, s.keys() + int64_t(head) * s.key_dim,
                               2 * int64_t(s.keys()) + int64_t(first) * s.value_dim};
        rows(p, at[0], s.key_dim, q);
        rows(p, at[1], s.key_dim, key);
        rows(p, at[2], width, v);
        rows(p, s.channels() + int64_t(first) * s.value_dim, width, z);
        convolve(net.conv, s.taps, s.channels(), state, at[0], s.key_dim, q);
        convolve(net.conv, s.taps, s.channels(), state, at[1], s.key_dim, key);
        convolve(net.conv, s.taps, s.channels(), state, at[2], width, v);
        activate(q, 2 * s.key_dim + width);  // side by side
        normalise(q, s.key_dim, 1 / sqrtf(float(s.key_dim)));
        normalise(key, s.key_dim, 1);
        for (int32_t i = 0; i < ratio; ++i) {
            int32_t of = first + i;
            const float* gate = gates + int64_t(p) * 2 * s.value_heads + of;
            DeltaWork work;
            work.q = q, work.k = key, work.v = v + i * s.value_dim;
            work.beta = 1 / (1 + expf(-gate[0]));
            work.decay = expf(-net.rate[of] * softplus(gate[s.value_heads] + net.bias[of]));
            work.key_dim = s.key_dim, work.value_dim = s.value_dim;
            work.state = state.state.data() + int64_t(of) * s.key_dim * s.value_dim;
            work.y = made;
            k.delta_rule(&work);
            k.rms_norm(made, net.norm.data(), s.value_dim, eps, made);
            float* to = y + int64_t(p) * s.values() + int64_t(of) * s.value_dim;
            k.gate(SILU, z + i * s.value_dim, made, s.value_dim, to);
        }
    }
}

void mix_channels(const ShortConv& of, DeltaState& state, int32_t part, int32_t positions, const DeltaRows& rows,
                  float* y, float* scratch) {
    const int32_t first = part * ShortConv::AT_ONCE, count = std::min(ShortConv::AT_ONCE, of.channels - first);
    float *b = scratch, *c = b + count, *u = c + count;
    for (int32_t p = 0; p < positions; ++p) {
        rows(p, first, count, b);
        rows(p, int64_t(of.channels) + first, count, c);
        rows(p, 2 * int64_t(of.channels) + first, count, u);
        for (int32_t i = 0; i < count; ++i) u[i] *= b[i];
        convolve(of.conv, of.taps, of.channels, state, first, count, u);
        float* to = y + int64_t(p) * of.channels + first;
        for (int32_t i = 0; i < count; ++i) to[i] = c[i] * u[i];
    }
}

}  // namespace sparsepack
