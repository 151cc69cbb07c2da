// The gate's function, by its number in model.py.

#pragma once

__device__ __forceinline__ float activated(int which, float x) {
    switch (which) {
        case 0: return x / (1 + expf(-x));                                                           // silu
        case 1: return x < 0 ? 0 : x;                                                                // relu, NaN stays
        case 2: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));                              // gelu
        default: return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));  // gelu, tanh
    }
}
