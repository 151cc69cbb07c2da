// A product that neither lists its columns nor multiplies: what is left of one that must wait for its input, read its
// columns and add up over blocks. For cuda_floor.py.
//
// Grid: (SPLITS, groups). A block has every SPLITS-th 32 of a group's columns, half of them active, and knows which before
// its input is there. It reads them as soon as it is, writes a sum for every row of the group, and finishes its share
// of the rows, as products do (kernels/words.cuh). A sum is 1, or 2 where the block has read any bit that is set.
//
// Macros: GROUP, SPLITS; BLOCK: threads of a block; AT_ONCE: 16-byte reads that a thread has on their way; READ 0: no
//         columns are read

#include "words.cuh"

static constexpr int ROWS = GROUP * 256, PIECES = GROUP * 9;

__device__ __forceinline__ uint4 read_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// blocks [groups][columns][PIECES], active [SPLITS][most], x [columns], y [groups * ROWS], slots
// [groups][SPLITS][ROWS], all of it EMPTY as emptied will be
extern "C" __global__ void __launch_bounds__(BLOCK) cuda_floor(
    const uint4* blocks, const int* active, int most, int columns, const float* x, float* y, float* slots,
    u32* emptied, int emptied_count) {
    extern __shared__ int list[];
    const int split = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
    const int share = (columns / 32 - split + SPLITS - 1) / SPLITS * 32, count = share / 2;
    for (int i = thread; i < count; i += BLOCK) list[i] = active[split * most + i];
    for (int k = thread; k < share; k += BLOCK) {
        while (read_word(x + (k / 32 * SPLITS + split) * 32 + k % 32) == EMPTY) {}
    }
    __syncthreads();
    let_next_begin();

    u32 seen = 0;
    const uint4* of_group = blocks + (u64)group * columns * PIECES;
    const int pieces = READ ? count * PIECES : 0;
    for (int first = thread; first < pieces; first += BLOCK * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int piece = first + i * BLOCK;
            v[i] = make_uint4(0, 0, 0, 0);
            if (piece < pieces) v[i] = read_once(of_group + (u64)list[piece / PIECES] * PIECES + piece % PIECES);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) seen |= v[i].x | v[i].y | v[i].z | v[i].w;
    }
    const float sum = __syncthreads_or(seen) ? 2.0f : 1.0f;

    after_previous();  // nothing is written before
    float* own = slots + (group * SPLITS + split) * ROWS;
    for (int r = thread * 4; r < ROWS; r += BLOCK * 4) write_words(own + r, make_float4(sum, sum, sum, sum));
    constexpr int EACH = (ROWS + SPLITS - 1) / SPLITS, ONCE = SPLITS <= 33 ? SPLITS : 16;
    for (int r = split * EACH + thread; r < min((split + 1) * EACH, ROWS); r += BLOCK) {
        float* slot = slots + group * SPLITS * ROWS + r;
        float total = 0;
        for (int s = 0; s < SPLITS; s += ONCE) {
            float values[ONCE];
            wait_for(values, [&](int i) { return s + i < SPLITS ? slot + (s + i) * ROWS : nullptr; });
            for (int i = 0; i < ONCE; ++i) total += values[i];
            for (int i = s; i < min(s + ONCE, SPLITS); ++i) *(u32*)(slot + i * ROWS) = EMPTY;
        }
        write_word(y + group * ROWS + r, total);
    }
    const int first = (group * SPLITS + split) * BLOCK + thread;
    for (int i = first; i < emptied_count; i += gridDim.y * SPLITS * BLOCK) emptied[i] = EMPTY;
}
