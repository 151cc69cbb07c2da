// Zigzag Q4_K to float16, for products with many inputs on the tensor cores through cuBLAS.
//
//     in   [groups, columns, group, 144 bytes]      bands in groups, as in zigzag_gemv.cu
//     out  [columns, width] float16                 out[k][256 (band - first) + row] = weight * scale
//
// Grid: any; a warp takes one superblock after the other, reads its 144 bytes and writes 512 in a row. A lane has 4
// bytes of nibbles: rows 64 p + l .. l + 3 and 32 further, p = lane / 8, l = lane % 8 * 4.

#include "common.cuh"

static constexpr int BLOCK_BYTES = 144;

// The scale and the minimum of sub-block s, twelve bits of a header's last 96.
__device__ __forceinline__ void unpack(const uint4& h, int s, float& scale, float& minimum) {
    const u32 both = __funnelshift_r(s >= 6 ? h.w : s >= 3 ? h.z : h.y, s >= 3 ? h.w : h.z, 12 * s & 31);
    scale = both & 63;
    minimum = both >> 6 & 63;
}

// Where a band's superblock of column k lies. half: bands of gate, where gate and up share groups, or 0.
__device__ __forceinline__ long long place(long long band, int group, int half, int columns, long long k) {
    const int part = half && band >= half ? 1 : 0, each = half ? group / 2 : group;
    band -= part * half;
    return (band / each * columns + k) * group + part * each + band % each;
}

extern "C" __global__ void __launch_bounds__(256) zigzag_dequantise(
    const u8* __restrict__ blocks, int columns, int group, int half, int first, int bands, float scale,
    u16* __restrict__ out, int width) {
    let_next_begin();
    after_previous();  // the scratch may still be read
    const int lane = threadIdx.x % 32, p = lane / 8;
    const long long warps = (long long)gridDim.x * 8, count = (long long)bands * columns;
    for (long long i = blockIdx.x * 8 + threadIdx.x / 32; i < count; i += warps) {
        const long long band = i / columns, k = i % columns;
        const u8* block = blocks + place(first + band, group, half, columns, k) * BLOCK_BYTES;
        const uint4 h = *(const uint4*)block;
        const u32 q = *(const u32*)(block + 16 + 4 * lane);
        const float d = half_to_float(h.x & 0xffff) * scale, dmin = half_to_float(h.x >> 16) * scale;
        u16* to = out + k * width + band * 256 + 64 * p + lane % 8 * 4;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            float sub, minimum;
            unpack(h, 2 * p + high, sub, minimum);
            sub *= d;
            minimum *= dmin;
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = sub * (float)(q >> (8 * j + 4 * high) & 15) - minimum;
            *(uint2*)(to + 32 * high) = make_uint2(two_halves(w[0], w[1]), two_halves(w[2], w[3]));
        }
    }
}
