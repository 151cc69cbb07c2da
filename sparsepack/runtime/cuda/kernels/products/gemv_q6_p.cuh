// How a warp of zigzag_gemv.cu multiplies k_tiles of Q6_P, two of them together, on the tensor cores in integers:
//
//     mma.m16n8k32:  A [16, 32]  = words as they lie, of 8 columns: k = byte of a word, one of each group of 64 rows
//                    B [32, 8]   = digit n / 4 of x S of group n % 4, for byte n % 4 alone
//
// So an instruction or two prepare 16 weights of a lane, B is the same for all rows, and no byte is moved. Rows that share a
// byte share their group: products of the whole byte, of its upper bits, of the uppermost .. become those of each by
// subtraction, of sums, at the end.
//
//     level 1        plane 1 as it is: four rows a byte, three masks
//     levels 2, 3    planes 1 to 3 are nibbles of two words: two rows a byte, one mask
//     levels 4, 5    these, and planes 4 and 5 together as plane 1
//
// x S is an integer of 16 bits, in two signed digits of 8 bits, such that a mean |x| (column_split.cuh) times the mean S is
// 2^11 or more. A column with more than 16 bits is multiplied by itself in float32. Sums of the others are exact. Lane (g, t) =
// (lane / 4, lane % 4) has rows 8 g .. 8 g + 7 of all groups, of columns t, t + 4, .. Before, it has a column of the 32, for
// which it computes factors and adds up minima.

#pragma once

#include "products/zigzag.cuh"

struct Accumulator {
    int first[4][4], nibbles[4][4], last[4][4];  // of masks, of what is multiplied together
    float minimum[4];                            // of each group, of the lane's columns
    bool any_rows;
    float rows[8];  // of columns in float32, of rows 8 lane ..
};

static constexpr bool PAIRED = STAGES >= 2 * K_SLICES;  // else a warp waits for a stage that it has itself
static constexpr float LARGEST = 32512;                 // factor that two digits show

template <u32 MASK>
__device__ __forceinline__ void mma_masked(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const u32 masked[4] = {a[0] & MASK, a[1] & MASK, a[2] & MASK, a[3] & MASK};
    mma(c, masked, b);
}
// Of four rows a byte: all, the upper three, two, one.
__device__ __forceinline__ void multiply_pairs(int (&c)[4][4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma(c[0], a, b);
    mma_masked<0xfcfcfcfc>(c[1], a, b);
    mma_masked<0xf0f0f0f0>(c[2], a, b);
    mma_masked<0xc0c0c0c0>(c[3], a, b);
}

// What a lane adds to where stages, the list and the warp's scratch begin. In scratch, for columns t, t + 4, ..: their words of
// each kind, 8 of them, one kind after the other: digits 0 and 1, masks of planes 2 and 3, of 4 and 5.
struct LaneOffsets {
    static constexpr int PITCH_OF_SCRATCH = 4 * 32 + 16;  // bytes, of a t
    int header, entry;                                    // of the lane's column in its k_tile
    int first, planes, rest;  // of column t: words of plane 1, of plane 2, of what lies elsewhere
    int put, digits, masks;
    u32 place;  // of the lane's group in a word

    __device__ __forceinline__ explicit LaneOffsets(const PlanePlaces& places) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        header = kept(lane % K_TILE * PITCH + places.header(0));
        entry = kept(lane % K_TILE);
        first = kept(t * PITCH + places.first() + g * 8);
        planes = kept(t * PITCH + places.plane(2) + g * 4);
        rest = PLANES_DIVIDED ? kept(K_TILE * PITCH + t * REST_PITCH + places.band * PLANE_BYTES + g * 4) : 0;
        put = kept(t * PITCH_OF_SCRATCH + g * 4);
        masks = kept(t * PITCH_OF_SCRATCH + 64);
        digits = kept(t * PITCH_OF_SCRATCH + g / 4 * 32);
        place = kept(0xff << g % 4 * 8);
    }
};

// Two k_tiles that a warp multiplies together. Of the second, where there is none, everything is the first's but levels.
struct PlanesTiles {
    const u8 *stage, *next;
    const int* index;
    const float* value;
    int next_entry;  // from the first k_tile's entries to the second's
    bool both;
    const ColumnPipeline& pipeline;
    int entry;  // the first k_tile's first

    // The level at which the ring has an entry of a level.
    __device__ __forceinline__ int present_level(int number, int level) const {
#if PLANES_DIVIDED
        if (level > CARD_LEVELS && !pipeline.has_rest(entry + number)) return CARD_LEVELS;
#endif
        return level;
    }
};

// Add 32 columns whose factors lie in scratch. nibbles, last: whether any has more than a level, more than three. Of level 0,
// whatever lies there: its factors are zero.
__device__ __forceinline__ void multiply_columns(Accumulator& sums, const PlanesTiles& tiles, const LaneOffsets& lane,
                                                 const u8* scratch, bool nibbles, bool last) {
    constexpr int COLUMNS = 8;  // of a lane
    const auto stage = [&](int i) { return i < COLUMNS / 2 ? tiles.stage : tiles.next; };
    const auto take = [&](int offset, u32(&of)[COLUMNS]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint4 words = *(const uint4*)(scratch + offset + 16 * n);
            of[4 * n] = words.x, of[4 * n + 1] = words.y, of[4 * n + 2] = words.z, of[4 * n + 3] = words.w;
        }
    };
    u32 b[COLUMNS], masks[COLUMNS];
    take(lane.digits, b);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) b[i] &= lane.place;
    const auto first = [&](int i) { return *(const uint2*)(stage(i) + lane.first + i % (COLUMNS / 2) * 4 * PITCH); };
    const auto planes = [&](int i, int plane) {
        const auto at = [&](int number) {
            return stage(i) + plane_in_stage(lane.planes, lane.rest, number, i % (COLUMNS / 2));
        };
        return TwoPlanes(at(plane), at(plane + 1), ALL_PLANES ? ALL_LANES : masks[i]);
    };
    if (!nibbles) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) {
            const uint2 one = first(i), two = first(i + 1);
            const u32 a[4] = {one.x, one.y, two.x, two.y}, of[2] = {b[i], b[i + 1]};
            multiply_pairs(sums.first, a, of);
        }
        return;
    }
    if (!ALL_PLANES) take(lane.masks, masks);
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
        u32 of_first[4], of_last[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint2 words = first(i + j);
            const TwoPlanes next = planes(i + j, 2);
            of_first[2 * j] = first_nibbles(words.x, next.halves[0]);
            of_first[2 * j + 1] = first_nibbles(words.y, next.halves[1]);
            of_last[2 * j] = last_nibbles(words.x, next.halves[0]);
            of_last[2 * j + 1] = last_nibbles(words.y, next.halves[1]);
        }
        const u32 of[2] = {b[i], b[i + 1]};
        mma(sums.nibbles[0], of_first, of);
        mma_masked<0xf0f0f0f0>(sums.nibbles[1], of_first, of);
        mma(sums.nibbles[2], of_last, of);
        mma_masked<0xf0f0f0f0>(sums.nibbles[3], of_last, of);
    }
    if (!last) return;
    if (!ALL_PLANES) take(lane.masks + 32, masks);
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
        const TwoPlanes one = planes(i, 4), two = planes(i + 1, 4);
        const u32 a[4] = {one.halves[0], one.halves[1], two.halves[0], two.halves[1]}, of[2] = {b[i], b[i + 1]};
        multiply_pairs(sums.last, a, of);
    }
}

// Add column c of a stage in float32, x that of the sums; present: the level at which the ring has it.
__device__ __forceinline__ void add_column(float (&rows)[8], const u8* stage, int c, const PlanePlaces& places,
                                           int level, int present, float x) {
    LanePlanes planes;
    float w[8];
    planes.read(stage + c * PITCH, places, present, FromRing(), CARD_LEVELS, stage + K_TILE * PITCH + c * REST_PITCH);
    planes.weights(level, w);
#pragma unroll
    for (int r = 0; r < 8; ++r) rows[r] += x * w[r];
}

// Add 32 columns, of the second k_tile maybe none. scratch: of the warp.
__device__ __forceinline__ void multiply(Accumulator& sums, const PlanesTiles& tiles, const PlanePlaces& places,
                                         const LaneOffsets& lane, float scale, u8* scratch) {
    const bool second = threadIdx.x & K_TILE, none = second && !tiles.both;
    const int entry = lane.entry + (second ? tiles.next_entry : 0);
    const int level = none ? 0 : DENSE ? LEVELS : (u32)tiles.index[entry] >> LEVEL_SHIFT;
    const int present = tiles.present_level(entry, level);
    {
        const uint2 header = *(const uint2*)((second ? tiles.next : tiles.stage) + lane.header);
        const float x = level ? tiles.value[entry] * scale : 0;
        const float middle = middle_of(level), rounded = x * ratio_of(level), exact = level == 1 ? 16.0f / 15 : 1.0f;
        float v[4];
#pragma unroll
        for (int group = 0; group < 4; ++group)
            v[group] = rounded * scale_of(group < 2 ? header.x : header.y, group % 2);
        const bool large = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))) > LARGEST;
        u32 all_large = __ballot_sync(ALL_LANES, large), numbers[4];
        sums.any_rows |= all_large != 0;
#pragma unroll 1
        for (; all_large; all_large &= all_large - 1) {
            const int c = __ffs(all_large) - 1;
            add_column(sums.rows, c < K_TILE ? tiles.stage : tiles.next, c % K_TILE, places,
                       __shfl_sync(ALL_LANES, level, c), __shfl_sync(ALL_LANES, present, c),
                       __shfl_sync(ALL_LANES, x, c));
        }
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const float biased = (large ? 0 : v[group]) + (12582912.0f + 128);
            numbers[group] = __float_as_uint(biased);  // its lower 16 bits: the integer, and 128 more
            sums.minimum[group] +=
                (biased - (12582912.0f + 128)) * exact * centre_of(group < 2 ? header.x : header.y, group % 2, middle);
        }
        const u32 low = __byte_perm(numbers[0], numbers[1], 0x5140), high = __byte_perm(numbers[2], numbers[3], 0x5140);
        __syncwarp();
        u32* put = (u32*)(scratch + lane.put);
        put[0] = __byte_perm(low, high, 0x5410) ^ 0x80808080;
        put[8] = __byte_perm(low, high, 0x7632);
        if (!ALL_PLANES) put[16] = mask_of(present, 2), put[24] = mask_of(present, 4);
        __syncwarp();
    }
    const bool nibbles = __any_sync(ALL_LANES, present > 1), last = __any_sync(ALL_LANES, present > 3);
    multiply_columns(sums, tiles, lane, scratch, nibbles, last);
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void store_sums(const Accumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool upper = lane & 2;
    // Of groups t % 2 * 2 and the next, in lanes with bit 3 set of the latter.
    const auto exchange = [&](float kept, float given, int half) {
        return kept + __shfl_xor_sync(ALL_LANES, given, half);
    };
    const float (&of)[4] = sums.minimum;
    float first = exchange(t % 2 ? of[2] : of[0], t % 2 ? of[0] : of[2], 1);
    float second = exchange(t % 2 ? of[3] : of[1], t % 2 ? of[1] : of[3], 1);
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
        first += __shfl_xor_sync(ALL_LANES, first, step);
        second += __shfl_xor_sync(ALL_LANES, second, step);
    }
    __syncwarp();  // `rows` was the factors' scratch
    const float unit = upper ? 256 * inverse : inverse;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // A row's own part of what is multiplied together: the next mask shows the others.
        const auto own = [&](const int (&c)[4][4], int n) { return n < 3 ? c[n][i] - c[n + 1][i] : c[3][i]; };
        const auto nibble = [&](int n) {
            return n % 2 ? sums.nibbles[n][i] : sums.nibbles[n][i] - sums.nibbles[n + 1][i];
        };
        const float of_rows[4] = {(float)(own(sums.first, 3) + nibble(1) + (own(sums.last, 3) >> 4)) * unit,
                                  (float)(16 * (own(sums.first, 1) + nibble(0)) + own(sums.last, 1)) * unit,
                                  (float)(4 * own(sums.first, 2) + nibble(3) + (own(sums.last, 2) >> 2)) * unit,
                                  (float)(64 * own(sums.first, 0) + 16 * nibble(2) + 4 * own(sums.last, 0)) * unit};
        // The other digit is two lanes further: of f = 2 (t / 2) and 2 (t / 2) + 1.
        const float minimum = (i % 2 ? second : first) * inverse;
        float* at = rows + padded_index(64 * (t % 2 * 2 + i % 2) + 8 * g + 4 * (i / 2) + t / 2 * 2);
        *(float2*)at =
            make_float2(exchange(upper ? of_rows[2] : of_rows[0], upper ? of_rows[0] : of_rows[2], 2) + minimum,
                        exchange(upper ? of_rows[3] : of_rows[1], upper ? of_rows[1] : of_rows[3], 2) + minimum);
    }
    if (!sums.any_rows) return;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; ++r) rows[padded_index(8 * lane + r)] += sums.rows[r] * inverse;
}
