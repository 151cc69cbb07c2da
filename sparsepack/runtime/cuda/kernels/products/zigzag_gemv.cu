// y = W[:, active] x[active] for a matrix in zigzag order (SpQt, section 4.2.2), which lies as zigzag.cuh shows; or for
// the experts that tokens have, together.
//
//     blocks  [tiles, columns, TILE_BANDS, BLOCK_BYTES]  ->  pipeline (zigzag.cuh)  ->  sums of a warp
//     x       float32 [columns]  ->  list of active columns (column_split.cuh)
//     sums of warps  ->  of the block  ->  workspace  ->  y float32 [rows]       (split_k_reduce.cuh)
//
// Launch: grid (SPLITS, tiles), with experts (SPLITS, tiles of one, SLOTS * texts); ALL_THREADS threads a block; where
// SHARES > 1, no more blocks than run at once, since they wait for each other. What a warp does with its k_tiles is the
// type's: gemv_q4_k.cuh or gemv_q6_p.cuh, on the tensor cores, or gemv_floats.cuh.
//
// Sums: over the columns of a warp, then over the warps of a block, then over the blocks that share a tile, each in
// order: the same bits every run. Each of these blocks finishes a share of the rows.
//
// Macros: those of zigzag.cuh and column_split.cuh
//         GATE 1: the first half of a tile's bands is of gate, the second of up; activation(gate) * up is written
//         ACTIVATION: number of the function, see activations.cuh; or where GATED of that of the input
//         CHOSEN, SHARED: how many experts a token has, SLOTS together (choose.cuh), whose matrices of one shape lie one
//         after the other; CHOSEN 0: the matrix is one. They share x, and each has a y; with ADDED 1 each has an x, and
//         y is the sum of their products times their weights: the blocks of all experts finish it together; each has
//         thresholds of levels of its own then. Each text of a launch has all of these, one after the other; a launch
//         may add the products of some of them alone, FIRST_SLOT up to LAST_SLOT

#include "common/activations.cuh"

#ifndef WARPS
#define WARPS 8
#define STAGES 4
#define TILE_BANDS 4
#define GATE 0
#define DENSE 0
#define ACTIVATION 0
#define PRODUCERS 4
#endif
#ifndef CHOSEN
#define CHOSEN 0
#define ADDED 0
#endif
#if ADDED
#define SHARES (SPLITS * SLOTS)
#endif

#include "products/choose.cuh"
#include "products/column_split.cuh"
#include "products/split_k_reduce.cuh"
#if PLANES
#include "products/gemv_q6_p.cuh"
#elif LANE_ROWS
#include "products/gemv_floats.cuh"
#else
#include "products/gemv_q4_k.cuh"
#endif

// Without a ring, few enough registers for the next kernel's block to wait beside this one.
static constexpr int RESIDENT = STAGES || WARPS > 8 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(ALL_THREADS, RESIDENT) zigzag_gemv(
    const u8* __restrict__ blocks, int columns, int rows, float largest_scale, float typical_scale,
    const float* __restrict__ row_scale,  // [rows], what their sums are multiplied by; or null
    // of planes that lie elsewhere (zigzag.cuh), of the first rest_tiles tiles, and of the next one's first columns; and where
    // the bytes of a row of superblocks that columns have there by their levels are added up
    const u8* __restrict__ rest, int rest_tiles, int rest_columns, u64* rest_read,
    // what comes in
    const float* x, const float* norm, float eps, const float* squares, int parts, const float* threshold,
    const float* offset, const float* scales,
    // what goes out: y [rows] = product + bias + residual, or of half as many rows activation(gate) * up; of y^2 the
    // sum in each block. bias: [rows], where CHOSEN of each expert
    float* y, const float* bias, const float* residual, float* squares_of_y,
    // sums of active columns, or with planes of the bytes of them that are read; where SCALED, of the weights of inactive
    // ones (column_split.cuh); the blocks' partial sums, every word SENTINEL:
    // [tiles][SHARES][TILE_ROWS], with experts that have a y each [SLOTS][tiles] ..
    u64* active, u64* skipped, float* workspace,
    // flag-in-data words that nobody reads any more
    u32* reset, int reset_count,
    // of the router, where CHOSEN; and by what the weight of each expert is multiplied, or null
    const float* logits, const float* correction, const float* weight_scale) {
    extern __shared__ __align__(128) uint4 memory[];  // bulk copies of columns: both ends alike modulo 128 bytes
    __shared__ float sums_of[WARPS], warp_largest[WARPS], warp_roots[WARPS];
    __shared__ ClassCounts found[WARPS];
    __shared__ u64 full[RING_STAGES], empty[RING_STAGES];
    __shared__ int listed_k_tiles;
    __shared__ float weight;  // where ADDED
    __shared__ int chosen;    // where there are biases
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band = warp % TILE_BANDS, k_slice = warp / TILE_BANDS;
    const int split = blockIdx.x, tile = blockIdx.y;
    // Of the launch; the token's slots begin FIRST_SLOT before.
    const int slot = CHOSEN ? blockIdx.z % SLOTS : 0, text = CHOSEN ? blockIdx.z / SLOTS : 0;
    const u8* tile_base = blocks + (u64)tile * columns * COLUMN_BYTES;
    const bool is_producer = STAGES && warp >= WARPS;
    static_assert(STAGES || !CHOSEN, "producers choose");
    const ColumnSplit column_split(columns, split);
    init_consumer_barrier<THREADS>();

    // ring [STAGES]; sums [WARPS][PADDED_ROWS]; list
    u8* ring = (u8*)memory;
    float* own = (float*)(ring + STAGES * STAGE_BYTES);
    const int most = ColumnSplit::most(columns);
    List list{own + WARPS * PADDED_ROWS, (int*)(own + WARPS * PADDED_ROWS + most), most, 0, 0};

    const u8* tile_rest = rest + (u64)tile * columns * REST_PITCH;
    const int with_rest = tile < rest_tiles ? columns : tile == rest_tiles ? rest_columns : 0;
    ColumnPipeline pipeline{tile_base, tile_rest,  with_rest,    ring,           full,
                            empty,     list.index, column_split, &listed_k_tiles};
#if !PLANES
    const SubBlock bits(lane / 4);
    KTile k_tile;
    const auto fetch = [&](int i) {  // where there is no ring
        const auto header = [&](int c) {
            return tile_base + (u64)list.index[i * K_TILE + c] * COLUMN_BYTES + band * BLOCK_BYTES;
        };
        k_tile.read(header, FromGlobal{read_once()}, bits);
    };
#endif
    Magnitudes seen;
    if (is_producer) {  // while the input is not there yet
        pipeline.set_up();
#if CHOSEN
        if (!FLAG_IN_DATA) wait_for_previous();
        const Chosen expert = choose(logits + text * LOGITS, correction, FIRST_SLOT + slot);
        pipeline.base += (u64)expert.number * gridDim.y * columns * COLUMN_BYTES;
        if ((ADDED || bias) && threadIdx.x == THREADS) {
            weight = expert.weight * (weight_scale ? weight_scale[expert.number] : 1), chosen = expert.number;
            __threadfence_block();
        }
#endif
    } else {
        // Constants that are needed later.
        const int row = tile * TILE_ROWS + threadIdx.x * 32;
        if (!GATE && !CHOSEN && bias && threadIdx.x * 32 < TILE_ROWS && row < rows) prefetch_l2(bias + row);
        if (!GATE && row_scale && threadIdx.x * 32 < TILE_ROWS && row < rows) prefetch_l2(row_scale + row);
        const float* own_x = x + (ADDED ? text * ALL_SLOTS + FIRST_SLOT + slot : text) * EACH_COLUMN * columns;
#if ADDED && OF_LEVELS
        if (!FLAG_IN_DATA) wait_for_previous();
        threshold += (u64)choose(logits + text * LOGITS, correction, FIRST_SLOT + slot).number * LEVELS * columns;
#endif
        u64* own_skipped = tile || !skipped ? nullptr : skipped + text;
        const Site site{own_x,  columns,       norm, eps,         squares + text * parts,    parts, threshold,
                        offset, scales + text, rows, own_skipped, tile ? nullptr : rest_read};
        seen = compact_active<WARPS, DENSE>(site, column_split, list, found, sums_of, [] {
            if (!FLAG_IN_DATA) wait_for_previous();
        });
        pipeline.announce(list.count);
    }
    pipeline.wait_for_list(is_producer);
#if !PLANES
    if (!STAGES && k_slice < pipeline.k_tiles) fetch(k_slice);
#endif
    if (!is_producer || !DENSE) launch_dependents();  // not before: see common/flag_in_data.cuh
    if (is_producer) {
        pipeline.run();
        if (reset && blockIdx.z == 0) {
            wait_for_previous();
            constexpr int EACH = PRODUCERS * 32;
            const int number = (tile * SPLITS + split) * EACH + threadIdx.x - THREADS;
            ll_reset(reset, reset_count, number, gridDim.y * SPLITS * EACH);
        }
        return;
    }

    // The rows of y that this block finishes.
    constexpr int FINISHED = GATE ? TILE_ROWS / 2 : TILE_ROWS;
    const int number = ADDED ? slot * SPLITS + split : split;  // of the block among those that share the tile's sums
    const RowShare<FINISHED> share(number);
    if (residual) residual += text * rows;
    y += (CHOSEN && !ADDED ? blockIdx.z : text) * (GATE ? rows / 2 : rows);
    const int real = (GATE ? rows / 2 : rows) - tile * FINISHED;

    // What the first of them need besides.
    const float* expert_bias = nullptr;  // added to the partial sums, times the weight
    if (CHOSEN && bias) bias += (u64)chosen * rows;
    if (ADDED) expert_bias = bias, bias = nullptr;
    const auto of_row = [&](const float* from, int r, float otherwise = 0) {
        return !GATE && from && r < min(share.end, real) ? load_l2(from + tile * FINISHED + r) : otherwise;
    };
    float row_residual = of_row(residual, share.begin + threadIdx.x);
    float row_bias = of_row(bias, share.begin + threadIdx.x);
    float row_factor = of_row(row_scale, share.begin + threadIdx.x, 1);

    // The scale, while the first columns travel.
    const float largest_of_warp = warp_max_magnitude(seen.largest.of[0]),
                roots_of_warp = PLANES ? warp_sum(seen.roots.of[0]) : 0;
    if (lane == 0) warp_largest[warp] = largest_of_warp, warp_roots[warp] = roots_of_warp;
    sync_consumers<THREADS>();
    float largest = 0, roots = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, warp_largest[w]), roots += PLANES ? warp_roots[w] : 0;
    Accumulator sums = {};
#if PLANES
    // A mean |x| times the mean S; typical_scale is almost 17 times the latter (products/zigzag.py).
    const float root = roots / max(list.count, 1);
    const int exponent = exponent_for(root * root * typical_scale / 2);
    const float scale = power_of_two(exponent);
    const PlanePlaces places{TILE_BANDS, band};
    const LaneOffsets offsets(places);
    u8* scratch = (u8*)(own + warp * PADDED_ROWS);
#pragma unroll 1
    for (int i = k_slice; i < pipeline.k_tiles; i += (PAIRED ? 2 : 1) * K_SLICES) {
        const int stage = i % RING_STAGES, next = i + K_SLICES, next_stage = next % RING_STAGES;
        const bool both = PAIRED && next < pipeline.k_tiles;
        barrier_wait(full + stage, i / RING_STAGES & 1);
        if (both) barrier_wait(full + next_stage, next / RING_STAGES & 1);
        const u8* at = ring + stage * STAGE_BYTES;
        const PlanesTiles tiles{at,
                                both ? ring + next_stage * STAGE_BYTES : at,
                                list.index + i * K_TILE,
                                list.value + i * K_TILE,
                                both ? K_SLICES * K_TILE : 0,
                                both,
                                pipeline,
                                i * K_TILE};
        multiply(sums, tiles, places, offsets, scale, scratch);
        warp_arrive(empty + stage);
        if (both) warp_arrive(empty + next_stage);
    }
#else
    const int exponent = exponent_for(largest * largest_scale);
    const float scale = power_of_two(exponent);
#pragma unroll 1
    for (int i = k_slice; i < pipeline.k_tiles; i += K_SLICES) {
        if (STAGES) {
            const u8* first = ring + i % RING_STAGES * STAGE_BYTES + band * BLOCK_BYTES;
            barrier_wait(full + i % RING_STAGES, i / RING_STAGES & 1);
            const int* columns_of = list.index + i * K_TILE;
            k_tile.read([&](int c) { return first + place_in_stage(c, tile_base, columns_of); }, FromRing(), bits);
        }
        multiply(sums, k_tile, list.value + i * K_TILE, scale, bits);
        if (STAGES) {
            warp_arrive(empty + i % RING_STAGES);
        } else if (i + K_SLICES < pipeline.k_tiles) {
            fetch(i + K_SLICES);
        }
    }
#endif
    store_sums(sums, (ADDED ? weight : 1) * power_of_two(-exponent), own + warp * PADDED_ROWS);
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    sync_consumers<THREADS>();

    float* tile_workspace = workspace + ((ADDED ? text : blockIdx.z) * gridDim.y + tile) * SHARES * TILE_ROWS;
    if (ADDED && expert_bias && split == 0) {
        for (int r = threadIdx.x; r < TILE_ROWS && tile * TILE_ROWS + r < rows; r += THREADS)
            own[padded_index(r)] += weight * expert_bias[tile * TILE_ROWS + r];
        sync_consumers<THREADS>();
    }
    reduce_warps<TILE_ROWS>(own, tile_workspace + number * TILE_ROWS);
    constexpr int EACH = GATE ? 2 : 1;  // sums for a row of y
    float of_squares = 0;
#pragma unroll 1
    for (int r = share.begin + threadIdx.x; r < share.end; r += THREADS) {
        float sum[EACH] = {};
        if (SHARES > 1) {
            reduce_splits<TILE_ROWS>(tile_workspace + r, sum, [](int j) { return j * FINISHED; });
        } else {
            for (int j = 0; j < EACH; ++j) sum[j] = own[padded_index(r + j * FINISHED)];
        }
        if (r >= real) continue;  // only its partial sums had to be taken
        const int row = tile * FINISHED + r;
        float v = sum[0] * row_factor + row_residual + row_bias;
        if (GATE) {
            float up = sum[EACH - 1];
            if (row_scale) {
                v *= row_scale[row];
                up *= row_scale[rows / 2 + row];
            }
            if (bias) {
                v += bias[row];
                up += bias[rows / 2 + row];
            }
            v = gated(ACTIVATION, v, up);
        }
        ll_store(y + row, v);
        of_squares += v * v;
        row_residual = of_row(residual, r + THREADS), row_bias = of_row(bias, r + THREADS);
        row_factor = of_row(row_scale, r + THREADS, 1);
    }
    if (squares_of_y) {
        of_squares = warp_sum(of_squares);
        constexpr int WRITERS = share.EACH < THREADS ? (share.EACH + 31) / 32 : WARPS;  // warps that had rows
        if (WRITERS > 1) {
            if (lane == 0) sums_of[warp] = of_squares;
            sync_consumers<THREADS>();
            of_squares = 0;
#pragma unroll
            for (int w = 0; w < WRITERS; ++w) of_squares += sums_of[w];
        }
        if (threadIdx.x == 0) ll_store(squares_of_y + (text * gridDim.y + tile) * SHARES + number, of_squares);
    }
    if (!STAGES && reset) {
        const int thread = (tile * SPLITS + split) * THREADS + threadIdx.x;
        ll_reset(reset, reset_count, thread, gridDim.y * SPLITS * THREADS);
    }
    if (active && tile == 0 && threadIdx.x == 0)
        atomic_add(active, DENSE ? column_split.count() * COUNTED_BYTES : list.read);
}
