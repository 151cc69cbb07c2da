// Blocks that keep a state of each sequence in place of keys and values: gated delta nets, state-space models and short
// convolutions (models/blocks.py, DeltaNet, Mamba and ShortConv; runtime/reference/delta_net.py says what is computed).
#pragma once
#include "kernels/kernels.h"
#include "memory/buffer.h"

#include <stdint.h>

#include <functional>
#include <vector>

namespace sparsepack {

struct DeltaShape {
    int32_t key_heads, value_heads, key_dim, value_dim, taps;

    int32_t values() const noexcept { return value_heads * value_dim; }
    int32_t keys() const noexcept { return key_heads * key_dim; }
    int32_t channels() const noexcept { return 2 * keys() + values(); }
    int32_t ratio() const noexcept { return value_heads / key_heads; }
    // Rows of attn_in: queries, keys and values of all heads, then gates of the output.
    int32_t rows() const noexcept { return channels() + values(); }
    // Floats that `mix` needs of a thread.
    int64_t scratch() const noexcept { return 2 * int64_t(key_dim) + 3 * int64_t(ratio()) * value_dim + value_dim; }
};

// What a block has of it. Where positions are many, a thread takes one key head and the value heads that read it through
// all of them.
struct DeltaNet {
    DeltaShape shape;
    const Rows* gates;              // F32 [2 value_heads][hidden]: what makes beta, then what makes the decay
    std::vector<float> conv;        // [taps][channels]
    std::vector<float> rate, bias;  // [value_heads]: decay = exp(-rate softplus(gate + bias))
    std::vector<float> norm;        // [value_dim]
};

// A gated short convolution: rows of attn_in are b, c and u of all channels.
struct ShortConv {
    static constexpr int32_t AT_ONCE = 64;  // channels that a thread takes together

    int32_t channels, taps;
    std::vector<float> conv;  // [taps][channels]

    int64_t rows() const noexcept { return 3 * int64_t(channels); }
    int32_t parts() const noexcept { return (channels + AT_ONCE - 1) / AT_ONCE; }
    static constexpr int64_t scratch() noexcept { return 3 * AT_ONCE; }  // floats that `mix_channels` needs of a thread
};

// A state-space model (Mamba-2). Its three parts are done one after the other, each shared out, from rows of attn_in
// [positions][rows] to what enters attn_out [positions][inner]: channels, heads, groups of channels that are normed.
struct Mamba {
    static constexpr int32_t AT_ONCE = 64;  // channels that a thread takes together

    int32_t heads, head_dim, groups, state, taps, norms;
    std::vector<float> conv, conv_bias;   // [taps][channels], [channels]
    std::vector<float> rate, bias, skip;  // [heads]
    std::vector<float> norm;              // [inner]
    float eps;                            // of that norm

    int32_t inner() const noexcept { return heads * head_dim; }
    int32_t channels() const noexcept { return inner() + 2 * groups * state; }
    // Gates of the output, x, B and C of all heads and groups, the steps of all heads.
    int64_t rows() const noexcept { return int64_t(inner()) + channels() + heads; }
    int32_t parts() const noexcept { return (channels() + AT_ONCE - 1) / AT_ONCE; }
    int64_t scratch() const noexcept { return head_dim + AT_ONCE; }  // floats that `step_head` needs of a thread
};

// What a sequence keeps of a block.
struct DeltaState {
    Buffer<float>
        state;  // [value_heads][key_dim][value_dim], or [heads][state][head_dim]; of a short convolution empty
    Buffer<float> inputs;  // of the convolution, [taps - 1][channels], the oldest first

    explicit DeltaState(const DeltaShape& shape)
        : state(int64_t(shape.values()) * shape.key_dim), inputs(int64_t(shape.taps - 1) * shape.channels()) {}
    explicit DeltaState(const Mamba& of)
        : state(int64_t(of.inner()) * of.state), inputs(int64_t(of.taps - 1) * of.channels()) {}
    explicit DeltaState(const ShortConv& of) : state(0), inputs(int64_t(of.taps - 1) * of.channels) {}
    void clear();
    void copy(const DeltaState& other);
};

// What a sequence keeps of all blocks that keep a state. It cannot forget some of its tokens: one that is not that after the
// tokens of its cache is refused.
struct DeltaStates {
    std::vector<DeltaState> layers;
    int64_t tokens = 0;  // -1: some of a call that did not end

    void clear();
    void copy(const DeltaStates& other);
    // Before tokens come after `length` others. Throws std::runtime_error where the state is another one's.
    void begin(int64_t length);
};

// Reads rows of attn_in at a position: (position, first row, count, to).
using DeltaRows = std::function<void(int32_t, int64_t, int64_t, float*)>;

// One key head and its value heads, at so many positions in order.
//
// gates   -- products of `net.gates`, [positions][2 value_heads]
// y       -- the values of the heads at their place in [positions][values]
// scratch -- `DeltaShape::scratch` floats
void mix_head(const Kernels& kernels, const DeltaNet& net, DeltaState& state, int32_t head, int32_t positions,
              const DeltaRows& rows, const float* gates, float eps, float* y, float* scratch);

// The channels of one part of a short convolution, at so many positions in order; y: at their place in
// [positions][channels].
void mix_channels(const ShortConv& of, DeltaState& state, int32_t part, int32_t positions, const DeltaRows& rows,
                  float* y, float* scratch);

// The channels of one part of a state-space model's convolution, in place in `rows`.
void convolve_channels(const Kernels& kernels, const Mamba& of, DeltaState& state, int32_t part, int32_t positions,
                       float* rows);
// One head, after the channels that it reads: to its place in y.
void step_head(const Kernels& kernels, const Mamba& of, DeltaState& state, int32_t head, int32_t positions,
               const float* rows, float* y, float* scratch);
// One group of channels of y at one position, after its heads.
void norm_outputs(const Kernels& kernels, const Mamba& of, int32_t group, const float* rows, float eps, float* y);

}  // namespace sparsepack
