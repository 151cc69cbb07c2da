// SiLU of the gate times up, rounded as stock code rounds it: out = r(r(gate / (1 + exp(-gate))) * up), r: the nearest
// value of the type.
//
//     gate, up, out   [eights * 8]   F32, F16 or BF16, aligned to 16 bytes
//
// Launch: a thread takes EACH times eight values, those of a block's threads lie one beside the other
//
// Macro: INPUT (common/eight.cuh)

#include "common/activations.cuh"
#include "common/common.cuh"
#include "common/eight.cuh"

static constexpr int EACH = 4;

extern "C" __global__ void silu_times(const u8* __restrict__ gate, const u8* __restrict__ up, int eights,
                                      u8* __restrict__ out) {
    constexpr int ELEMENT = INPUT == 0 ? 4 : 2;
    wait_for_previous();
    const int first = blockIdx.x * EACH * blockDim.x + threadIdx.x;
    Eight g[EACH], u[EACH];
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int at = first + n * blockDim.x;
        if (at < eights) {
            g[n].load(gate + (u64)at * 8 * ELEMENT, 0, 8, true);
            u[n].load(up + (u64)at * 8 * ELEMENT, 0, 8, true);
        }
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int at = first + n * blockDim.x;
        if (at < eights) {
            float made[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                made[j] = Eight::rounded(__fmul_rn(Eight::rounded(activated(0, g[n][j])), u[n][j]));
            Eight::store(made, out, (u64)at * 8);
        }
    }
}
