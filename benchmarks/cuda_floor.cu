// A product that neither lists its columns nor multiplies: what is left of one that must wait for its input, read its
// columns and add up over blocks. For cuda_floor.py.
//
// Launch: grid (SPLITS, tiles). A block has every SPLITS-th 32 of a tile's columns, half of them active, and knows
// which before its input is there. It reads them as soon as it is, writes a sum for every row of the tile, and finishes
// its share of the rows, as products do (kernels/common/flag_in_data.cuh). A sum is 1, or 2 where the block has read
// any bit that is set.
//
// Macros: TILE_BANDS, SPLITS; BLOCK: threads of a block; AT_ONCE: 16-byte reads that a thread has on their way; READ 0:
//         no columns are read

#include "common/flag_in_data.cuh"

static constexpr int TILE_ROWS = TILE_BANDS * 256, PIECES = TILE_BANDS * 9;

__device__ __forceinline__ uint4 read_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// blocks [tiles][columns][PIECES], active [SPLITS][most], x [columns], y [tiles * TILE_ROWS], workspace
// [tiles][SPLITS][TILE_ROWS], all of it SENTINEL as reset will be
extern "C" __global__ void __launch_bounds__(BLOCK)
    cuda_floor(const uint4* blocks, const int* active, int most, int columns, const float* x, float* y,
               float* workspace, u32* reset, int reset_count) {
    extern __shared__ int list[];
    const int split = blockIdx.x, tile = blockIdx.y, thread = threadIdx.x;
    const int share = (columns / 32 - split + SPLITS - 1) / SPLITS * 32, count = share / 2;
    for (int i = thread; i < count; i += BLOCK) list[i] = active[split * most + i];
    for (int k = thread; k < share; k += BLOCK) {
        while (ll_load(x + (k / 32 * SPLITS + split) * 32 + k % 32) == SENTINEL) {
        }
    }
    __syncthreads();
    launch_dependents();

    u32 seen = 0;
    const uint4* tile_base = blocks + (u64)tile * columns * PIECES;
    const int pieces = READ ? count * PIECES : 0;
    for (int first = thread; first < pieces; first += BLOCK * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int piece = first + i * BLOCK;
            v[i] = make_uint4(0, 0, 0, 0);
            if (piece < pieces) v[i] = read_once(tile_base + (u64)list[piece / PIECES] * PIECES + piece % PIECES);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) seen |= v[i].x | v[i].y | v[i].z | v[i].w;
    }
    const float sum = __syncthreads_or(seen) ? 2.0f : 1.0f;

    wait_for_previous();  // nothing is written before
    float* own = workspace + (tile * SPLITS + split) * TILE_ROWS;
    for (int r = thread * 4; r < TILE_ROWS; r += BLOCK * 4) ll_store4(own + r, make_float4(sum, sum, sum, sum));
    constexpr int EACH = (TILE_ROWS + SPLITS - 1) / SPLITS, ONCE = SPLITS <= 33 ? SPLITS : 16;
    for (int r = split * EACH + thread; r < min((split + 1) * EACH, TILE_ROWS); r += BLOCK) {
        float* partials = workspace + tile * SPLITS * TILE_ROWS + r;
        float total = 0;
        for (int s = 0; s < SPLITS; s += ONCE) {
            float values[ONCE];
            ll_wait(values, [&](int i) { return s + i < SPLITS ? partials + (s + i) * TILE_ROWS : nullptr; });
            for (int i = 0; i < ONCE; ++i) total += values[i];
            for (int i = s; i < min(s + ONCE, SPLITS); ++i) *(u32*)(partials + i * TILE_ROWS) = SENTINEL;
        }
        ll_store(y + tile * TILE_ROWS + r, total);
    }
    const int first = (tile * SPLITS + split) * BLOCK + thread;
    for (int i = first; i < reset_count; i += gridDim.y * SPLITS * BLOCK) reset[i] = SENTINEL;
}
