// The vectors of zigzag_gemv.inc and its like, with AVX2: two chunks (64 rows) a vector.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef __m256i Ints;
typedef __m256 Floats;
enum { CHUNKS = 2, LANES = 8, MATMUL_POSITIONS = 2, MATMUL_HALVES = 1 };

INLINE Ints load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store(void* p, Ints a) { _mm256_storeu_si256((__m256i*)p, a); }
INLINE Ints zeros() { return _mm256_setzero_si256(); }
INLINE Ints broadcast(int32_t a) { return _mm256_set1_epi32(a); }
INLINE Ints words_low(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
INLINE Ints words_high(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
INLINE Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
INLINE Ints words_right_8(Ints a) { return _mm256_srli_epi16(a, 8); }
INLINE Ints words_right_12(Ints a) { return _mm256_srli_epi16(a, 12); }
INLINE Ints times_16(Ints a) { return _mm256_slli_epi32(a, 4); }
INLINE Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
// Per word, a b / 2^15 rounded.
INLINE Ints multiply_high(Ints a, Ints b) { return _mm256_mulhrs_epi16(a, b); }
// sum + a.low b.low + a.high b.high per dword.
INLINE Ints dot(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE Ints per_chunk(const int32_t* p) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32(p[0])), _mm_set1_epi32(p[1]), 1);
}
INLINE Floats per_chunk_floats(const float* p) { return _mm256_castsi256_ps(per_chunk((const int32_t*)p)); }

INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store_floats(float* p, Floats a) { _mm256_storeu_ps(p, a); }
INLINE Floats broadcast_float(float a) { return _mm256_set1_ps(a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE Floats add_floats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Floats a) {
    _mm_storeu_ps(y, _mm256_castps256_ps128(a));
    _mm_storeu_ps(y + 32, _mm256_extractf128_ps(a, 1));
}

// What prepare.inc needs. `slots`: which LANES of the 32 slots of a quad.
INLINE Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats subtract_product(Floats sum, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, sum); }
// The low words of a and b side by side: a | b << 16.
INLINE Ints pair_words(Ints a, Ints b) { return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa); }
// One number per band, at the slots of the band: bands 0, 2, 1, 3.
INLINE Floats at_slots(const float* bands, int32_t slots) {
    return _mm256_broadcast_ss(bands + (slots >> 1 | (slots & 1) << 1));
}
INLINE Floats bytes_to_floats(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// Eight fp16 numbers times x.
INLINE void multiply_halves(const uint8_t* p, float x, float* y) {
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_ps(x)));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const uint8_t* low, const uint8_t* high, Floats* scales, Floats* mins) {
    __attribute__((aligned(32))) uint8_t scale[32], min[32];
    const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi8(0x30);
    __m256i l = _mm256_loadu_si256((const __m256i*)low);
    __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)high));
    __m256i scale_high = _mm256_and_si256(_mm256_srlv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 0, 0, 0, 0)), upper);
    __m256i min_high = _mm256_and_si256(_mm256_sllv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 4, 4, 4, 4)), upper);
    __m256i min_low = _mm256_and_si256(_mm256_srli_epi16(l, 4), nibble);
    _mm256_storeu_si256((__m256i*)scale, _mm256_or_si256(_mm256_and_si256(l, nibble), scale_high));
    _mm256_storeu_si256((__m256i*)min, _mm256_or_si256(min_low, min_high));
    for (int32_t v = 0; v < 32 / LANES; v++) {
        scales[v] = bytes_to_floats(scale + v * LANES);
        mins[v] = bytes_to_floats(min + v * LANES);
    }
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(Ints* a) { __asm__("" : "+x"(*a)); }

INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
