// Y = X[:, active] W[:, active]^T for INPUTS inputs that share their active columns: those that are active in any of
// them. The matrix lies as zigzag.cuh shows, and is read once for all.
//
//     blocks  [tiles, columns, TILE_BANDS, BLOCK_BYTES]  ->  pipeline (zigzag.cuh)  ->  sums of a warp
//     X       float32 [INPUTS, columns]  ->  one list of active columns (column_split.cuh)
//     sums of warps  ->  of the block  ->  workspace  ->  Y float32 [INPUTS, rows]     (split_k_reduce.cuh)
//
// Launch: grid (SPLITS, tiles), ALL_THREADS threads a block; where SPLITS > 1, no more blocks than run at once, since
// they wait for each other. What a warp does with its k_tiles is the type's: batch_q4_k.cuh or batch_q6_p.cuh, on the
// tensor cores, or batch_floats.cuh.
//
// Sums: over the columns of a warp, the warps of a block, the blocks of a tile, each in order. Each
// of these blocks finishes a share of the rows, for all inputs.
//
// Macros: those of zigzag.cuh and column_split.cuh; INPUTS 1 to 8; FLAG_IN_DATA 0
//         GATE 1: the first half of a tile's bands is of gate, the second of up; activation(gate) * up is written
//         ACTIVATION: number of the function, see activations.cuh; or where GATED of that of the input

#include "common/activations.cuh"

#ifndef WARPS
#define WARPS 8
#define STAGES 16
#define TILE_BANDS 2
#define GATE 0
#define DENSE 0
#define ACTIVATION 0
#define PRODUCERS 4
#define INPUTS 8
#define SPLITS 2
#define ROUNDS 2
#define PASSES 1
#define NORM 1
#define SQUARES 1
#define OFFSET 1
#define PER_CHANNEL 1
#endif
#define FLAG_IN_DATA 0

#include "products/column_split.cuh"
#include "products/split_k_reduce.cuh"
#if PLANES
#include "products/batch_q6_p.cuh"
#elif LANE_ROWS
#include "products/batch_floats.cuh"
#else
#include "products/batch_q4_k.cuh"
#endif

static constexpr int MOST_INPUTS = 8;

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) zigzag_batch(
    const u8* __restrict__ blocks, int columns, int rows, float largest_d,
    const float* __restrict__ row_scale,  // [rows], what their sums are multiplied by; or null
    // of planes that lie elsewhere (zigzag.cuh), of the first rest_tiles tiles, and of the next one's first columns; and where
    // the bytes of a row of superblocks that columns have there by their levels are added up
    const u8* __restrict__ rest, int rest_tiles, int rest_columns, u64* rest_read,
    // what comes in: x [INPUTS][columns]; partial sums of x^2 [INPUTS][parts]
    const float* x, const float* norm, float eps, const float* squares, int parts, const float* threshold,
    const float* offset, const float* scales,
    // what goes out: y [INPUTS][rows] = product + bias + residual, or of half as many rows activation(gate) * up; of
    // y^2 the sums in each block [INPUTS][tiles * SPLITS]
    float* y, const float* bias, const float* residual, float* squares_of_y,
    // sums of active columns, or with planes of the bytes of them that are read; where SCALED, of the weights of inactive ones, for each input [INPUTS]; the blocks' partial
    // sums, every word SENTINEL: [tiles][SPLITS][TILE_BANDS][INPUTS][256]
    u64* active, u64* skipped, float* workspace) {
    extern __shared__ __align__(128) uint4 memory[];  // bulk copies of columns: both ends alike modulo 128 bytes
    __shared__ float sums_of[WARPS][INPUTS], warp_max_abs[WARPS][INPUTS];
    __shared__ ClassCounts found[WARPS];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ int listed_k_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % TILE_BANDS, k_slice = warp / TILE_BANDS;
    const int split = blockIdx.x, tile = blockIdx.y;
    const bool is_producer = warp >= WARPS;
    const ColumnSplit column_split(columns, split);
    init_consumer_barrier<THREADS>();

    // ring [STAGES], later sums [WARPS][INPUTS][PADDED_ROWS]; list; with planes [WARPS][SCRATCH]
    u8* ring = (u8*)memory;
    float* own = (float*)memory;
    constexpr int RING = STAGES * STAGE_BYTES, OWN = WARPS * INPUTS * PADDED_ROWS * 4, FIRST = RING > OWN ? RING : OWN;
    const int most = ColumnSplit::most(columns);
    float* values = (float*)(ring + FIRST);
    const int stride = most + 4;  // inputs on different banks
    List list{values, (int*)(values + INPUTS * stride), stride, 0, 0};

    launch_dependents();
    const u8* tile_base = blocks + (u64)tile * columns * COLUMN_BYTES;
    const u8* tile_rest = rest + (u64)tile * columns * REST_PITCH;
    const int with_rest = tile < rest_tiles ? columns : tile == rest_tiles ? rest_columns : 0;
    ColumnPipeline pipeline{tile_base, tile_rest,  with_rest,    ring,           full,
                            empty,     list.index, column_split, &listed_k_tiles};
    PerInput largest_of_thread;
    if (is_producer) {  // while the input is not there yet
        pipeline.set_up();
    } else {
        const Site site{x,
                        columns,
                        norm,
                        eps,
                        squares,
                        parts,
                        threshold,
                        offset,
                        scales,
                        rows,
                        tile ? nullptr : skipped,
                        tile ? nullptr : rest_read};
        largest_of_thread = compact_active<WARPS, DENSE>(site, column_split, list, found, sums_of[0], [] {
                                wait_for_previous();
                            }).largest;
        pipeline.announce(list.count);
    }
    pipeline.wait_for_list(is_producer);
    if (is_producer) {
        pipeline.run();
        return;
    }
    // Each input has a scale of its own: the largest of them must not cost the others their precision.
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        const float largest = warp_max_magnitude(largest_of_thread.of[b]);
        if (lane == 0) warp_max_abs[warp][b] = largest;
    }
    sync_consumers<THREADS>();
    const int input = lane / 4 % (PLANES && INPUTS <= 4 ? 4 : MOST_INPUTS);
    float largest = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, input < INPUTS ? warp_max_abs[w][input] : 0);
#if PLANES
    const int exponent = exponent_for(largest * largest_d) - LARGER_BITS;
    u8* scratch = (u8*)((float*)(list.index + most) + warp * SCRATCH);
    const LaneOffsets offsets(PlanePlaces{TILE_BANDS, band});
    const float* value = list.value + (input < INPUTS ? input : 0) * list.stride;
    const float scale = input < INPUTS ? power_of_two(exponent) : 0;
#else
    const int exponent = exponent_for(largest * largest_d);
    const float* value = input < INPUTS ? list.value + input * list.stride : nullptr;
#endif
    BatchAccumulator sums = {};
#pragma unroll 1
    for (int i = k_slice; i < pipeline.k_tiles; i += K_SLICES) {
        const int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        const int* columns_of = list.index + i * K_TILE;
#if PLANES
        multiply(sums, ring + stage * STAGE_BYTES, offsets, columns_of, value + i * K_TILE, scale, scratch,
                 pipeline.has_rest(i * K_TILE + lane % K_TILE));
#else
        const u8* first = ring + stage * STAGE_BYTES + band * BLOCK_BYTES;
        const auto header = [&](int c) { return first + place_in_stage(c, tile_base, columns_of); };
        multiply(sums, header, value ? value + i * K_TILE : nullptr, list.value + i * K_TILE, list.stride,
                 power_of_two(exponent));
#endif
        warp_arrive(empty + stage);
    }
    sync_consumers<THREADS>();  // the ring is read
    store_sums(sums, power_of_two(-exponent), own + warp * INPUTS * PADDED_ROWS);
    sync_consumers<THREADS>();

    constexpr int COUNT = INPUTS * TILE_ROWS;
    float* tile_workspace = workspace + tile * SPLITS * COUNT;
    reduce_warps<COUNT>(own, tile_workspace + split * COUNT);

    // The rows of y that this block finishes. A warp takes 32 of them at a time, so that a sum over its lanes is of one
    // input, and for as many inputs as make up to WORDS of a thread, since each waits for them, but for no more than
    // leave every warp some.
    constexpr int EACH = GATE ? 2 : 1, FINISHED = TILE_ROWS / EACH;  // EACH: sums for a row of y
    const RowShare<FINISHED> share(split);
    constexpr int PIECES = (share.EACH + 31) / 32, MINE = (PIECES * INPUTS + WARPS - 1) / WARPS;
    constexpr int WORDS = PLANES ? 32 : 16, MOST = SPLITS * EACH < WORDS ? WORDS / (SPLITS * EACH) : 1,
                  FEW = MINE < MOST ? MINE : MOST;
    constexpr int ONCE = FEW < INPUTS ? FEW : INPUTS, TIMES = (INPUTS + ONCE - 1) / ONCE;
    const int width = rows / EACH, real = min(share.end, width - tile * FINISHED);
    if (lane == 0) {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) sums_of[warp][b] = 0;
    }
#pragma unroll 1
    for (int i = warp; i < PIECES * TIMES; i += WARPS) {
        const int r = share.begin + i / TIMES * 32 + lane, row = tile * FINISHED + r;
        const int first = i % TIMES * ONCE, inputs = min(ONCE, INPUTS - first);
        const bool is = r < real;  // of the others only the partial sums have to be taken
        float sum[ONCE * EACH] = {}, row_factor[EACH], row_bias[EACH] = {}, row_residual[ONCE] = {};
#pragma unroll
        for (int e = 0; e < EACH; ++e) row_factor[e] = row_scale && is ? row_scale[e * width + row] : 1;
        if (bias && is) {
#pragma unroll
            for (int e = 0; e < EACH; ++e) row_bias[e] = bias[e * width + row];
        }
        if (!GATE && residual && is) {
#pragma unroll
            for (int j = 0; j < ONCE; ++j) {
                if (j < inputs) row_residual[j] = load_l2(residual + (first + j) * rows + row);
            }
        }
        // Sums of a row for an input after the other, of gate and up in turns.
        const int from = (r / BAND_ROWS * INPUTS + first) * BAND_ROWS + r % BAND_ROWS;
        const int present = r < share.end ? inputs * EACH : 0;
        const auto apart = [](int k) { return k / EACH * BAND_ROWS + k % EACH * (COUNT / 2); };
        if (SPLITS > 1) {
            reduce_splits<COUNT>(tile_workspace + from, sum, apart, present);
        } else {
#pragma unroll
            for (int k = 0; k < ONCE * EACH; ++k) {
                if (k < present) sum[k] = own[padded_index(from + apart(k))];
            }
        }
#pragma unroll
        for (int j = 0; j < ONCE; ++j) {
            const bool finishes = is && j < inputs;
            float v = sum[j * EACH] * row_factor[0] + row_bias[0];
            if (GATE) {
                const float up = sum[j * EACH + EACH - 1] * row_factor[EACH - 1] + row_bias[EACH - 1];
                v = gated(ACTIVATION, v, up);
            } else {
                v += row_residual[j];
            }
            if (finishes) y[(first + j) * width + row] = v;
            if (squares_of_y && j < inputs) {  // all lanes
                const float of_squares = warp_sum(finishes ? v * v : 0);
                if (lane == 0) sums_of[warp][first + j] += of_squares;
            }
        }
    }
    if (squares_of_y) {
        sync_consumers<THREADS>();
        if (threadIdx.x < INPUTS) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += sums_of[w][threadIdx.x];
            squares_of_y[(threadIdx.x * gridDim.y + tile) * SPLITS + split] = sum;
        }
    }
    if (active && tile == 0 && threadIdx.x == 0)
        atomic_add(active, DENSE ? column_split.count() * COUNTED_BYTES : list.read);
}
