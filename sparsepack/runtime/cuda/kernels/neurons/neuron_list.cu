// Who is active: the neurons whose gate is not zero after the activation in any of the texts, in ascending order, with
// their gates, and the normed input with which their records are multiplied.
//
//     gates   float32 [INPUTS][neurons]   before the activation, as the product of the gate left them
//     warp    | 0: neurons 0 .. 32 ROUNDS - 1 | 1 | .. 31 |     of SPAN = 32 * 32 * ROUNDS neurons; then the next SPAN
//     index   int32 [count], gates_of [INPUTS][neurons], of which the first `count` are written
//
// A warp's ballot of round r stays in lane r, so that the list is written once all warps have counted theirs.
//
// Launch: one block of 1024 threads.
//
// Macros: INPUTS 1 to 8; ROUNDS 1 to 32; ACTIVATION: number of the function (activations.cuh); ALL 1: every neuron is
//         listed; FLAG_IN_DATA 1: gates and x are read as soon as they are stored (one input)

#include "common/activations.cuh"
#include "common/flag_in_data.cuh"

#ifndef INPUTS
#define INPUTS 1
#define ROUNDS 2
#define ACTIVATION 1
#define ALL 0
#define FLAG_IN_DATA 0
#endif

static constexpr int THREADS = 1024, WARPS = 32, AT_ONCE = ROUNDS < 8 ? ROUNDS : 8;
static constexpr int SPAN = WARPS * 32 * ROUNDS;

// COUNT values, asked for together.
template <int COUNT, typename At>
__device__ __forceinline__ void read(float (&values)[COUNT], At at) {
    if (FLAG_IN_DATA) {
        ll_wait(values, at);
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = at(i) ? load_l2(at(i)) : 0;
}

// x        float32 [INPUTS][hidden]; norm [hidden]: RMSNorm's weight; normed: the same as x, after the norm
// counts   int32 [2]: all listed neurons have their records in one memory, so both are their number
// active   the number is added; or null
extern "C" __global__ void __launch_bounds__(THREADS)
    neuron_list(const float* gates, int neurons, const float* x, int hidden, const float* norm, float eps,
                float* normed, int* index, float* gates_of, int* counts, u64* active) {
    __shared__ float squares[INPUTS][WARPS];
    __shared__ int found[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (!FLAG_IN_DATA) wait_for_previous();

    // The input is there before the gates are.
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        float sum = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first < hidden; first += 4 * THREADS) {
            float v[4];
            read(v, [&](int i) {
                const int k = first + i * THREADS;
                return k < hidden ? x + b * hidden + k : nullptr;
            });
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += v[i] * v[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[b][warp] = sum;
    }
    __syncthreads();
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        const float scale = 1 / sqrtf(warp_sum(squares[b][lane]) / hidden + eps);
#pragma unroll 2
        for (int k = threadIdx.x; k < hidden; k += THREADS)
            normed[b * hidden + k] = load_l2(x + b * hidden + k) * scale * norm[k];
    }

    int count = 0;
#pragma unroll 1
    for (int begin = 0; begin < neurons; begin += SPAN) {
        const int own = begin + warp * 32 * ROUNDS;
        u32 kept = 0;  // the mask of round `lane`
        int mine = 0;
#pragma unroll 1
        for (int first = 0; first < ROUNDS; first += AT_ONCE) {
            bool is[AT_ONCE] = {};
#pragma unroll
            for (int b = 0; b < (ALL ? 1 : INPUTS); ++b) {
                float v[AT_ONCE];
                read(v, [&](int i) {
                    const int n = own + (first + i) * 32 + lane;
                    return !ALL && first + i < ROUNDS && n < neurons ? gates + b * neurons + n : nullptr;
                });
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const bool real = first + i < ROUNDS && own + (first + i) * 32 + lane < neurons;
                    is[i] |= real && (ALL || activated(ACTIVATION, v[i]) != 0);  // NaN is active, so that it is seen
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 mask = __ballot_sync(ALL_LANES, is[i]);
                if (lane == first + i) kept = mask;
                mine += __popc(mask);
            }
        }
        if (lane == 0) found[warp] = mine;
        __syncthreads();
        int at = count;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) at += found[w];
            count += found[w];
        }
#pragma unroll 4
        for (int r = 0; r < ROUNDS; ++r) {
            const u32 mask = __shfl_sync(ALL_LANES, kept, r);
            const int n = own + r * 32 + lane, to = at + __popc(mask & ((1u << lane) - 1));
            if (mask >> lane & 1) {
                index[to] = n;
#pragma unroll
                for (int b = 0; b < INPUTS; ++b)
                    gates_of[b * neurons + to] = activated(ACTIVATION, load_l2(gates + b * neurons + n));
            }
            at += __popc(mask);
        }
        __syncthreads();  // found is read
    }
    if (threadIdx.x == 0) {
        counts[0] = counts[1] = count;
        if (active) atomic_add(active, count);
    }
}
