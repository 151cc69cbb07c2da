// What vectors do by instructions of AVX-512 (F, BW, VL, DQ, VNNI).
#pragma once
#include <immintrin.h>

#define SPARSEPACK_WIDTH 16
#include "kernels/vector_types.h"

namespace sparsepack {
namespace {
namespace vectors {

// ---- Floats ---------------------------------------------------------------------------------------------------------

// The first n lanes (n < WIDTH), zeros in the others.
INLINE Vec load_first(const float* p, int32_t n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void store_first(float* p, Vec v, int32_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
// NaN in v stays NaN.
INLINE Vec at_most(Vec v, float bound) { return _mm512_min_ps(splat(bound), v); }
INLINE Vec at_least(Vec v, float bound) { return _mm512_max_ps(splat(bound), v); }
// The larger of a and b in each lane; b where either is NaN.
INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
// Lane i: the sum of the lanes of v[i]. WIDTH vectors.
INLINE Vec totals(const Vec* v) {
    __m512 quarter[4];
    for (int32_t i = 0; i < 4; i++) {
        __m512 a = v[4 * i], b = v[4 * i + 1], c = v[4 * i + 2], d = v[4 * i + 3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        quarter[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x44),
                               _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xee));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x44),
                                _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
// Half precision, as bits.
INLINE Vec load_half(const Bits16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Vec load_half_first(const Bits16* p, int32_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE float from_half(uint16_t h) { return _cvtsh_ss(h); }
// Rounded to nearest, ties to even; infinity beyond the range.
INLINE void store_half(uint16_t* p, Vec v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
}
// p 2^n for whole numbers n from -151 to 128.
INLINE Vec times_power_of_two(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }

// ---- Integers -------------------------------------------------------------------------------------------------------

INLINE int32_t total(VecInt v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE int32_t largest(VecInt v) { return _mm512_reduce_max_epi32((__m512i)v); }
// By instructions, since GCC converts vectors of bytes one by one.
INLINE VecInt load_bytes(const uint8_t* p) { return (VecInt)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE VecInt load_signed_bytes(const int8_t* p) {
    return (VecInt)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
// The low bytes of 16 whole numbers.
INLINE void store_bytes(int8_t* p, const VecInt* v) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v[0]));
}
// Whole numbers of 15 bits, 4 * WIDTH of them, as a high and a low byte with a sign; of 7 bits, where not fine, as a high byte.
// Returns lanes whose sum is that of `sums` and of the numbers.
INLINE VecInt store_digits(const VecInt* numbers, bool fine, int8_t* high, int8_t* low, VecInt sums) {
    // Packing takes four of each vector in turn.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i ones = _mm512_set1_epi16(1), half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    __m512i a = _mm512_packs_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
    __m512i b = _mm512_packs_epi32((__m512i)numbers[2], (__m512i)numbers[3]);
    sums = (VecInt)_mm512_dpwssd_epi32(_mm512_dpwssd_epi32((__m512i)sums, a, ones), b, ones);
    if (fine) {
        __m512i lows = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, lows));
        a = _mm512_srai_epi16(_mm512_add_epi16(a, half), 8), b = _mm512_srai_epi16(_mm512_add_epi16(b, half), 8);
    }
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b)));
    return sums;
}
// Per lane, the sum of its low nibbles times the bytes of `low` and its high nibbles times those of `high`.
INLINE VecInt dot_nibbles(VecInt codes, VecInt low, VecInt high) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i first = _mm512_and_si512((__m512i)codes, nibble);
    __m512i second = _mm512_and_si512(_mm512_srli_epi16((__m512i)codes, 4), nibble);
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, (__m512i)low);
    return (VecInt)_mm512_dpbusd_epi32(sums, second, (__m512i)high);
}
// Sums of neighbouring lanes: those of a, then those of b.
INLINE VecInt add_neighbours(VecInt a, VecInt b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return (VecInt)_mm512_add_epi32(_mm512_permutex2var_epi32((__m512i)a, even, (__m512i)b),
                                    _mm512_permutex2var_epi32((__m512i)a, odd, (__m512i)b));
}
// Rows become columns.
INLINE void transpose(VecInt v[WIDTH]) {
    __m512i a[WIDTH], b[WIDTH];
    for (int32_t i = 0; i < WIDTH; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
    for (int32_t i = 0; i < WIDTH; i += 4) {  // b[i + k]: column 4 q + k of rows i to i + 3, q each quarter
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int32_t k = 0; k < 4; k++) {
        __m512i low = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x88), high = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xdd);
        v[k] = (VecInt)_mm512_shuffle_i32x4(low, low2, 0x88);
        v[4 + k] = (VecInt)_mm512_shuffle_i32x4(high, high2, 0x88);
        v[8 + k] = (VecInt)_mm512_shuffle_i32x4(low, low2, 0xdd);
        v[12 + k] = (VecInt)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}
// The mask of the scores, of 2 * WIDTH, that are at least the limit: bit BITS * lane.
enum { BITS = 1 };
INLINE uint64_t at_least_mask(const int16_t* scores, int16_t limit) {
    return _mm512_cmpge_epi16_mask(_mm512_loadu_si512(scores), _mm512_set1_epi16(limit));
}
// The low nibbles of bytes that a vector holds one in a lane, and the high ones.
INLINE void nibbles_to_floats(VecInt bytes, Vec* low, Vec* high) {
    const __m512 floats = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    *low = _mm512_permutexvar_ps((__m512i)bytes, floats);
    *high = _mm512_permutexvar_ps((__m512i)(bytes >> 4), floats);
}
// The lanes, numbers that a byte holds, to groups of 8 bytes that lie `stride` apart.
INLINE void store_eights(int8_t* p, int32_t stride, VecInt v) {
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
    _mm_storel_epi64((__m128i*)p, bytes);
    _mm_storel_epi64((__m128i*)(p + stride), _mm_srli_si128(bytes, 8));
}

// ---- Zigzag matrices: four chunks (128 rows) a vector ---------------------------------------------------------------

enum { VECTOR_CHUNKS = 4 };

INLINE VecInt words_low(VecInt a, VecInt b) { return (VecInt)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
INLINE VecInt words_high(VecInt a, VecInt b) { return (VecInt)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
INLINE VecInt words_right_8(VecInt a) { return (VecInt)_mm512_srli_epi16((__m512i)a, 8); }
INLINE VecInt words_right_12(VecInt a) { return (VecInt)_mm512_srli_epi16((__m512i)a, 12); }
// Per word, a b / 2^15 rounded.
INLINE VecInt multiply_high(VecInt a, VecInt b) { return (VecInt)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b); }
// sum + a.low b.low + a.high b.high per dword.
INLINE VecInt dot(VecInt sum, VecInt a, VecInt b) {
    return (VecInt)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE VecInt per_chunk(const int32_t* p) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return (VecInt)_mm512_permutexvar_epi32(four, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p)));
}
INLINE Vec per_chunk_floats(const float* p) { return as_floats(per_chunk((const int32_t*)p)); }

INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Vec a) {
    _mm_storeu_ps(y, _mm512_castps512_ps128(a));
    _mm_storeu_ps(y + 32, _mm512_extractf32x4_ps(a, 1));
    _mm_storeu_ps(y + 64, _mm512_extractf32x4_ps(a, 2));
    _mm_storeu_ps(y + 96, _mm512_extractf32x4_ps(a, 3));
}

// `slots`: which WIDTH of the 32 slots of a quad.
INLINE VecInt to_ints(Vec a) { return (VecInt)_mm512_cvtps_epi32(a); }
INLINE Vec subtract_product(Vec sum, Vec a, Vec b) { return _mm512_fnmadd_ps(a, b, sum); }
// The low words of a and b side by side: a | b << 16.
INLINE VecInt pair_words(VecInt a, VecInt b) {
    return (VecInt)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, _mm512_slli_epi32((__m512i)b, 16));
}
// One number per band, at the slots of the band.
INLINE Vec at_slots(const float* bands, int32_t slots) {
    const __m512i even = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i odd = _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(slots ? odd : even, _mm512_castps128_ps512(_mm_loadu_ps(bands)));
}
INLINE Vec bytes_to_floats(__m128i a) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a)); }
// Eight fp16 numbers times x: `d` of a header is followed by its dmin.
INLINE void multiply_halves(const void* p, float x, float* y) {
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_ps(x)));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const QuadHeader* header, Vec* scales, Vec* mins) {
    const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi8(0x30);
    __m256i l = _mm256_loadu_si256((const __m256i*)header->low);
    __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)header->high));
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

// ---- Matrices of planes: four chunks (128 rows each) a vector -------------------------------------------------------

INLINE VecInt bytes_low(VecInt a, VecInt b) { return (VecInt)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
INLINE VecInt bytes_high(VecInt a, VecInt b) { return (VecInt)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
// The 16 bytes at `offset` of four columns, of each of GATHERED chunks: lane k of a vector has byte k of the four.
enum { GATHERED = 2 };
INLINE void gather_bytes(const uint8_t* const* columns, int64_t offset, VecInt to[2]) {
    __m256i half[4];
    for (int32_t i = 0; i < 4; i++) half[i] = _mm256_loadu_si256((const __m256i*)(columns[i] + offset));
    __m512i ab = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    __m512i cd = _mm512_inserti64x4(_mm512_castsi256_si512(half[2]), half[3], 1);
    __m512i chunks[2] = {_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd)};
    for (int32_t c = 0; c < 2; c++) {  // column after column
#ifdef __AVX512VBMI__
        const __m512i turned = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a,
                                                0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                                                0x33231303, 0x32221202, 0x31211101, 0x30201000);
        to[c] = (VecInt)_mm512_permutexvar_epi8(turned, chunks[c]);
#else
        const __m512i dwords = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        const __m512i bytes =
            _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
        to[c] = (VecInt)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, chunks[c]), bytes);
#endif
    }
}
// Bits of a where the mask has ones, else of b; and the other way round. Each may overwrite a.
INLINE VecInt keep_bits(VecInt a, VecInt b, VecInt mask) {
    return (VecInt)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)mask, 0xe4);
}
INLINE VecInt replace_bits(VecInt a, VecInt b, VecInt mask) {
    return (VecInt)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)mask, 0xd8);
}
// a | b & mask
INLINE VecInt or_bits(VecInt a, VecInt b, VecInt mask) {
    return (VecInt)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)mask, 0xf8);
}
// sum + unsigned bytes of a times signed ones of b, four per dword. WHOLE_BYTES: bytes of a may be above 63.
enum { WHOLE_BYTES = 1 };
INLINE VecInt dot_bytes(VecInt sum, VecInt a, VecInt b) {
    return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

// The same of two pairs, where bytes of a are at most 63.
INLINE VecInt dot_two(VecInt sum, VecInt a, VecInt b, VecInt a2, VecInt b2) {
    return dot_bytes(dot_bytes(sum, a, b), a2, b2);
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(VecInt* a) { __asm__("" : "+v"(*a)); }

INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace vectors
}  // namespace
}  // namespace sparsepack
