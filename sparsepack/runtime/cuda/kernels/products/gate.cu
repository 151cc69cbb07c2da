// Gates as a kernel of their own, for MLPs whose rows of gate do not fill whole bands. Others are gated by the product.
//
//     stacked [batch][2 width]      -> out [batch][width]
//           | gate | up |
//
// Launch: grid (width / 256, batch), 256 threads a block.

#include "common/activations.cuh"
#include "common/common.cuh"

// out [batch][width] = activation(gate) * up of stacked [batch][2 width].
extern "C" __global__ void __launch_bounds__(256) gate(const float* stacked, int width, int activation, float* out) {
    launch_dependents();
    wait_for_previous();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= width) return;
    const float* x = stacked + (long long)blockIdx.y * 2 * width;
    out[(long long)blockIdx.y * width + i] = __fmul_rn(activated(activation, load_l2(x + i)), load_l2(x + width + i));
}
