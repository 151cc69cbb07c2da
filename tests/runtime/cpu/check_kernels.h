// What the checks of native kernels share: random numbers, vectors with guards behind them, comparisons that are
// counted.
#pragma once
#include "isa/dispatch.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace sparsepack {

// Looser than the bounds of the tests in Python, which know when errors average out.
inline constexpr float NORMWISE = 3e-4f, GUARD = 12345.0f;
// Of a product of many positions: both factors are rounded to 14 bits, and a matrix of one weight has no mean over many.
inline constexpr float MANY = 5e-4f;
inline int failures = 0, checks = 0;

// ---- random numbers, and vectors with guards behind them ------------------------------------------------------------

inline uint64_t state = 88172645463325252u;
inline uint32_t bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}
inline float uniform() { return (float)(bits() >> 8) / 16777216.0f; }
inline float normal() {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform();
    return sum;
}
inline int below(int n) { return (int)(bits() % (uint32_t)n); }

inline std::vector<float> normals(size_t n, float size = 1) {
    std::vector<float> x(n);
    for (float& value : x) value = size * normal();
    return x;
}
inline uint16_t half(float x) {
    uint16_t h;
    scalar_kernels.to_half(&x, 1, &h);
    return h;
}
inline std::vector<uint16_t> halves(size_t n) {
    std::vector<uint16_t> x(n);
    for (uint16_t& value : x) value = half(normal());
    return x;
}

// ---- comparisons ----------------------------------------------------------------------------------------------------

inline bool check(bool met, const char* set, const std::string& what) {
    checks++;
    if (!met && failures++ < 40) std::printf("%s: %s\n", set, what.c_str());
    return met;
}

// Guards, which the plain kernels leave alone, must be the same; all else must be near.
inline void check_near(const std::vector<float>& found, const std::vector<float>& expected, const char* set,
                       const std::string& what, float normwise = NORMWISE, float absolute = 1e-12f) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < found.size(); i++) {
        bool guard = expected[i] == GUARD;
        if (guard && found[i] != GUARD) return (void)check(false, set, what + ": wrote beyond the end");
        if (guard) continue;
        if (!std::isfinite(found[i])) return (void)check(false, set, what + ": not finite at " + std::to_string(i));
        error += std::pow((double)found[i] - expected[i], 2), norm += std::pow((double)expected[i], 2);
    }
    check(std::sqrt(error) <= normwise * std::sqrt(norm) + absolute, set,
          what + ": error " + std::to_string(std::sqrt(error / (norm + 1e-30))));
}

template <class... Args>
std::string text(const char* format, Args... args) {
    char buffer[200];
    std::snprintf(buffer, sizeof buffer, format, args...);
    return buffer;
}

// check_attention.cpp: attention, and what finds the tokens that it reads.
void check_attention_kernels(const Kernels& k);

// check_neurons.cpp: MLPs by neurons.
void check_neuron_kernels(const Kernels& k);
// What the norm of an MLP's result would be if all terms had random signs: some cancel, and their errors do not.
float typical_norm(const Neurons& n, const float* x, const float* gate);

// check_planes.cpp: matrices of planes.
void check_plane_kernels(const Kernels& k);

// check_worker.cpp
void check_cold_worker(const Kernels& k);

}  // namespace sparsepack
