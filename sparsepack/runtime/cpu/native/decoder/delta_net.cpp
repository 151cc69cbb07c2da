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

void convolve_channels(const Kernels& k, const Mamba& of, DeltaState& state, int32_t part, int32_t positions,
                       float* rows) {
    const int32_t first = part * Mamba::AT_ONCE, count = std::min(Mamba::AT_ONCE, of.channels() - first);
    float ones[Mamba::AT_ONCE];
    std::fill_n(ones, count, 1.0f);
    for (int32_t p = 0; p < positions; ++p) {
        float* x = rows + p * of.rows() + of.inner() + first;
        convolve(of.conv, of.taps, of.channels(), state, first, count, x);
        for (int32_t i = 0; i < count; ++i) x[i] += of.conv_bias[first + i];
        k.gate(SILU, x, ones, count, x);
    }
}

void step_head(const Kernels& k, const Mamba& of, DeltaState& state, int32_t head, int32_t positions, const float* rows,
               float* y, float* scratch) {
    const int32_t n = of.head_dim, group = head / (of.heads / of.groups);
    for (int32_t p = 0; p < positions; ++p) {
        const float* row = rows + p * of.rows();
        const float* x = row + of.inner() + int64_t(head) * n;
        const float step = softplus(row[of.inner() + of.channels() + head] + of.bias[head]);
        for (int32_t i = 0; i < n; ++i) scratch[i] = step * x[i];
        DeltaWork work;
        work.k = row + 2 * int64_t(of.inner()) + int64_t(group) * of.state;
        work.q = work.k + int64_t(of.groups) * of.state;
        work.v = scratch;
        work.decay = expf(-of.rate[head] * step), work.beta = 1;
        work.key_dim = of.state, work.value_dim = n;
        work.state = state.state.data() + int64_t(head) * of.state * n;
        work.y = y + p * int64_t(of.inner()) + int64_t(head) * n;
        k.state_space(&work);
        for (int32_t i = 0; i < n; ++i) work.y[i] += of.skip[head] * x[i];
    }
}

void norm_outputs(const Kernels& k, const Mamba& of, int32_t group, const float* rows, float eps, float* y) {
    const int32_t n = of.inner() / of.norms, first = group * n;
    k.gate(SILU, rows + first, y + first, n, y + first);
    k.rms_norm(y + first, of.norm.data() + first, n, eps, y + first);
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
