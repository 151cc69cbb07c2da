// The functions of a gate, by their numbers in model.py.

#pragma once

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

__device__ __forceinline__ float activated(int which, float x) {
    switch (which) {
        case 0: return x / (1 + expf(-x));                                                           // silu
        case 1: return x < 0 ? 0 : x;                                                                // relu, NaN stays
        case 2: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));                              // gelu
        case 4: return x < 0 ? 0 : x * x;                                                            // relu2
        default: return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));  // gelu, tanh
    }
}

static constexpr int CLAMPED_SWIGLU = 5;

// activation(gate) * up, rounded as it is stored; of CLAMPED_SWIGLU, gpt-oss's, g sigmoid(1.702 g) (u + 1) with g = gate up
// to 7 and u = up kept within -7 and 7. NaN stays.
__device__ __forceinline__ float gated(int which, float gate, float up) {
    if (which != CLAMPED_SWIGLU) return __fmul_rn(activated(which, gate), up);
    const float g = gate > 7 ? 7 : gate, u = up > 7 ? 7 : up < -7 ? -7 : up;
    return __fmul_rn(g * sigmoid(1.702f * g), u + 1);
}
