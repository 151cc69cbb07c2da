// What the kernels of gated delta nets share (arXiv 2412.06464; state_heads.cuh). A value head keeps a matrix S, which every
// token multiplies by its decay and corrects by the delta rule, S += k beta (v - k^T S), and gives S^T q.
//
//     rows      | q of all key heads | k of them | v of all value heads |  gates of the output of all value heads  |
//               |  the channels of the convolution                      |
//
// Macros: those of state_heads.cuh

#pragma once

#include "attention/state_heads.cuh"
#include "common/flag_in_data.cuh"
#include "common/fold.cuh"

static constexpr float L2_EPS = 1e-6f;  // is added to the sum of a head's squares
static constexpr int NUMBERS = CONVOLVED + VALUE_DIM;

// Where rows have what, of so many value heads.
struct DeltaRows : MixedRows {
    __device__ __forceinline__ int width() const { return channels() + heads * VALUE_DIM; }
    // Of a value head's NUMBERS: queries, keys, values, gates.
    __device__ __forceinline__ int place(int head, int number) const {
        return number < CONVOLVED ? MixedRows::place(head, number) : channels() + head * VALUE_DIM + number - CONVOLVED;
    }
};

// exp(-rate softplus(x))
__device__ __forceinline__ float decay_of(float x, float rate) { return expf(-rate * softplus(x)); }

// What a lane adds to k^T S of COUNT columns of S, of which lanes have their keys, and then to q^T S of each. With these
// sums s and t, and v of a column, its error is beta (v - decay s): S becomes decay S + k error, and S^T q then is
// decay t + (q^T k) error.
template <int COUNT>
__device__ __forceinline__ void delta_sums(float (&sums)[2 * COUNT], const float (&state)[COUNT][LANE_KEYS],
                                           const float (&q)[LANE_KEYS], const float (&k)[LANE_KEYS]) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        sums[c] = sums[COUNT + c] = 0;
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) {
            sums[c] += k[i] * state[c][i];
            sums[COUNT + c] += q[i] * state[c][i];
        }
    }
}
