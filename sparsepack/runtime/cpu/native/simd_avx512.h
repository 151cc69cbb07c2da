// The vectors of zigzag_gemv.inc and its like, with AVX-512 and VNNI: four chunks (128 rows) a vector.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef __m512i Ints;
typedef __m512 Floats;
enum { CHUNKS = 4, LANES = 16, MATMUL_POSITIONS = 3, MATMUL_HALVES = 2 };

INLINE Ints load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store(void* p, Ints a) { _mm512_storeu_si512(p, a); }
INLINE Ints zeros() { return _mm512_setzero_si512(); }
INLINE Ints broadcast(int32_t a) { return _mm512_set1_epi32(a); }
INLINE Ints words_low(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
INLINE Ints words_high(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
INLINE Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
INLINE Ints words_right_8(Ints a) { return _mm512_srli_epi16(a, 8); }
INLINE Ints words_right_12(Ints a) { return _mm512_srli_epi16(a, 12); }
INLINE Ints times_16(Ints a) { return _mm512_slli_epi32(a, 4); }
INLINE Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
// Per word, a b / 2^15 rounded.
INLINE Ints multiply_high(Ints a, Ints b) { return _mm512_mulhrs_epi16(a, b); }
// sum + a.low b.low + a.high b.high per dword.
INLINE Ints dot(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE Ints per_chunk(const int32_t* p) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_epi32(four, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p)));
}
INLINE Floats per_chunk_floats(const float* p) { return _mm512_castsi512_ps(per_chunk((const int32_t*)p)); }

INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
INLINE Floats broadcast_float(float a) { return _mm512_set1_ps(a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE Floats add_floats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Floats a) {
    _mm_storeu_ps(y, _mm512_castps512_ps128(a));
    _mm_storeu_ps(y + 32, _mm512_extractf32x4_ps(a, 1));
    _mm_storeu_ps(y + 64, _mm512_extractf32x4_ps(a, 2));
    _mm_storeu_ps(y + 96, _mm512_extractf32x4_ps(a, 3));
}

// What prepare.inc needs. `slots`: which LANES of the 32 slots of a quad.
INLINE Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats subtract_product(Floats sum, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, sum); }
// The low words of a and b side by side: a | b << 16.
INLINE Ints pair_words(Ints a, Ints b) { return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16)); }
// One number per band, at the slots of the band.
INLINE Floats at_slots(const float* bands, int32_t slots) {
    const __m512i even = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i odd = _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(slots ? odd : even, _mm512_castps128_ps512(_mm_loadu_ps(bands)));
}
INLINE Floats bytes_to_floats(__m128i a) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a)); }
// Eight fp16 numbers times x.
INLINE void multiply_halves(const uint8_t* p, float x, float* y) {
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_ps(x)));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const uint8_t* low, const uint8_t* high, Floats* scales, Floats* mins) {
    const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi8(0x30);
    __m256i l = _mm256_loadu_si256((const __m256i*)low);
    __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)high));
    __m256i scale_high = _mm256_srlv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 0, 0, 0, 0));
    __m256i min_high = _mm256_sllv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 4, 4, 4, 4));
    __m256i min_low = _mm256_and_si256(_mm256_srli_epi16(l, 4), nibble);
    // a | b & c
    __m256i scale = _mm256_ternarylogic_epi32(_mm256_and_si256(l, nibble), scale_high, upper, 0xf8);
    __m256i min = _mm256_ternarylogic_epi32(min_low, min_high, upper, 0xf8);
    scales[0] = bytes_to_floats(_mm256_castsi256_si128(scale));
    scales[1] = bytes_to_floats(_mm256_extracti128_si256(scale, 1));
    mins[0] = bytes_to_floats(_mm256_castsi256_si128(min));
    mins[1] = bytes_to_floats(_mm256_extracti128_si256(min, 1));
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(Ints* a) { __asm__("" : "+v"(*a)); }

INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
