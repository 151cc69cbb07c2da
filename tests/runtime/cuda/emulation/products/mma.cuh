// In the place of kernels/products/mma.cuh.

#pragma once

#include "common/common.cuh"

struct Operands {
    u32 a[4], b[2];
};
inline Operands operands[1024];  // of the threads of a block

// of(word, i): the i-th of EACH numbers in a word of A, of B
template <int EACH, typename C, typename OfA, typename OfB>
inline void multiply_add(C (&c)[4], const u32 (&a)[4], const u32 (&b)[2], OfA of_a, OfB of_b) {
    const int lane = threadIdx.x % 32;
    Operands* const of_warp = operands + threadIdx.x / 32 * 32;
    memcpy(of_warp[lane].a, a, sizeof a), memcpy(of_warp[lane].b, b, sizeof b);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int n = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int t = 0; t < 4; ++t) {
            const Operands &row = of_warp[lane / 4 * 4 + t], &column = of_warp[n * 4 + t];
            for (int half = 0; half < 2; ++half) {
                for (int k = 0; k < EACH; ++k) sum += of_a(row.a[2 * half + i / 2], k) * of_b(column.b[half], k);
            }
        }
        c[i] = (C)(c[i] + sum);
    }
    __syncwarp();
}
inline void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const auto of = [](u32 word, int k) { return (double)half_to_float((u16)(word >> 16 * k)); };
    multiply_add<2>(c, a, b, of, of);
}
inline void mma_bfloat(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const auto of = [](u32 word, int k) { return (double)bfloat_to_float((u16)(word >> 16 * k)); };
    multiply_add<2>(c, a, b, of, of);
}
inline void mma(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply_add<4>(
        c, a, b, [](u32 word, int k) { return (double)(u8)(word >> 8 * k); },
        [](u32 word, int k) { return (double)(signed char)(word >> 8 * k); });
}
