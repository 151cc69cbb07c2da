// Zigzag matrices to float16, for products with many inputs on the tensor cores through cuBLAS.
//
//     in   [tiles, columns, tile_bands, BLOCK_BYTES]  as zigzag.cuh draws it
//     out  [columns, width] float16                 out[k][256 (band - first) + row] = weight * scale * row_scale[256 band + row]
//
// Launch: grid (any, tiles), 256 threads a block. Warps take the superblocks of a tile in the order of memory, AT_ONCE
// each time, of which those of bands first .. first + bands - 1 count: 144 bytes become 512 in a row. A lane has 4
// bytes of nibbles: rows 64 p + l .. l + 3 and 32 further, p = lane / 8, l = lane % 8 * 4. No divisions in the loop:
// with them, and one superblock at a time, it took a third longer.
//
// Blocks whose lanes have eight rows each, and planes (blocks/*.cuh), are taken apart a superblock at a time. present: so many
// planes of a column lie in `blocks`, the others in `rest` (zigzag.cuh).
//
// Macros: AT_ONCE; BLOCK

#include "common/common.cuh"
#include "blocks/block.cuh"

#if !LANE_ROWS && !PLANES
// The scale and the minimum of sub-block s, twelve bits of a header's last 96.
__device__ __forceinline__ void unpack(const uint4& h, int s, float& scale, float& minimum) {
    const u32 both = __funnelshift_r(s >= 6 ? h.w : s >= 3 ? h.z : h.y, s >= 3 ? h.w : h.z, 12 * s & 31);
    scale = both & 63;
    minimum = both >> 6 & 63;
}

extern "C" __global__ void __launch_bounds__(256)
    zigzag_dequantise(const u8* __restrict__ blocks, int columns, int tile_bands, int gate_bands, int first, int bands,
                      float scale, const float* __restrict__ row_scale, u16* __restrict__ out, int width,
                      const u8* __restrict__ rest, int present) {
    launch_dependents();
    wait_for_previous();  // the scratch may still be read
    const int lane = threadIdx.x % 32, p = lane / 8;
    // Where gate and up share tiles (gate_bands > 0), the second half of a tile's bands are of up.
    const int each = gate_bands ? tile_bands / 2 : tile_bands, shift = __ffs(tile_bands) - 1;
    const int count = columns * tile_bands, bands_before = blockIdx.y * each;
    blocks += (long long)blockIdx.y * count * BLOCK_BYTES;
    out += 64 * p + lane % 8 * 4;
    if (row_scale) row_scale += first * 256 + 64 * p + lane % 8 * 4;
    for (int i = (blockIdx.x * 8 + threadIdx.x / 32) * AT_ONCE; i < count; i += gridDim.x * 8 * AT_ONCE) {
        uint4 header[AT_ONCE];
        u32 nibbles[AT_ONCE];
        int band[AT_ONCE];  // counted from the first; -1: none of them
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int member = i + n & tile_bands - 1, up = member >= each;
            const int own = bands_before + member - up * each;  // among bands of its part, or of zeros beyond them
            band[n] = own + up * gate_bands - first;
            if (i + n >= count || band[n] >= bands || gate_bands && own >= gate_bands) band[n] = -1;
            if (band[n] < 0) continue;
            const u8* block = blocks + (long long)(i + n) * BLOCK_BYTES;
            header[n] = *(const uint4*)block;
            nibbles[n] = *(const u32*)(block + 16 + 4 * lane);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (band[n] < 0) continue;
            const uint4& h = header[n];
            const float d = half_to_float(h.x & 0xffff) * scale, dmin = half_to_float(h.x >> 16) * scale;
            u16* to = out + (long long)(i + n >> shift) * width + band[n] * 256;
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                float sub, minimum;
                unpack(h, 2 * p + high, sub, minimum);
                sub *= d;
                minimum *= dmin;
                float w[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) w[j] = sub * (float)(nibbles[n] >> (8 * j + 4 * high) & 15) - minimum;
                if (row_scale) {
                    const float4 of = *(const float4*)(row_scale + band[n] * 256 + 32 * high);
                    w[0] *= of.x, w[1] *= of.y, w[2] *= of.z, w[3] *= of.w;
                }
                *(uint2*)(to + 32 * high) = make_uint2(pack_half2(w[0], w[1]), pack_half2(w[2], w[3]));
            }
        }
    }
}
#else
struct FromMemory {
    __device__ __forceinline__ u32 word(const u8* p) const { return *(const u32*)p; }
    __device__ __forceinline__ uint2 pair(const u8* p) const { return *(const uint2*)p; }
};

extern "C" __global__ void __launch_bounds__(256)
    zigzag_dequantise(const u8* __restrict__ blocks, int columns, int tile_bands, int gate_bands, int first, int bands,
                      float scale, const float* __restrict__ row_scale, u16* __restrict__ out, int width,
                      const u8* __restrict__ rest, int present) {
    launch_dependents();
    wait_for_previous();  // the scratch may still be read
    const int each = gate_bands ? tile_bands / 2 : tile_bands, row = threadIdx.x % 32 * 8;
    const int count = columns * tile_bands, bands_before = blockIdx.y * each;
#if PLANES
    blocks += (long long)blockIdx.y * columns * column_bytes(tile_bands, present);
#else
    blocks += (long long)blockIdx.y * count * BLOCK_BYTES;
#endif
    for (int i = blockIdx.x * 8 + threadIdx.x / 32; i < count; i += gridDim.x * 8) {
        const int member = i % tile_bands, up = member >= each;
        const int own = bands_before + member - up * each;  // among bands of its part, or of zeros beyond them
        const int band = own + up * gate_bands - first;
        if (band < 0 || band >= bands || (gate_bands && own >= gate_bands)) continue;
        float w[8];
#if PLANES
        LanePlanes rows;
        const u8* column = blocks + (long long)(i / tile_bands) * column_bytes(tile_bands, present);
        const u8* of_rest =
            rest + (blockIdx.y * columns + i / tile_bands) * (u64)rest_bytes(tile_bands, present, LEVELS);
        rows.read(column, PlanePlaces{tile_bands, member}, LEVELS, FromMemory(), present, of_rest);
        const float factor = scale;
        rows.weights(LEVELS, w);
#else
        LaneRows rows;
        rows.read(blocks + (long long)i * BLOCK_BYTES, FromMemory());
        const float factor = rows.scale() * scale;
        rows.numbers(w);
#endif
        u32 pairs[4];
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            w[r] *= factor;
            if (row_scale) w[r] *= row_scale[(first + band) * 256 + row + r];
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) pairs[r] = pack_half2(w[2 * r], w[2 * r + 1]);
        *(uint4*)(out + (long long)(i / tile_bands) * width + band * 256 + row) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
#endif
