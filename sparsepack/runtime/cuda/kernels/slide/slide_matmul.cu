// Products with sparse24 weights on Hopper's 2:4 tensor cores: Y = (X W^T) * x_scale * w_scale + bias, in one kernel.
//
//     weights   [rows, stored] bytes         as they lie in a slid folder: two nonzeros for each four expanded inputs
//     metadata  [rows / 64, k_tiles, 1024]   their positions: 8 bytes for each thread of a warpgroup
//     inputs    [tokens, expanded] bytes       quantised and expanded (quantise_slide.cu)
//     outputs   [tokens, rows]               BF16 or F16
//
// A block has one tile of ROWS = 64 GROUPS rows by TOKENS tokens after the other; there are as many blocks as
// multiprocessors. Two blocks of a cluster have rows below one another and share their inputs: each fetches half of
// them for both. K is walked in tiles of 128 expanded inputs, through a pipeline of STAGES in shared memory that the copy
// engine (TMA) fills:
//
//     stage     | weights: ROWS of 64 bytes | inputs: TOKENS of 128 bytes | metadata: GROUPS of 1024 bytes |
//     mbarriers | full: copy engine -> consumers | empty: consumers of both blocks -> producer |
//
// Warps are specialised, as in CUTLASS: GROUPS warpgroups multiply, 64 rows each; one thread of the LOAD_WARPS behind
// them fetches. Four of these are a warpgroup, which gives registers to the others (setmaxnreg). Sums stay in registers
// until K is done. Outputs are scaled, transposed in shared memory, OUT_TOKENS at a time, and stored by the copy engine
// while the next tile is being multiplied.
//
// What bounds it: operands in shared memory. A product of 64 rows reads 64 bytes for each of its tokens, and a tensor
// core that skips zeros could take them at 128 bytes a cycle, all that shared memory has; what fills it comes on top.
//
// Tiles go token by token within a band of `band` tiles of tokens, then to the next rows: the inputs of a band stay in
// the L2 cache.
//
// Macros: those of wgmma.cuh; GROUPS 1 .. 3; LOAD_WARPS 1, or 4 with 2 or 3 GROUPS; STAGES; OUT_BUFFERS: of OUT_TOKENS,
//         that a warpgroup has; HALF 0: outputs are BF16, 1: F16

#include "common/tensor_copy.cuh"
#include "slide/wgmma.cuh"

static constexpr int ROWS = 64 * GROUPS;
static constexpr int CONSUMERS = 128 * GROUPS;
static constexpr int ALL_THREADS = CONSUMERS + 32 * LOAD_WARPS;
// Registers of a thread with LOAD_WARPS 4: together as many as the launch bounds give out.
static constexpr int LOAD_REGISTERS = GROUPS == 2 ? 40 : 32, SUM_REGISTERS = GROUPS == 2 ? 232 : 160;
#define SET_REGISTERS(how, count) asm volatile("setmaxnreg." how ".sync.aligned.u32 %0;" ::"n"(count))
static constexpr int WEIGHT_WIDTH = 64;  // of a row in a stage
static constexpr int WEIGHT_BYTES = ROWS * WEIGHT_WIDTH, INPUT_BYTES = TOKENS * 128;
static constexpr int METADATA_BYTES = GROUPS * 1024;
static constexpr int STAGE_BYTES = WEIGHT_BYTES + INPUT_BYTES + METADATA_BYTES;
static constexpr int OUT_TOKENS = 32;
static constexpr int OUT_BYTES = OUT_TOKENS * 128;

__device__ __forceinline__ u32 pack_outputs(float first, float second) {
#if HALF
    return pack_half2(first, second);
#else
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
#endif
}
__device__ __forceinline__ float output_to_float(u16 bits) {
    return HALF ? half_to_float(bits) : bfloat_to_float(bits);
}

// Registers that hold positions keep them until here. No positions are 0, so nothing is stored: what does nothing at all
// the compiler leaves out, and where there is a trap it leaves the registers as the launch bounds have them.
__device__ __forceinline__ void still_needed(const u32 (&positions)[2]) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0;\n@p st.shared.u32 [%0], %1;\n"
        "setp.eq.u32 p, %1, 0;\n@p st.shared.u32 [%1], %0;\n}" ::"r"(positions[0]),
        "r"(positions[1])
        : "memory");
}

// The order of tiles, told above.
struct Tiles {
    int row_tiles, token_tiles, band;  // row_tiles: of CLUSTER * ROWS rows

    __device__ __forceinline__ int count() const { return row_tiles * token_tiles; }
    __device__ __forceinline__ void place(int tile, int& row_tile, int& token_tile) const {
        const int of_band = tile / (band * row_tiles), rest = tile - of_band * band * row_tiles;
        const int wide = min(band, token_tiles - of_band * band);
        row_tile = rest / wide;
        token_tile = of_band * band + rest % wide;
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(ALL_THREADS, 1)
    slide_matmul(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs,
                 const __grid_constant__ TensorMap outputs, const u8* __restrict__ metadata,
                 const float* __restrict__ w_scale, const float* __restrict__ x_scale, const u16* __restrict__ bias,
                 int rows, int tokens, int k_tiles, int band) {
    extern __shared__ u8 unaligned[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ __align__(8) float x_scales[GROUPS][TOKENS];
    const u32 base = shared_address(unaligned) + 1023 & ~1023u;
    const u32 out_base = base, ring = base + GROUPS * OUT_BUFFERS * OUT_BYTES;
    const int group = threadIdx.x / 128;
    const u32 rank = block_in_cluster();
    const Tiles tiles = {(rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), (tokens + TOKENS - 1) / TOKENS, band};
    const int clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CLUSTER * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_cluster();
    launch_dependents();
    wait_for_previous();

    int stage = 0;
    u32 phase = 0;
    // Each role ends by itself: setmaxnreg needs that.
    if (group == GROUPS) {
#if LOAD_WARPS == 4
        SET_REGISTERS("dec", LOAD_REGISTERS);
#endif
        const int last_block = (rows - 1) / 64;  // of rows; what lies beyond has weights of zero and any positions
        if (threadIdx.x == CONSUMERS) {
            for (int tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += clusters) {
                int row_tile, token_tile;
                tiles.place(tile, row_tile, token_tile);
                const int row = (row_tile * CLUSTER + rank) * ROWS, token = token_tile * TOKENS;
                for (int k = 0; k < k_tiles; ++k) {
                    barrier_wait(empty + stage, phase ^ 1);
                    const u32 at = ring + stage * STAGE_BYTES;
                    expect_bytes(full + stage, STAGE_BYTES);
                    copy_tile(at, &weights, k * WEIGHT_WIDTH, row, full + stage);
                    constexpr int SHARE = TOKENS / CLUSTER;
                    copy_tile_to_all(at + WEIGHT_BYTES + rank * SHARE * 128, &inputs, k * 128, token + rank * SHARE,
                                     full + stage);
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g)
                        copy_bulk(at + WEIGHT_BYTES + INPUT_BYTES + g * 1024,
                                  metadata + ((u64)min(row / 64 + g, last_block) * k_tiles + k) * 1024, 1024,
                                  full + stage);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
        __syncwarp();
        sync_cluster();
    } else {
#if LOAD_WARPS == 4
        SET_REGISTERS("inc", SUM_REGISTERS);
#endif
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        const u32 out = out_base + group * OUT_BUFFERS * OUT_BYTES;
        for (int tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += clusters) {
            int row_tile, token_tile;
            tiles.place(tile, row_tile, token_tile);
            const int first_row = (row_tile * CLUSTER + rank) * ROWS + group * 64, token = token_tile * TOKENS;
            float scale[2], add[2], x_scale_of[2];  // on their way while the products are made
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(first_row + 16 * warp + lane / 4 + 8 * i, rows - 1);
                scale[i] = w_scale[row];
                add[i] = bias ? output_to_float(bias[row]) : 0;
                x_scale_of[i] = load_l2(x_scale + min(token + thread + 128 * i, tokens - 1));
            }
            Sum d[SUMS];
            int before = -1;
            // Products read their metadata when they begin, which the compiler does not know: registers of one k_tile
            // stay as they are until its products have ended, and the next one has others.
            u32 even[2] = {1, 1}, odd[2] = {1, 1};
            const auto step = [&](int k, u32(&positions)[2], u32(&held)[2]) {
                barrier_wait(full + stage, phase);
                const u32 at = ring + stage * STAGE_BYTES;
                const u32 weights_at = at + group * 64 * WEIGHT_WIDTH, inputs_at = at + WEIGHT_BYTES;
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(positions[0]), "=r"(positions[1])
                             : "r"(at + WEIGHT_BYTES + INPUT_BYTES + group * 1024 + thread * 8));
                wgmma_begin();
                wgmma(d, operand(weights_at, 64), operand(inputs_at, 128), positions[0], k);
                wgmma(d, operand(weights_at + 32, 64), operand(inputs_at + 64, 128), positions[1], 1);
                wgmma_commit();
                wgmma_wait<1>();
                still_needed(held);
                if (before >= 0 && thread < CLUSTER) arrive_at(empty + before, thread);
                before = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            for (int k = 0; k < k_tiles; k += 2) {
                step(k, even, odd);
                if (k + 1 < k_tiles) step(k + 1, odd, even);
            }
            wgmma_wait<0>();
            still_needed(even);
            still_needed(odd);
            if (thread < CLUSTER) arrive_at(empty + before, thread);

#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (thread + 128 * i < TOKENS) x_scales[group][thread + 128 * i] = x_scale_of[i];
#pragma unroll
            for (int part = 0; part < TOKENS / OUT_TOKENS; ++part) {
                const u32 buffer = out + part % OUT_BUFFERS * OUT_BYTES;
                // The copy engine has read what stood there before. Of the tile before it has read everything: buffers
                // begin anew with each tile, so its last parts may lie in the first ones.
                if (thread == 0) {
                    if (part == 0)
                        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                    else
                        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(OUT_BUFFERS - 1) : "memory");
                }
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#pragma unroll
                for (int j = 0; j < OUT_TOKENS / 8; j += 2) {
                    u32 transposed[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int first = part * OUT_TOKENS + 8 * (j + i);
                        const float2 x = *(const float2*)(x_scales[group] + first + 2 * (lane % 4));
                        const Sum* sums = d + first / 2;
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            transposed[2 * i + r] = pack_outputs((float)sums[2 * r] * (x.x * scale[r]) + add[r],
                                                                 (float)sums[2 * r + 1] * (x.y * scale[r]) + add[r]);
                    }
                    const int line = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                     buffer + line * 128 + (chunk ^ line % 8) * 16),
                                 "r"(transposed[0]), "r"(transposed[1]), "r"(transposed[2]), "r"(transposed[3])
                                 : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0) {
                    asm volatile(
                        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&outputs),
                        "r"(first_row), "r"(token + part * OUT_TOKENS), "r"(buffer)
                        : "memory");
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                }
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        sync_cluster();  // nothing that a block sends to the other one arrives after that has ended
    }
}
