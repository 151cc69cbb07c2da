// How a warp of zigzag_gemv.cu multiplies k_tiles of Q6_P, two of them together, on the tensor cores in integers:
//
//     mma.m16n8k32:  A [16 rows, 32 columns] = bits of planes as they lie in bytes, masked: of four rows that share a byte,
//                        one of each group of 64, one mask after the other
//                    B [32 columns, 8]       = n < 4: a digit of x d s[n], n >= 4: the next digit of x d s[n - 4]; zero
//                        where the mask is another group's
//
// x d s is an integer of 28 bits, in four signed digits of 8 bits: two products with two digits each. Sums are exact, and
// what is cut off is 2^-28 of the largest x d s that there can be.
//
//     level 1        plane 1 as it is: two bits, four masks
//     levels 2, 3    plane 1 and what planes 2 and 3 make together are nibbles of two words: two masks of each
//     levels 4, 5    these, and planes 4 and 5 together as plane 1, with smaller factors
//
// A row's products are counted 16 times for groups 2 and 3, whose nibbles are the high ones. Lane (g, t) = (lane / 4, lane
// % 4) has rows 4 g .. 4 g + 3 and 32 more of each group, of columns t, t + 4, t + 8 and t + 12. Before, it has a column,
// lane % 16, and two groups, for which it computes factors and adds up minima: what the whole warp has computed, each lane
// reads as B.

#pragma once

#include "products/zigzag.cuh"

struct Accumulator {
    int high[4][4], low[4][4];  // of digits 3 and 2; of digits 1 and 0
    float minimum[2];
};

static constexpr int FACTOR_BITS = 28;
// Of the largest x times `largest_scale` (products/zigzag.py), the largest x d s is at most so many times as much.
static constexpr int LARGER_BITS = 5;
static constexpr bool PAIRED = STAGES >= 2 * K_SLICES;  // else a warp waits for a stage that it has itself
static constexpr int SCRATCH = 2 * K_TILE * 4;          // words of a warp

__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four columns' words become words of four columns: byte i of each.
__device__ __forceinline__ void transpose(const u32 (&w)[4], u32* bytes) {
    const u32 first = __byte_perm(w[0], w[1], 0x5140), second = __byte_perm(w[2], w[3], 0x5140);
    const u32 third = __byte_perm(w[0], w[1], 0x7362), fourth = __byte_perm(w[2], w[3], 0x7362);
    bytes[0] = __byte_perm(first, second, 0x5410);
    bytes[1] = __byte_perm(first, second, 0x7632);
    bytes[2] = __byte_perm(third, fourth, 0x5410);
    bytes[3] = __byte_perm(third, fourth, 0x7632);
}

// The bits of `a` where the mask has ones, of `b` elsewhere.
__device__ __forceinline__ u32 select(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// A k_tile that a warp multiplies.
struct PlanesTile {
    const u8* stage;  // null: there is none
    const int* index;
    const float* value;

    __device__ __forceinline__ int level(int c) const {
        return !stage ? 0 : DENSE ? LEVELS : (u32)index[c] >> LEVEL_SHIFT;
    }
    // The factors of a lane, as integers; adds up its minima.
    __device__ __forceinline__ void factors(const PlanePlaces& places, float scale, float (&minimum)[2],
                                            int (&v)[2]) const {
        const int lane = threadIdx.x % 32, c = lane % K_TILE, level = this->level(c);
        v[0] = v[1] = 0;
        if (!level) return;
        const u8* at = stage + c * PITCH + places.header();
        const u32 ends = *(const u32*)at, pairs = *(const u32*)(at + 4 + lane / K_TILE * 4);
        const float x = value[c] * scale;
        const float unit = x * half_to_float(ends & 0xffff) * ratio_of(level), centre = x * half_to_float(ends >> 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float factor = unit * scale_of(pairs, j);
            v[j] = __float2int_rn(factor);
            minimum[j] += centre * minimum_of(pairs, j) - factor * half_of(level);
        }
    }
};

// The digits of 32 columns' factors that a lane has as B, for each of the two products, two words of it.
struct Digits {
    u32 high[2], low[2];

    // v: the lane's factors of each k_tile. scratch: SCRATCH words of the warp.
    __device__ __forceinline__ void exchange(const int (&v)[2][2], int even_shift, int odd_shift, u32* scratch) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int even = even_shift > 0 ? v[tile][0] << even_shift : v[tile][0] >> -even_shift;
            const u32 words[2] = {(u32)even, (u32)(v[tile][1] >> -odd_shift)};
            const int at = (tile * K_TILE + lane % K_TILE) * 4 + lane / K_TILE * 2;
            // Signed digits: each lends to the one above what it lacks.
            *(uint2*)(scratch + at) =
                make_uint2((words[0] + 0x00808080) ^ 0x00808080, (words[1] + 0x00808080) ^ 0x00808080);
        }
        __syncwarp();
        const u32 upper = (3 - g / 4) * 0x11 + 0x40, lower = upper - 0x22;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = scratch[(tile * K_TILE + t + 4 * j) * 4 + g % 4];
            high[tile] = __byte_perm(__byte_perm(w[0], w[1], upper), __byte_perm(w[2], w[3], upper), 0x5410);
            low[tile] = __byte_perm(__byte_perm(w[0], w[1], lower), __byte_perm(w[2], w[3], lower), 0x5410);
        }
    }
};

// Add the rows whose bits a mask shows, of a group. a: byte i of four columns' words, of each k_tile, for i = 0 .. 7.
__device__ __forceinline__ void multiply_group(Accumulator& sums, const u32 (&a)[2][8], u32 mask, const Digits& digits,
                                               int group) {
    const bool own = threadIdx.x / 4 % 4 == group;
    const u32 high[2] = {own ? digits.high[0] : 0, own ? digits.high[1] : 0};
    const u32 low[2] = {own ? digits.low[0] : 0, own ? digits.low[1] : 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 rows[4] = {a[0][2 * i] & mask, a[0][2 * i + 1] & mask, a[1][2 * i] & mask, a[1][2 * i + 1] & mask};
        mma(sums.high[i], rows, high);
        mma(sums.low[i], rows, low);
    }
}

// Of each k_tile and of four columns, rows 4 g .. and 32 + 4 g ..: the two words that have bits 2 g, 2 g + 1 of both.
struct PlaneWords {
    u32 of[2][2][4];  // k_tile, half, column

    __device__ __forceinline__ void first(const PlanesTile (&tiles)[2], const PlanePlaces& places) {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // Of level 0, whatever lies there: its factors are zero.
                uint2 both = make_uint2(0, 0);
                if (tiles[n].stage)
                    both = *(const uint2*)(tiles[n].stage + (t + 4 * j) * PITCH + places.first() + lane / 4 * 8);
                of[n][0][j] = both.x, of[n][1][j] = both.y;
            }
        }
    }
    // Two planes together, plane `upper` and the next; not read ones are zeros.
    __device__ __forceinline__ void both(const PlanesTile (&tiles)[2], const PlanePlaces& places, int upper) {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int c = t + 4 * j, level = tiles[n].level(c);
                const u8* at = tiles[n].stage + c * PITCH + lane / 4 * 4;
                const u32 one = level >= upper ? *(const u32*)(at + places.plane(upper)) : 0;
                const u32 two = level > upper ? *(const u32*)(at + places.plane(upper + 1)) : 0;
                of[n][0][j] = select(0xaaaaaaaa, one << 1, two);
                of[n][1][j] = select(0xaaaaaaaa, one, two >> 1);
            }
        }
    }
    __device__ __forceinline__ void transposed(u32 (&a)[2][8]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            transpose(of[n][0], a[n]);
            transpose(of[n][1], a[n] + 4);
        }
    }
};

// Four rows that share a byte, two bits each, of all groups.
__device__ __forceinline__ void multiply_pairs(Accumulator& sums, const PlaneWords& words, const Digits& digits) {
    u32 a[2][8];
    words.transposed(a);
#pragma unroll
    for (int group = 0; group < 4; ++group) multiply_group(sums, a, 0x03030303 << 2 * group, digits, group);
}

// Add 32 columns, of the second k_tile maybe none. scratch: SCRATCH words of the warp.
__device__ __forceinline__ void multiply(Accumulator& sums, const PlanesTile (&tiles)[2], const PlanePlaces& places,
                                         float scale, u32* scratch) {
    int v[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) tiles[n].factors(places, scale, sums.minimum, v[n]);
    const int own = max(tiles[0].level(threadIdx.x % K_TILE), tiles[1].level(threadIdx.x % K_TILE));
    const u32 highest = DENSE ? LEVELS : __reduce_max_sync(ALL_LANES, (u32)own);
    Digits digits;
    PlaneWords first;
    first.first(tiles, places);
    if (highest == 1) {
        digits.exchange(v, 2, 0, scratch);
        multiply_pairs(sums, first, digits);
        return;
    }
    digits.exchange(v, 0, 0, scratch);
    PlaneWords second;
    second.both(tiles, places, 2);
#pragma unroll
    for (int odd = 1; odd >= 0; --odd) {  // groups 3 and 1, then 2 and 0
        PlaneWords nibbles;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const u32 upper = first.of[i / 8][i / 4 % 2][i % 4], lower = second.of[i / 8][i / 4 % 2][i % 4];
            nibbles.of[i / 8][i / 4 % 2][i % 4] =
                odd ? select(0xcccccccc, upper, lower >> 2) : select(0xcccccccc, upper << 2, lower);
        }
        u32 a[2][8];
        nibbles.transposed(a);
        multiply_group(sums, a, 0xf0f0f0f0, digits, 2 + odd);
        multiply_group(sums, a, 0x0f0f0f0f, digits, odd);
    }
    if (highest < 4) return;
    digits.exchange(v, -2, -4, scratch);
    PlaneWords third;
    third.both(tiles, places, 4);
    multiply_pairs(sums, third, digits);
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void store_sums(const Accumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float minimum[2];  // of the lane's groups 2 (lane / 16), + 1: over the columns of 16 lanes
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        minimum[j] = sums.minimum[j];
#pragma unroll
        for (int step = 8; step; step /= 2) minimum[j] += __shfl_xor_sync(ALL_LANES, minimum[j], step);
    }
    // Lanes with t < 2 have upper digits of groups 2 t and 2 t + 1, those with t + 2 the lower ones: the first get row i of
    // both, the second row i + 1.
    const int from = t % 2 * 16;
    const float base[2] = {__shfl_sync(ALL_LANES, minimum[0], from), __shfl_sync(ALL_LANES, minimum[1], from)};
    const float unit = t % 2 ? 1.0f / 256 : 1.0f / 16;
    const bool second = t >= 2;
    __syncwarp();  // `rows` was the factors' scratch
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const auto digits = [&](const int (&c)[4]) {
                const int given = second ? c[j] : c[2 + j], kept = second ? c[2 + j] : c[j];
                const int taken = __shfl_xor_sync(ALL_LANES, given, 2);
                return 256.0f * (second ? taken : kept) + (float)(second ? kept : taken);
            };
            const float sum = digits(sums.high[i]) * 65536.0f + digits(sums.low[i]);
            const int byte = 2 * i + second, row = 32 * (byte / 4) + 4 * g + byte % 4;
            rows[padded_index(64 * (2 * (t % 2) + j) + row)] = (sum * unit + base[j]) * inverse;
        }
    }
}
