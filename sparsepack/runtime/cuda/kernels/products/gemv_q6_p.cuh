// How a warp of zigzag_gemv.cu multiplies k_tiles of Q6_P, two of them together, on the tensor cores in integers:
//
//     mma.m16n8k32:  A [16, 32]  = bits of planes as they lie in bytes, masked: of four rows that share a byte, one of each
//                        group of 64, one mask after the other. A row of A is two bytes' rows, one after the other in k,
//                        of 16 columns
//                    B [32, 8]   = digit n / 2 of x S of the mask's group, for byte n % 2 of the two, zero for the other
//
// x S is an integer of 28 bits, in four signed digits of 8 bits. Sums are exact, and what is cut off is 2^-28 of the largest
// x S that there can be.
//
//     level 1        plane 1 as it is: two bits, four masks
//     levels 2, 3    plane 1 and what planes 2 and 3 make together are nibbles of two words: two masks of each
//     levels 4, 5    these, and planes 4 and 5 together as plane 1, with smaller factors
//
// A row's products are counted 16 times for groups 2 and 3, whose nibbles are the high ones. Lane (g, t) = (lane / 4, lane
// % 4) has rows 4 g .. 4 g + 3 and 32 more of each group, of columns t, t + 4 (which make a word of A together), t + 8 and
// t + 12 of each k_tile. Before, it has a column of the 32, for which it computes factors and adds up minima: what the
// whole warp has computed, each lane reads as B.

#pragma once

#include "products/zigzag.cuh"

struct Accumulator {
    int c[2][4][4];    // of each half of the rows, of each group
    float minimum[4];  // of each group, of the lane's columns
};

static constexpr int FACTOR_BITS = 28;
// Of the largest x times `largest_scale` (products/zigzag.py), the largest x S is less than a 2^SMALLER_BITS-th.
static constexpr int SMALLER_BITS = 4;
static constexpr bool PAIRED = STAGES >= 2 * K_SLICES;  // else a warp waits for a stage that it has itself

__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two k_tiles that a warp multiplies together. Of the second, where there is none, everything is the first's but levels.
struct PlanesTiles {
    const u8* stage;
    const int* index;
    const float* value;
    int next_stage, next_entry;  // from the first k_tile's to the second's
    bool both;

    __device__ __forceinline__ int own_level() const {
        const int lane = threadIdx.x % 32, second = lane / K_TILE;
        if (second && !both) return 0;
        return DENSE ? LEVELS : (u32)index[second * next_entry + lane % K_TILE] >> LEVEL_SHIFT;
    }
    // The factors of the lane's column, as integers; adds up its minima.
    __device__ __forceinline__ void factors(const PlanePlaces& places, int level, float scale, float (&minimum)[4],
                                            int (&v)[4]) const {
        const int c = threadIdx.x % K_TILE, second = threadIdx.x % 32 / K_TILE;
        const uint2 header = *(const uint2*)(stage + second * next_stage + c * PITCH + places.header(0));
        const float x = level ? value[second * next_entry + c] * scale : 0;
        const float middle = middle_of(level), ratio = ratio_of(level);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const u32 word = group < 2 ? header.x : header.y;
            const float factor = x * scale_of(word, group % 2);
            v[group] = __float2int_rn(factor * ratio);
            minimum[group] += factor * centre_of(word, group % 2, middle);
        }
    }
};

// The digits of 32 columns' factors that a lane has as B, for each group: two words for each k_tile.
struct Digits {
    u32 b[4][2][2];

    // v: the factors of the lane's column; scratch: 128 words of the warp.
    __device__ __forceinline__ void exchange(const int (&v)[4], u32* scratch) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        // Two columns' digits beside each other: of digits 0 and 1 by the first column's lane, of 2 and 3 by the other.
        const int second = lane / 4 % 2;
        const u32 beside = second ? 0x3726 : 0x5140;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 own = ((u32)v[i] + 0x00808080) ^ 0x00808080;  // each digit borrows from the next
            words[i] = __byte_perm(own, __shfl_xor_sync(ALL_LANES, own, 4), beside);
        }
        const int pair = lane / 16 * 8 + lane % 16 / 8 * 4 + t;
        __syncwarp();
        *(uint4*)(scratch + (pair * 2 + second) * 4) = make_uint4(words[0], words[1], words[2], words[3]);
        __syncwarp();
        const u32 half = g / 2 % 2 ? 0x32 : 0x10, place = g % 2 ? half << 8 | 0x44 : half | 0x4400;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const uint4 w = *(const uint4*)(scratch + ((n * 8 + x * 4 + t) * 2 + g / 4) * 4);
                b[0][n][x] = __byte_perm(w.x, 0, place);
                b[1][n][x] = __byte_perm(w.y, 0, place);
                b[2][n][x] = __byte_perm(w.z, 0, place);
                b[3][n][x] = __byte_perm(w.w, 0, place);
            }
        }
    }
};

// Words of columns t + 4 j of each k_tile: [k_tile][j].
typedef u32 ColumnWords[2][4];

// Rows of A: of each k_tile, of columns t and t + 4, of t + 8 and t + 12, the first two bytes and the others.
struct Rows {
    u32 a[2][2][2];

    __device__ __forceinline__ explicit Rows(const ColumnWords& words) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32* w = words[i / 2] + i % 2 * 2;
            a[i / 2][i % 2][0] = __byte_perm(w[0], w[1], 0x5140);
            a[i / 2][i % 2][1] = __byte_perm(w[0], w[1], 0x7362);
        }
    }
    // Add those of a group, whose bits a mask shows.
    __device__ __forceinline__ void multiply(int (&c)[4], u32 mask, const u32 (&b)[2][2]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const u32 rows[4] = {a[n][0][0] & mask, a[n][0][1] & mask, a[n][1][0] & mask, a[n][1][1] & mask};
            mma(c, rows, b[n]);
        }
    }
};

// Four rows that share a byte, two bits each, of all groups.
__device__ __forceinline__ void multiply_pairs(int (&c)[4][4], const ColumnWords& words, const Digits& digits) {
    const Rows rows(words);
#pragma unroll
    for (int group = 0; group < 4; ++group) rows.multiply(c[group], 0x03030303 << 2 * group, digits.b[group]);
}

// Planes `NUMBER` and the next of a lane's columns, zeros where they are not read.
template <int NUMBER>
struct TwoPlanes {
    ColumnWords one, two;

    // reads, reads_next: columns of which the first is read, and the second, a bit each
    __device__ __forceinline__ TwoPlanes(const PlanesTiles& tiles, const PlanePlaces& places, u32 reads,
                                         u32 reads_next) {
        const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
        reads >>= t, reads_next >>= t;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const u8* first = tiles.stage + n * tiles.next_stage + t * PITCH + places.plane(NUMBER) + g * 4;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 bit = 1u << (n * K_TILE + 4 * j);
                const u32 upper = *(const u32*)(first + 4 * j * PITCH);
                const u32 lower = *(const u32*)(first + 4 * j * PITCH + TILE_BANDS * PLANE_BYTES);
                one[n][j] = DENSE || reads & bit ? upper : 0;
                two[n][j] = DENSE || reads_next & bit ? lower : 0;
            }
        }
    }
    // As two bits each, of the first or second half of every group's rows.
    __device__ __forceinline__ u32 pairs(int half, int n, int j) const {
        return two_planes(one[n][j], two[n][j], half);
    }
};

// Add 32 columns, of the second k_tile maybe none. scratch: 128 words of the warp.
__device__ __forceinline__ void multiply(Accumulator& sums, const PlanesTiles& tiles, const PlanePlaces& places,
                                         float scale, u32* scratch) {
    const int lane = threadIdx.x % 32, level = tiles.own_level();
    u32 reads[LEVELS + 1];  // columns of which plane l is read
#pragma unroll
    for (int l = 2; l <= LEVELS; ++l) reads[l] = DENSE ? ALL_LANES : __ballot_sync(ALL_LANES, level >= l);
    int v[4];
    tiles.factors(places, level, scale, sums.minimum, v);
    ColumnWords first[2];  // of each half
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // Of level 0, whatever lies there: its factors are zero.
            const uint2 words = *(const uint2*)(tiles.stage + n * tiles.next_stage + (lane % 4 + 4 * j) * PITCH +
                                                places.first() + lane / 4 * 8);
            first[0][n][j] = words.x, first[1][n][j] = words.y;
        }
    }
    Digits digits;
    if (!reads[2]) {
        const int larger[4] = {v[0] << 2, v[1], v[2] << 2, v[3]};
        digits.exchange(larger, scratch);
#pragma unroll
        for (int half = 0; half < 2; ++half) multiply_pairs(sums.c[half], first[half], digits);
        return;
    }
    digits.exchange(v, scratch);
    {
        const TwoPlanes<2> next(tiles, places, reads[2], reads[3]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ColumnWords odd, even;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = i / 4, j = i % 4;
                const u32 pairs = next.pairs(half, n, j);
                odd[n][j] = odd_nibbles(first[half][n][j], pairs);
                even[n][j] = even_nibbles(first[half][n][j], pairs);
            }
            const Rows of_odd(odd), of_even(even);
            of_odd.multiply(sums.c[half][3], 0xf0f0f0f0, digits.b[3]);
            of_even.multiply(sums.c[half][2], 0xf0f0f0f0, digits.b[2]);
            of_odd.multiply(sums.c[half][1], 0x0f0f0f0f, digits.b[1]);
            of_even.multiply(sums.c[half][0], 0x0f0f0f0f, digits.b[0]);
        }
    }
    if (!reads[4]) return;
    const int smaller[4] = {v[0] >> 2, v[1] >> 4, v[2] >> 2, v[3] >> 4};
    digits.exchange(smaller, scratch);
    const TwoPlanes<4> last(tiles, places, reads[4], reads[5]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        ColumnWords pairs;
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = last.pairs(half, i / 4, i % 4);
        multiply_pairs(sums.c[half], pairs, digits);
    }
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void store_sums(const Accumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float minimum[4];
#pragma unroll
    for (int group = 0; group < 4; ++group) minimum[group] = warp_sum(sums.minimum[group]);
    // Lane t has digit t of four sums: of both bytes of a row, and of the next row's. It gets the sum of one of them.
    const bool upper = t & 2, odd = t & 1;
    const float weight = t == 0 ? 1.0f : t == 1 ? 256.0f : t == 2 ? 65536.0f : 16777216.0f;
    __syncwarp();  // `rows` was the factors' scratch
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            float c[4], two[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) c[i] = (float)sums.c[half][group][i] * weight;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                two[i] = (upper ? c[2 + i] : c[i]) + __shfl_xor_sync(ALL_LANES, upper ? c[i] : c[2 + i], 2);
            const float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(ALL_LANES, odd ? two[0] : two[1], 1);
            rows[padded_index(64 * group + 32 * half + 4 * g + t)] =
                (sum * (group < 2 ? 16.0f : 1.0f) + minimum[group]) * inverse;
        }
    }
}
