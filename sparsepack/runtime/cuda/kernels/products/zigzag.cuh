// The layout of zigzag matrices on the GPU. TILE_BANDS bands of 256 rows lie together in a tile, column by column,
// so that what an active column needs is read in longer pieces (SpQt, section 4.1.2):
//
//                column 0                            column 1                            column K - 1
//     tile 0   | band 0 | band 1 | .. TILE_BANDS - 1 | band 0 | band 1 | .. TILE_BANDS - 1 | ... |
//     tile 1   | band TILE_BANDS | ...
//
// A band's piece of a column is a superblock, in an order that a lane can take apart faster than the stored one
// (blocks/*.cuh). Of planes (blocks/q6_p.cuh), a column's piece has its bands' planes in turns, and the ring gets as much of
// it as the column's level says.
//
// The columns of a block travel through a pipeline of STAGES (a ring in shared memory), a k_tile at a time. Warps are
// specialised, as in CUTLASS: the last PRODUCERS warps of a block are producers and fetch, each of them one k_tile
// after the other; the other WARPS are consumers and multiply: warp w has band w % TILE_BANDS, and every K_SLICES-th
// k_tile (CUTLASS's sliced-K). From sm_90 on the copy engine (TMA) takes a column in one piece. A block that reads few
// columns needs no ring: its warps read their k_tiles themselves, and there are no producers.
//
//     ring in shared memory   | stage 0: 16 columns, PITCH bytes apart | stage 1 | .. STAGES - 1 |
//     mbarriers of a stage    | full: producers -> consumers | empty: consumers -> producers |
//
// Launch: grid (SPLITS, tiles), ALL_THREADS threads a block. tile_config.py computes the same shared memory on the
// host.
//
// Where a matrix of planes is divided, `blocks` end with plane CARD_LEVELS of a column, and the others lie in `rest`, mostly in
// the host's memory: [tiles, columns, REST_PITCH]. The ring then has both parts of 16 columns, one after the other. Of
// columns whose rest is not read, since somebody else multiplies it, the first planes are multiplied as those of the
// columns' levels.
//
// Macros: BLOCK (blocks/block.cuh); WARPS, STAGES, TILE_BANDS, PRODUCERS; STAGES 0: no ring; DENSE 1: every column is active, and weights begin
//         to travel before the input is there, into a ring; BULK 0: as before sm_90; OFFLOADED 1: the matrix lies in the
//         host's memory, of which whole lines of 128 bytes are asked for only where both ends of a copy are alike
//         modulo 128 bytes; wherever a column begins in its first line, it ends in the TILE_BANDS + 1 lines from there

#pragma once

#ifndef OFFLOADED
#define OFFLOADED 0
#endif
#include "common/bulk.cuh"
#include "blocks/block.cuh"
#include "products/k_tile.cuh"
#include "products/mma.cuh"

static constexpr int THREADS = WARPS * 32;  // that multiply
static constexpr int ALL_THREADS = THREADS + (STAGES ? 32 * PRODUCERS : 0);
static constexpr int RING_STAGES = STAGES ? STAGES : 1;  // for arrays and remainders
static constexpr int K_SLICES = WARPS / TILE_BANDS;      // warps that share a band
static_assert(STAGES % K_SLICES == 0 && STAGES % PRODUCERS == 0, "a stage always has the same warps");
static_assert(STAGES || !DENSE, "a ring that fills before the input is there");
static constexpr int BAND_ROWS = 256;
static constexpr int TILE_ROWS = TILE_BANDS * BAND_ROWS;
#if PLANES
static constexpr int COLUMN_BYTES = column_bytes(TILE_BANDS, CARD_LEVELS);
static constexpr int REST_PITCH = rest_bytes(TILE_BANDS, CARD_LEVELS, LEVELS);
#else
static constexpr int COLUMN_BYTES = TILE_BANDS * BLOCK_BYTES;
static constexpr int REST_PITCH = 0;
#endif
static constexpr int PIECES = COLUMN_BYTES / 16;    // of 16 bytes in a column
static constexpr bool ALIKE = OFFLOADED && !DENSE;  // columns begin in the ring as far behind a line as in memory
static constexpr int LINE = 128;
// From a column to the next in the ring: where ALIKE whole lines, where DENSE as in memory, since neighbours travel in one
// copy; else an odd number of pieces, so that columns fall on different banks.
// Of planes, whose lanes read 32 bytes of four neighbours at a time, an odd number of 32 bytes.
static constexpr int PITCH = PLANES                ? (COLUMN_BYTES + 31) / 64 * 64 + 32
                             : ALIKE               ? LINE * (TILE_BANDS + 1)
                             : DENSE || PIECES % 2 ? COLUMN_BYTES
                                                   : COLUMN_BYTES + 16;
static_assert(!PLANES || (STAGES && !OFFLOADED), "planes travel to a ring, out of the GPU's memory");
static_assert(!ALIKE || STAGES, "lines travel to a ring");
static constexpr int STAGE_BYTES = K_TILE * (PITCH + REST_PITCH);
static constexpr float NIBBLE = 16777216.0f;  // 2^24: what a nibble in the lowest bits of a float16 lacks

// For weights: they leave the L2 cache first, which makes a token 2 % faster.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Which of a k_tile's 16 columns a lane has as its i-th of four; t: the lane's number of 4. A matrix product adds up its columns in
// any order, so that the four lanes next to each other take columns that fall on different banks: where columns stand a multiple of
// 32 bytes apart, neighbours (of 576 bytes two on the same banks, not four), else every second one.
__device__ __forceinline__ int column_of_lane(int t, int i) {
    return PITCH % 32 == 0 ? t + 4 * i : 2 * t + (i & 1) + 8 * (i >> 1);
}

// Where entry c of a k_tile begins in its stage; base: of the tile, index: of the k_tile's columns.
__device__ __forceinline__ int place_in_stage(int c, const u8* base, const int* index) {
    return c * PITCH + (ALIKE ? (int)((u64)(base + (u64)index[c] * COLUMN_BYTES) % LINE) : 0);
}

#if PLANES
#include "products/plane_in_stage.cuh"
#endif

// What fetches columns into the ring, and tells how many there are: CUTLASS's mainloop pipeline.
struct ColumnPipeline {
    const u8* base;    // of the tile, column 0
    const u8* rest;    // likewise
    int rest_columns;  // of so many first columns it is read
    u8* ring;
    u64 *full, *empty;  // [RING_STAGES]
    const int* index;   // of the block's columns
    ColumnSplit column_split;
    int* listed;  // shared: how many k_tiles there are, once that is announced
    int k_tiles;

    __device__ __forceinline__ int number(int entry) const {
        return DENSE    ? min(column_split.column(entry / COLUMNS_AT_ONCE) + entry % COLUMNS_AT_ONCE,
                              column_split.columns - 1)
               : PLANES ? index[entry] & ((1 << LEVEL_SHIFT) - 1)
                        : index[entry];
    }
#if PLANES
    __device__ __forceinline__ int level(int entry) const { return DENSE ? LEVELS : (u32)index[entry] >> LEVEL_SHIFT; }
    // Bytes of a column that travel, out of `base` and out of `rest`.
    __device__ __forceinline__ int bytes(int entry) const {
        return column_bytes(TILE_BANDS, min(level(entry), CARD_LEVELS));
    }
    __device__ __forceinline__ int more_bytes(int entry) const {
        return has_rest(entry) ? rest_bytes(TILE_BANDS, CARD_LEVELS, level(entry)) : 0;
    }
    __device__ __forceinline__ bool has_rest(int entry) const { return PLANES_DIVIDED && number(entry) < rest_columns; }
#endif

    // Before anything else, by all producer warps, a share of the stages each: a warp's barriers are set up one after
    // the other (16 take most of a microsecond).
    __device__ __forceinline__ void set_up() const {
        constexpr int SHARE = STAGES / PRODUCERS;
        const int stage = (threadIdx.x / 32 - WARPS) * SHARE + threadIdx.x % 32;
        if (threadIdx.x % 32 < SHARE) {
            barrier_init(full + stage, BULK ? 1 : 32 * PRODUCERS);
            barrier_init(empty + stage, TILE_BANDS * ARRIVALS);
        }
#if BULK
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    // By those who list the columns: how many there are.
    __device__ __forceinline__ void announce(int count) const {
        if (threadIdx.x == 0) *listed = ::k_tiles(count);
    }

    // Until the ring is set up and the columns are listed. Where DENSE, producers need no list, and go on.
    __device__ __forceinline__ void wait_for_list(bool is_producer) {
        if (is_producer && DENSE) {
            arrive<BLOCK_BARRIER, ALL_THREADS>();
            sync<PRODUCER_BARRIER, 32 * PRODUCERS>();
        } else {
            sync<BLOCK_BARRIER, ALL_THREADS>();
        }
        k_tiles = DENSE ? column_split.chunks * (COLUMNS_AT_ONCE / K_TILE) : *listed;
    }

    // What producers do: each of them one k_tile after the other, or before sm_90 all of them each k_tile.
    __device__ __forceinline__ void run() const {
        for (int i = BULK ? threadIdx.x / 32 - WARPS : 0; i < k_tiles; i += BULK ? PRODUCERS : 1) {
            if (i >= RING_STAGES) barrier_wait(empty + i % RING_STAGES, (i / RING_STAGES - 1) & 1);
            fetch(i);
        }
    }

    __device__ __forceinline__ void fetch(int i) const {
        const int lane = threadIdx.x % 32, entry = i * K_TILE;
        u8* to = ring + i % RING_STAGES * STAGE_BYTES;
        const u32 arrived = shared_address(full + i % RING_STAGES);
#if BULK && PLANES && (PLANES_DIVIDED || !DENSE)
        const int mine = lane < K_TILE ? bytes(entry + lane) : 0, more = lane < K_TILE ? more_bytes(entry + lane) : 0;
        const u32 all = __reduce_add_sync(ALL_LANES, (u32)(mine + more));
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(all) : "memory");
        __syncwarp();
        if (mine)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to + lane * PITCH)),
                "l"(base + (u64)number(entry + lane) * COLUMN_BYTES), "r"(mine), "r"(arrived), "l"(read_once())
                : "memory");
#if PLANES_DIVIDED
        if (more)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to + K_TILE * PITCH + lane * REST_PITCH)),
                "l"(rest + (u64)number(entry + lane) * REST_PITCH), "r"(more), "r"(arrived), "l"(read_once())
                : "memory");
#endif
#elif BULK
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                         "n"(K_TILE * COLUMN_BYTES)
                         : "memory");
        __syncwarp();
        const bool neighbours =
            DENSE && PITCH == COLUMN_BYTES && number(entry) + K_TILE - 1 < column_split.columns;  // here and there
        if (lane < (neighbours ? 1 : K_TILE))
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to + place_in_stage(lane, base, index + entry))),
                "l"(base + (u64)number(entry + lane) * COLUMN_BYTES), "r"((neighbours ? K_TILE : 1) * COLUMN_BYTES),
                "r"(arrived), "l"(read_once())
                : "memory");
#else
        for (int piece = threadIdx.x - THREADS; piece < K_TILE * PIECES; piece += 32 * PRODUCERS) {
            const int c = piece / PIECES, part = piece % PIECES;
#if PLANES
            if (part * 16 >= bytes(entry + c)) continue;
#endif
            copy_async(to + place_in_stage(c, base, index + entry) + part * 16,
                       base + (u64)number(entry + c) * COLUMN_BYTES + part * 16);
        }
#if PLANES_DIVIDED
        for (int piece = threadIdx.x - THREADS; piece < K_TILE * REST_PITCH / 16; piece += 32 * PRODUCERS) {
            const int c = piece / (REST_PITCH / 16), part = piece % (REST_PITCH / 16);
            if (part * 16 >= more_bytes(entry + c)) continue;
            copy_async(to + K_TILE * PITCH + piece * 16, rest + (u64)number(entry + c) * REST_PITCH + part * 16);
        }
#endif
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrived) : "memory");
#endif
    }
};

// The source of k_tiles: the ring, or the matrix in global memory.
struct FromRing {
    __device__ __forceinline__ u32 word(const u8* p) const { return *(const u32*)p; }
    __device__ __forceinline__ uint2 pair(const u8* p) const { return *(const uint2*)p; }
    __device__ __forceinline__ uint4 words(const u8* p) const { return *(const uint4*)p; }
};
struct FromGlobal {
    u64 policy;
    __device__ __forceinline__ u32 word(const u8* p) const {
        u32 x;
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x) : "l"(p), "l"(policy));
        return x;
    }
    __device__ __forceinline__ uint2 pair(const u8* p) const {
        uint2 x;
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                     : "=r"(x.x), "=r"(x.y)
                     : "l"(p), "l"(policy));
        return x;
    }
    __device__ __forceinline__ uint4 words(const u8* p) const {
        uint4 x;
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(p), "l"(policy));
        return x;
    }
};

// A power of two that leaves `bound` below 2^15.
__device__ __forceinline__ int exponent_for(float bound) {
    const int e = (int)(__float_as_uint(bound) >> 23 & 0xff) - 126;  // bound < 2^e
    return min(max(15 - e, -100), 100);
}
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(127 + e) << 23); }
