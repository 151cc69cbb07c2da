// How a warp of zigzag_gemv.cu multiplies k_tiles of Q4_K, on the tensor cores:
//
//     mma.m16n8k16:  A [16 rows, 16 columns] = whole bytes, low + 16 high, and then their high nibbles alone, 16 high;
//                        as float16 with nothing but their lowest bits, times 2^-24
//                    B [16 columns, 8]       = x d scale[n], n = sub-block
//
// Lane (g, t) = (lane / 4, lane % 4) holds bytes 16 g .. 16 g + 15 of four columns; they belong to the sub-blocks 2 (g
// / 2), in their low nibbles, and 2 (g / 2) + 1, in their high ones, and the result counts for these two n, that is, in
// the lanes with t = g / 2. For even n it is the bytes less their high nibbles, for odd n the high nibbles: B has even
// n for bytes, and for high nibbles odd n and even n negated, so that both add up in the same registers, and no low
// nibble has to be masked. x d scale is the sum of two float16. Tensor cores cut sums off: 1e-6 of a result for 32
// columns of a warp, 1.6e-5 for 4096 (H100).

#pragma once

#include "products/zigzag.cuh"

struct Accumulator {
    float c[8][4];
    float minimum;  // 64 times
};

// What a lane knows of a header: where the lane's sub-block stands, and how its bytes count.
struct SubBlock {
    int word, shift;       // its twelve bits begin in the word at this byte
    u32 mask, magic;       // in registers, so that one instruction takes both
    u32 of_byte, of_high;  // 0, 1 or -1, twice as float16

    __device__ __forceinline__ explicit SubBlock(int sub)
        : word(4 + 12 * sub / 32 * 4),
          shift(12 * sub % 32),
          mask(63),
          magic(0x4b000000),
          of_byte(sub & 1 ? 0 : 0x3c003c00),
          of_high(sub & 1 ? 0x3c003c00 : 0xbc00bc00) {}

    // The value as float, which is exact.
    __device__ __forceinline__ float number(u32 bits, u32 mask) const {
        u32 x;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(bits), "r"(mask), "r"(magic));  // bits & mask | magic
        return __uint_as_float(x) - 8388608.0f;
    }

    // A scale, and 64 times a minimum, from the two words that have them.
    __device__ __forceinline__ void take(u32 first, u32 second, float& scale, float& minimum) const {
        const u32 both = __funnelshift_r(first, second, shift);
        scale = number(both, mask);
        minimum = number(both, mask << 6);
    }
};

// Two words of each column's 16 bytes: four matrix products' 16 rows. Products into the same sums stand four apart,
// since each waits for the one before.
__device__ __forceinline__ void mma_tiles(float (*c)[4], const u32 (&q)[2][4], const u32 (&of_byte)[2][2],
                                          const u32 (&of_high)[2][2]) {
    u32 byte[4][4], high[4][4];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                // Two rows' bytes of one column, and of the next.
                const u32 both = __byte_perm(q[w][2 * pair], q[w][2 * pair + 1], half ? 0x7632 : 0x5410);
                byte[2 * w + half][2 * pair] = both & 0x00ff00ff;
                byte[2 * w + half][2 * pair + 1] = __byte_perm(both, 0, 0x4341);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) high[2 * w + half][i] = byte[2 * w + half][i] & 0x00f000f0;
        }
    }
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mma(c[i], byte[i], of_byte[term]);
#pragma unroll
        for (int i = 0; i < 4; ++i) mma(c[i], high[i], of_high[term]);
    }
}

// What a lane has of 16 columns: of four of them its bytes, d and dmin, and the words with its sub-block's twelve bits.
struct KTile {
    uint4 q[4];
    u32 ends[4], first[4], second[4];

    __device__ __forceinline__ static int column(int i) { return column_of_lane(threadIdx.x % 4, i); }

    // header(c): where the band's piece of column c begins.
    template <typename Header, typename Reader>
    __device__ __forceinline__ void read(Header header, const Reader& reader, const SubBlock& bits) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u8* at = header(column(i));
            q[i] = reader.words(at + 16 + threadIdx.x % 32 / 4 * 16);
            ends[i] = reader.word(at);
            first[i] = reader.word(at + bits.word);
            second[i] = reader.word(at + bits.word + 4);
        }
    }
};

// Add 16 columns. scale: a power of two that brings x d scale into the range of float16.
__device__ __forceinline__ void multiply(Accumulator& sums, const KTile& k_tile, const float* value, float scale,
                                         const SubBlock& bits) {
    const uint4(&q)[4] = k_tile.q;
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float x = value[KTile::column(i)] * scale;
        float sub, minimum;
        bits.take(k_tile.first[i], k_tile.second[i], sub, minimum);
        factor[i] = x * half_to_float(k_tile.ends[i] & 0xffff) * sub;
        sums.minimum += x * half_to_float(k_tile.ends[i] >> 16) * minimum;
    }
    u32 of_byte[2][2], of_high[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 first = pack_half2(factor[2 * i], factor[2 * i + 1]);
        const u32 rest =
            pack_half2(factor[2 * i] - half_to_float(first & 0xffff), factor[2 * i + 1] - half_to_float(first >> 16));
        of_byte[0][i] = mul_half2(first, bits.of_byte);
        of_byte[1][i] = mul_half2(rest, bits.of_byte);
        of_high[0][i] = mul_half2(first, bits.of_high);
        of_high[1][i] = mul_half2(rest, bits.of_high);
    }
    const u32 first[2][4] = {{q[0].x, q[1].x, q[2].x, q[3].x}, {q[0].y, q[1].y, q[2].y, q[3].y}};
    const u32 second[2][4] = {{q[0].z, q[1].z, q[2].z, q[3].z}, {q[0].w, q[1].w, q[2].w, q[3].w}};
    mma_tiles(sums.c, first, of_byte, of_high);
    mma_tiles(sums.c + 4, second, of_byte, of_high);
}

// The 256 rows of a warp's band into shared memory.
__device__ __forceinline__ void store_sums(const Accumulator& sums, float inverse, float* rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float minimum = sums.minimum * (1.0f / 64);
    minimum += __shfl_xor_sync(ALL_LANES, minimum, 1);
    minimum += __shfl_xor_sync(ALL_LANES, minimum, 2);
    const float low = __shfl_sync(ALL_LANES, minimum, 8 * t), high = __shfl_sync(ALL_LANES, minimum, 8 * t + 4);
    if (t != g / 2) return;
    float* at = rows + padded_index(64 * t + 16 * (g & 1));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float* c = sums.c[j];
        *(float2*)(at + 2 * j) = make_float2((c[0] * NIBBLE - low) * inverse, (c[2] * NIBBLE - low) * inverse);
        *(float2*)(at + 32 + 2 * j) =
            make_float2((c[1] * (NIBBLE / 16) - high) * inverse, (c[3] * (NIBBLE / 16) - high) * inverse);
    }
}
