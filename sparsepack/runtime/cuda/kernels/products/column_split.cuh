// The columns that a block of a product takes, and the list of the active ones (SpQt, section 4.2.3).
//
// The columns of a product are split over the SPLITS blocks of a tile (CUTLASS's split-K), COLUMNS_AT_ONCE at a time in
// turns, so that neighbours that are active together fall to different blocks:
//
//     columns     | 0 .. 31 | 32 .. 63 | .. SPLITS chunks | next 32 | ...
//     block       |    0    |    1     | ..               |    0    | ...
//
// A block then needs only its own part of the input (and all of it for a norm without SQUARES), and nobody's count of
// active columns but its own. compact_active() leaves a list of them in shared memory, in ascending order (a stream
// compaction), filled up to whole k_tiles by columns with value 0. Inputs that are multiplied together share the list:
// a column is active where it is in any of them.
//
// Of blocks with planes (PLANES), a column has a level, the largest that any input asks for, and the list holds it beside
// the column's number. Levels that kernels multiply alike lie together, a class of them, the highest first: 4 and 5, 2 and 3, 1.
//
// Launch: grid (SPLITS, tiles); the first WARPS warps of a block list its columns.

#pragma once

#include "blocks/block.cuh"
#include "products/k_tile.cuh"
#include "common/activations.cuh"
#include "common/flag_in_data.cuh"

// Macros, so that kernels stay small (a cold one waits for its instructions): SPLITS; ROUNDS chunks that a warp takes
//         at a time, PASSES times; FLAG_IN_DATA 1: inputs are read as soon as stored (common/flag_in_data.cuh), not
//         when the kernel before has ended; NORM 1: RMSNorm comes first; SQUARES: how many parts of its sum of
//         squares a thread takes that others have added up, 0: the sum is made here; OFFSET 1: it is taken from x;
//         PER_CHANNEL 1: a threshold for each column; OF_LEVELS 1: LEVELS of them, the level of a column is how many its
//         input exceeds, else it is LEVELS or nothing; SCALED 1: thresholds are scaled, each input's by a number of its
//         own; INPUTS: how many are multiplied together, 1 where FLAG_IN_DATA; GATED 1: x is activation(gate) * up of
//         what lies there, ACTIVATION the function's number (common/activations.cuh), and there is no norm
#ifndef SPLITS
#define SPLITS 2
#define ROUNDS 4
#define PASSES 1
#define FLAG_IN_DATA 0
#define NORM 1
#define SQUARES 0
#define OFFSET 1
#define PER_CHANNEL 1
#endif
#ifndef INPUTS
#define INPUTS 1
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef OF_LEVELS
#define OF_LEVELS 0
#endif
#ifndef GATED
#define GATED 0
#endif
static_assert(!NORM || !GATED, "norms are of x as it lies there");
static_assert(INPUTS == 1 || !FLAG_IN_DATA, "one input can have its flag in the data");
static_assert(!OF_LEVELS || (PLANES && PER_CHANNEL), "levels of columns with planes");

static constexpr int COLUMNS_AT_ONCE = 32;
static constexpr int LIMITS = OF_LEVELS ? LEVELS : 1;   // thresholds of a column
static constexpr int LEVEL_SHIFT = 28;                  // in the list, above a column's number where there are planes
static constexpr int EACH_COLUMN = GATED == 1 ? 2 : 1;  // numbers of the input

// What a site does with its inputs, float32 [INPUTS][columns], or where GATED is 1 [INPUTS][2 columns]: gate, then up.
struct Site {
    const float* x;
    int columns;
    const float* norm;  // RMSNorm's weight [columns]
    float eps;
    const float* squares;  // partial sums of x^2, in order: [INPUTS][parts]
    int parts;
    const float* threshold;  // [1] or [columns], or where OF_LEVELS [LEVELS][columns], an expert's own where ADDED
    const float* offset;     // [columns]
    // Where SCALED: what thresholds are multiplied by [INPUTS], written by the last kernel of the step before, which has
    // ended when this step's graph begins; how many weights lay in inactive columns of this site, or of planes how many
    // of their COUNTED_BYTES were not read, times the weights, which is added to skipped [INPUTS] for each input, and may
    // be null.
    const float* scales;
    int rows;
    u64* skipped;
    u64* rest_read;  // of a divided matrix: the bytes that columns have in what lies elsewhere are added; or null
};

// A number for each input.
struct PerInput {
    float of[INPUTS] = {};
};

// Sums over the lanes of a warp, in the same order every time: lane b gets that of input b. Lanes give half of their
// values away as long as they have several, so that 8 inputs take 9 shuffles instead of 40.
__device__ __forceinline__ float warp_sums(const PerInput& each) {
    constexpr int VALUES = INPUTS > 4 ? 8 : INPUTS > 2 ? 4 : INPUTS;
    float x[VALUES] = {};
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) x[b] = each.of[b];
#pragma unroll
    for (int half = VALUES / 2; half; half /= 2) {
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, given, half);
        }
    }
#pragma unroll
    for (int step = 16; step >= VALUES; step /= 2) x[0] += __shfl_xor_sync(ALL_LANES, x[0], step);
    return x[0];
}

// The chunks of a block, and their columns.
struct ColumnSplit {
    int columns, split, chunks;

    __device__ __forceinline__ ColumnSplit(int columns, int split)
        : columns(columns),
          split(split),
          chunks(((columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE - split + SPLITS - 1) / SPLITS) {}

    // The first column of a chunk.
    __device__ __forceinline__ int column(int chunk) const { return (chunk * SPLITS + split) * COLUMNS_AT_ONCE; }
    // The number of columns that the block has in all.
    __device__ __forceinline__ int count() const {
        return chunks ? (chunks - 1) * COLUMNS_AT_ONCE + min(COLUMNS_AT_ONCE, columns - column(chunks - 1)) : 0;
    }
    // The most columns that any block of the tile may have, filled up to whole chunks.
    __device__ __forceinline__ static int most(int columns) {
        return ((columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE + SPLITS - 1) / SPLITS * COLUMNS_AT_ONCE;
    }
};

// Active columns: entry i is column index[i], with planes below its level; input b has value[b * stride + i] there. read:
// how many columns are active, or with planes the bytes of them that count.
struct List {
    float* value;
    int* index;
    int stride, count, read;

    // Entry i: the inputs have v(b) at column k.
    template <typename Value>
    __device__ __forceinline__ void put(int i, Value v, int k) const {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) value[b * stride + i] = v(b);
        index[i] = k;
    }
    // `put` where `is`, of one input, without the branch that compilers would make of an `if`.
    template <typename Value>
    __device__ __forceinline__ void put_if(u32 is, int i, Value v, int k) const {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n"
            "@p st.shared.f32 [%1], %2;\n@p st.shared.u32 [%3], %4;\n}" ::"r"(is),
            "r"(shared_address(value + i)), "f"(v(0)), "r"(shared_address(index + i)), "r"(k)
            : "memory");
#pragma unroll
        for (int b = 1; b < INPUTS; ++b) {
            asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.shared.f32 [%1], %2;\n}" ::"r"(is),
                         "r"(shared_address(value + b * stride + i)), "f"(v(b))
                         : "memory");
        }
    }
    // Up to a whole k_tile. For all threads of a block.
    __device__ __forceinline__ void fill_up() const {
        if (threadIdx.x < (-count & (K_TILE - 1))) put(count + threadIdx.x, [](int) { return 0.0f; }, 0);
    }
};

// A warp's part of the inputs: round r has the 32 columns of the block's chunk first + r, one in each lane.
struct InputChunks {
    float v[INPUTS][ROUNDS], norm[ROUNDS], threshold[LIMITS][ROUNDS], offset[ROUNDS];

    __device__ __forceinline__ static bool real(const ColumnSplit& column_split, int chunk, int k) {
        return chunk < column_split.chunks && k < column_split.columns;
    }

    // What may be loaded before the input is there.
    __device__ __forceinline__ void prepare(const Site& site, const ColumnSplit& column_split, int first) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int k = column_split.column(first + r) + threadIdx.x % 32;
            const bool is = real(column_split, first + r, k);
            if (NORM) norm[r] = is ? site.norm[k] : 0;
#pragma unroll
            for (int l = 0; PER_CHANNEL && l < LIMITS; ++l)
                threshold[l][r] = is ? site.threshold[l * site.columns + k] : 0;
            if (OFFSET) offset[r] = is ? site.offset[k] : 0;
        }
    }

    // Returns what the thread has of the sums of squares: PARTS partial sums of each, which it waits for together.
    template <int PARTS, int THREADS>
    __device__ __forceinline__ PerInput load(const Site& site, const ColumnSplit& column_split, int first) {
        constexpr int VALUES = EACH_COLUMN * ROUNDS;
        const auto at = [&](int r) {
            if (r >= VALUES) {
                const int part = (r - VALUES) * THREADS + threadIdx.x;
                return part < site.parts ? site.squares + part : nullptr;
            }
            const int chunk = first + r % ROUNDS, k = column_split.column(chunk) + threadIdx.x % 32;
            return real(column_split, chunk, k) ? site.x + r / ROUNDS * site.columns + k : nullptr;
        };
        float both[INPUTS][VALUES + PARTS];
        if (FLAG_IN_DATA) {
            ll_wait(both[0], at);
        } else {
#pragma unroll
            for (int r = 0; r < VALUES; ++r) {  // an input where there is no column: fewer instructions than none
                const int chunk = first + r % ROUNDS, k = column_split.column(chunk) + threadIdx.x % 32;
                const bool is = real(column_split, chunk, k);
                const int place = is ? r / ROUNDS * site.columns + k : 0;
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) {
                    const float x = load_l2(site.x + b * EACH_COLUMN * site.columns + place);
                    both[b][r] = is ? x : 0;
                }
            }
#pragma unroll
            for (int r = VALUES; r < VALUES + PARTS; ++r) {
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) both[b][r] = at(r) ? load_l2(at(r) + b * site.parts) : 0;
            }
        }
        PerInput sums;
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                v[b][r] = both[b][r];
                if (GATED) v[b][r] = gated(ACTIVATION, v[b][r], both[b][VALUES - ROUNDS + r]);
            }
#pragma unroll
            for (int r = 0; r < PARTS; ++r) sums.of[b] += both[b][VALUES + r];
        }
        return sums;
    }

    __device__ __forceinline__ void finish(const PerInput& scale) {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                if (NORM) v[b][r] *= scale.of[b] * norm[r];
                if (OFFSET) v[b][r] -= offset[r];
            }
        }
    }

    // The level of the lane's column of a round whose input has this magnitude; 0: it is inactive.
    __device__ __forceinline__ int level(int r, float magnitude, float limit, float scale) const {
        int exceeded = 0;
#pragma unroll
        for (int l = 0; l < LIMITS; ++l) {
            const float unscaled = PER_CHANNEL ? threshold[l][r] : limit;
            exceeded += magnitude > (SCALED ? __fmul_rn(scale, unscaled) : unscaled);
        }
        return OF_LEVELS ? exceeded : exceeded * LEVELS;
    }
    __device__ __forceinline__ int level(int r, int b, float limit, const PerInput& scales) const {
        return level(r, fabsf(v[b][r]), limit, scales.of[b]);
    }
    // The largest in any input.
    __device__ __forceinline__ int level(int r, float limit, const PerInput& scales) const {
        int of_any = 0;
        float largest = 0;
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            if (SCALED) of_any = max(of_any, level(r, b, limit, scales));
            largest = fmaxf(largest, fabsf(v[b][r]));
        }
        return SCALED ? of_any : level(r, largest, limit, 1);
    }
};

// A thread's share of the sums of x^2.
template <int THREADS>
__device__ __forceinline__ PerInput own_squares(const Site& site) {
    PerInput sums;
#pragma unroll 4
    for (int k = threadIdx.x; k < site.columns; k += THREADS) {
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            const float v = load_l2(site.x + b * site.columns + k);
            sums.of[b] += v * v;
        }
    }
    return sums;
}

static constexpr int CLASSES = PLANES ? 3 : 1;
__device__ __forceinline__ int class_of(int level) { return PLANES ? (level > 0) + (level > 1) + (level > 3) : level; }

// How many columns have a class above each, and behind them with planes the sum of their levels: two to a word, so that those
// of warps are added quickly.
struct alignas(PLANES ? 8 : 4) ClassCounts {
    static constexpr int WORDS = PLANES ? 2 : 1;
    u32 words[WORDS];

    __device__ __forceinline__ static ClassCounts none() { return {}; }
    // Classes end at CLASSES.
    __device__ __forceinline__ int above(int c) const { return c < CLASSES ? words[c / 2] >> c % 2 * 16 & 0xffff : 0; }
    __device__ __forceinline__ int levels() const { return PLANES ? words[WORDS - 1] >> 16 : 0; }
    __device__ __forceinline__ void add(int c, int count) { words[c / 2] += count << c % 2 * 16; }
    __device__ __forceinline__ void add_levels(int sum) { words[WORDS - 1] += sum << 16; }
    __device__ __forceinline__ void add(const ClassCounts& other) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] += other.words[i];
    }
};

// What a thread has seen of the magnitudes of active columns. roots: the sum of their square roots, whose square over all is a mean that
// few large ones hardly move.
struct Magnitudes {
    PerInput largest, roots;

    __device__ __forceinline__ void add(int b, float magnitude) {
        float root;
        asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(magnitude));
        largest.of[b] = fmaxf(largest.of[b], magnitude);
        roots.of[b] += root;
    }
};

// Lists the active columns of a block, or with ALL the values of all of them, and returns what a thread has seen of them. For BLOCK_WARPS warps. found: of shared memory for each warp; sums: likewise a float for each input. before_input() is called once everything that may be loaded before the input is on its way.
template <int BLOCK_WARPS, bool ALL, typename BeforeInput>
__device__ __forceinline__ Magnitudes compact_active(const Site& site, const ColumnSplit& column_split, List& list,
                                                     ClassCounts* found, float* sums, BeforeInput before_input) {
    constexpr int THREADS = BLOCK_WARPS * 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    InputChunks in;
    in.prepare(site, column_split, warp * ROUNDS);
    const float limit = ALL || PER_CHANNEL ? 0 : *site.threshold, share = 1.0f / site.columns;
    PerInput scales;
#pragma unroll
    for (int b = 0; SCALED && !ALL && b < INPUTS; ++b) scales.of[b] = load_l2(site.scales + b);
    before_input();
    PerInput squares = in.load<SQUARES, THREADS>(site, column_split, warp * ROUNDS), scale;
    if (NORM) {
        if (!SQUARES) squares = own_squares<THREADS>(site);
        const float warps = warp_sums(squares);
        if (lane < INPUTS) sums[warp * INPUTS + lane] = warps;
        sync_consumers<THREADS>();
        float sum = 0;  // in lane b of input b
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; ++w) sum += sums[w * INPUTS + lane % INPUTS];
        const float mine = rsqrtf(sum * share + site.eps);
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) scale.of[b] = INPUTS > 1 ? __shfl_sync(ALL_LANES, mine, b) : mine;
    }
    Magnitudes seen;
    int unread[INPUTS] = {};  // of several inputs, of the warp, or with planes of the lane
    list.count = list.read = 0;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const int first = (pass * BLOCK_WARPS + warp) * ROUNDS;
        if (pass) {
            in.prepare(site, column_split, first);
            in.load<0, THREADS>(site, column_split, first);
        }
        in.finish(scale);
        if (ALL) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int chunk = first + r;
                if (chunk >= column_split.chunks) continue;
                const bool is = column_split.column(chunk) + lane < column_split.columns;
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) {
                    const float v = is ? in.v[b][r] : 0;
                    list.value[b * list.stride + chunk * COLUMNS_AT_ONCE + lane] = v;
                    seen.add(b, fabsf(v));
                }
            }
            continue;
        }
        u32 masks[CLASSES][ROUNDS];  // lanes whose class is above
        ClassCounts mine = ClassCounts::none();
        int levels[ROUNDS], sum_of_levels = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int k = column_split.column(first + r) + lane;
            const bool real = InputChunks::real(column_split, first + r, k);
            levels[r] = real ? in.level(r, limit, scales) : 0;
            sum_of_levels += levels[r];
#pragma unroll
            for (int b = 0; SCALED && INPUTS > 1 && b < INPUTS; ++b) {
                const int level = real ? in.level(r, b, limit, scales) : LEVELS;
                if (PLANES) {
                    unread[b] += COUNTED_BYTES - counted_bytes(level);
                } else {
                    unread[b] += __popc(__ballot_sync(ALL_LANES, !level));
                }
            }
            if (levels[r]) {
#pragma unroll
                for (int b = 0; b < INPUTS; ++b) seen.add(b, fabsf(in.v[b][r]));
            }
#pragma unroll
            for (int c = 0; c < CLASSES; ++c) {
                masks[c][r] = __ballot_sync(ALL_LANES, class_of(levels[r]) > c);
                mine.add(c, __popc(masks[c][r]));
            }
        }
        if (PLANES) mine.add_levels(__reduce_add_sync(ALL_LANES, sum_of_levels));
#if PLANES_DIVIDED
        if (site.rest_read) {
            u32 beyond = 0;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) beyond += rest_bytes(1, CARD_LEVELS, levels[r]);
            beyond = __reduce_add_sync(ALL_LANES, beyond);
            if (lane == 0) atomic_add(site.rest_read, beyond);
        }
#endif
        if (lane == 0) found[warp] = mine;
        sync_consumers<THREADS>();
        ClassCounts before = ClassCounts::none(), all = ClassCounts::none();
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; ++w) {
            const ClassCounts of_warp = found[w];
            if (w < warp) before.add(of_warp);
            all.add(of_warp);
        }
        int at[CLASSES];  // where the next of a class goes, behind all higher ones
#pragma unroll
        for (int c = 0; c < CLASSES; ++c) at[c] = list.count + all.above(c + 1) + before.above(c) - before.above(c + 1);
        list.count += all.above(0);
        list.read += PLANES ? all.above(0) * COUNTED_HEADER + all.levels() * COUNTED_OF_LEVEL : all.above(0);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            int place = 0;
#pragma unroll
            for (int c = 0; c < CLASSES; ++c) {
                const u32 exactly = c + 1 < CLASSES ? masks[c][r] & ~masks[c + 1][r] : masks[c][r];
                if (class_of(levels[r]) == c + 1) place = at[c] + lanes_before(exactly);
                at[c] += __popc(exactly);
            }
            const auto v = [&](int b) { return in.v[b][r]; };
            const int k = column_split.column(first + r) + lane;
            list.put_if(levels[r], place, v, PLANES ? k | levels[r] << LEVEL_SHIFT : k);
        }
        if (pass + 1 < PASSES) sync_consumers<THREADS>();
    }
    if (ALL) {
        list.count = column_split.chunks * COLUMNS_AT_ONCE;
        list.read = column_split.count() * COUNTED_BYTES;
#if PLANES_DIVIDED
        if (site.rest_read && threadIdx.x == 0)
            atomic_add(site.rest_read, column_split.count() * rest_bytes(1, CARD_LEVELS, LEVELS));
#endif
    } else {
        if (SCALED && site.skipped && INPUTS == 1 && threadIdx.x == 0)
            atomic_add(site.skipped, (u64)site.rows * (column_split.count() * COUNTED_BYTES - list.read));
#pragma unroll
        for (int b = 0; SCALED && INPUTS > 1 && b < INPUTS; ++b) {
            if (PLANES) unread[b] = __reduce_add_sync(ALL_LANES, unread[b]);
            if (site.skipped && lane == b) atomic_add(site.skipped + b, (u64)site.rows * unread[b]);
        }
        list.fill_up();
    }
    return seen;
}
