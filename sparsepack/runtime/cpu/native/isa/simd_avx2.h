// What vectors do by instructions of AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#define SPARSEPACK_WIDTH 8
#include "kernels/vector_types.h"

namespace sparsepack {
namespace {
namespace vectors {

// ---- Floats ---------------------------------------------------------------------------------------------------------

// The first n lanes (n < WIDTH), zeros in the others.
INLINE Vec load_first(const float* p, int32_t n) {
    float lanes[WIDTH] = {};
    for (int32_t i = 0; i < n; i++) lanes[i] = p[i];
    return load(lanes);
}
INLINE void store_first(float* p, Vec v, int32_t n) {
    float lanes[WIDTH];
    store(lanes, v);
    for (int32_t i = 0; i < n; i++) p[i] = lanes[i];
}
// NaN in v stays NaN.
INLINE Vec at_most(Vec v, float bound) { return _mm256_min_ps(splat(bound), v); }
INLINE Vec at_least(Vec v, float bound) { return _mm256_max_ps(splat(bound), v); }
// The larger of a and b in each lane; b where either is NaN.
INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
// Lane i: the sum of the lanes of v[i]. WIDTH vectors.
INLINE Vec totals(const Vec* v) {
    __m256 half[2];
    for (int32_t i = 0; i < 2; i++) {
        __m256 a = v[4 * i], b = v[4 * i + 1], c = v[4 * i + 2], d = v[4 * i + 3];
        __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        half[i] = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(half[0], half[1], 0x20),
                         _mm256_permute2f128_ps(half[0], half[1], 0x31));
}
// Half precision, as bits.
INLINE Vec load_half(const Bits16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE Vec load_half_first(const Bits16* p, int32_t n) {
    uint16_t lanes[WIDTH] = {};
    for (int32_t i = 0; i < n; i++) lanes[i] = p[i];
    return load_half(lanes);
}
INLINE float from_half(uint16_t h) { return _cvtsh_ss(h); }
// Rounded to nearest, ties to even; infinity beyond the range.
INLINE void store_half(uint16_t* p, Vec v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// p 2^n for whole numbers n from -151 to 128.
INLINE Vec times_power_of_two(Vec p, Vec n) {
    // 2^n in two steps: its exponent alone may not fit.
    VecInt whole = __builtin_convertvector(n, VecInt), half = whole >> 1;
    return p * as_floats((half + 127) << 23) * as_floats((whole - half + 127) << 23);
}

// ---- Integers -------------------------------------------------------------------------------------------------------

INLINE int32_t total(VecInt v) {
    int32_t lanes[WIDTH], sum = 0;
    __builtin_memcpy(lanes, &v, sizeof v);
    for (int32_t i = 0; i < WIDTH; i++) sum += lanes[i];
    return sum;
}
INLINE int32_t largest(VecInt v) {
    int32_t lanes[WIDTH], most;
    __builtin_memcpy(lanes, &v, sizeof v);
    most = lanes[0];
    for (int32_t i = 1; i < WIDTH; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}
// By instructions, since GCC converts vectors of bytes one by one.
INLINE VecInt load_bytes(const uint8_t* p) { return (VecInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE VecInt load_signed_bytes(const int8_t* p) {
    return (VecInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
// The low bytes of 16 whole numbers.
INLINE void store_bytes(int8_t* p, const VecInt* v) {
    __m256i words = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);  // of each 128 bits four and four
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
// Per lane, the sum of its low nibbles times the bytes of `low` and its high nibbles times those of `high`.
INLINE VecInt dot_nibbles(VecInt codes, VecInt low, VecInt high) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i first = _mm256_and_si256((__m256i)codes, nibble);
    __m256i second = _mm256_and_si256(_mm256_srli_epi16((__m256i)codes, 4), nibble);
#ifdef __AVXVNNI__
    __m256i sums = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), first, (__m256i)low);
    return (VecInt)_mm256_dpbusd_avx_epi32(sums, second, (__m256i)high);
#else
    // Up to 4 * 15 * 127 in a word.
    __m256i words =
        _mm256_add_epi16(_mm256_maddubs_epi16(first, (__m256i)low), _mm256_maddubs_epi16(second, (__m256i)high));
    return (VecInt)_mm256_madd_epi16(words, _mm256_set1_epi16(1));
#endif
}
// Sums of neighbouring lanes: those of a, then those of b.
INLINE VecInt add_neighbours(VecInt a, VecInt b) {
    return (VecInt)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)a, (__m256i)b), 0xd8);
}
// Rows become columns.
INLINE void transpose(VecInt v[WIDTH]) {
    __m256i a[WIDTH], b[WIDTH];
    for (int32_t i = 0; i < WIDTH; i += 2) {
        a[i] = _mm256_unpacklo_epi32((__m256i)v[i], (__m256i)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32((__m256i)v[i], (__m256i)v[i + 1]);
    }
    for (int32_t i = 0; i < WIDTH; i += 4) {  // b[i + k]: columns k and 4 + k of rows i to i + 3
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int32_t k = 0; k < 4; k++) {
        v[k] = (VecInt)_mm256_permute2x128_si256(b[k], b[4 + k], 0x20);
        v[4 + k] = (VecInt)_mm256_permute2x128_si256(b[k], b[4 + k], 0x31);
    }
}
// The mask of the scores, of 2 * WIDTH, that are at least the limit: bit BITS * lane.
enum { BITS = 2 };
INLINE uint64_t at_least_mask(const int16_t* scores, int16_t limit) {
    VecShort met = load_shorts(scores) >= limit;
    return (uint32_t)_mm256_movemask_epi8((__m256i)met) & 0x55555555u;
}
// The low nibbles of bytes that a vector holds one in a lane, and the high ones.
INLINE void nibbles_to_floats(VecInt bytes, Vec* low, Vec* high) {
    *low = to_floats(bytes & 15);
    *high = to_floats(bytes >> 4);
}
// The lanes, numbers that a byte holds, to groups of 8 bytes that lie `stride` apart.
INLINE void store_eights(int8_t* p, int32_t, VecInt v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

// ---- Zigzag matrices: two chunks (64 rows) a vector -----------------------------------------------------------------

enum { VECTOR_CHUNKS = 2 };

INLINE VecInt words_low(VecInt a, VecInt b) { return (VecInt)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
INLINE VecInt words_high(VecInt a, VecInt b) { return (VecInt)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
INLINE VecInt words_right_8(VecInt a) { return (VecInt)_mm256_srli_epi16((__m256i)a, 8); }
INLINE VecInt words_right_12(VecInt a) { return (VecInt)_mm256_srli_epi16((__m256i)a, 12); }
// Per word, a b / 2^15 rounded.
INLINE VecInt multiply_high(VecInt a, VecInt b) { return (VecInt)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b); }
// sum + a.low b.low + a.high b.high per dword.
INLINE VecInt dot(VecInt sum, VecInt a, VecInt b) {
#ifdef __AVXVNNI__
    return (VecInt)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return (VecInt)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#endif
}
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE VecInt per_chunk(const int32_t* p) {
    return (VecInt)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32(p[0])), _mm_set1_epi32(p[1]), 1);
}
INLINE Vec per_chunk_floats(const float* p) { return as_floats(per_chunk((const int32_t*)p)); }

INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Vec a) {
    _mm_storeu_ps(y, _mm256_castps256_ps128(a));
    _mm_storeu_ps(y + 32, _mm256_extractf128_ps(a, 1));
}

// `slots`: which WIDTH of the 32 slots of a quad.
INLINE VecInt to_ints(Vec a) { return (VecInt)_mm256_cvtps_epi32(a); }
INLINE Vec subtract_product(Vec sum, Vec a, Vec b) { return _mm256_fnmadd_ps(a, b, sum); }
// The low words of a and b side by side: a | b << 16.
INLINE VecInt pair_words(VecInt a, VecInt b) {
    return (VecInt)_mm256_blend_epi16((__m256i)a, _mm256_slli_epi32((__m256i)b, 16), 0xaa);
}
// One number per band, at the slots of the band: bands 0, 2, 1, 3.
INLINE Vec at_slots(const float* bands, int32_t slots) {
    return _mm256_broadcast_ss(bands + (slots >> 1 | (slots & 1) << 1));
}
INLINE Vec bytes_to_floats(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// Eight fp16 numbers times x: `d` of a header is followed by its dmin.
INLINE void multiply_halves(const void* p, float x, float* y) {
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_ps(x)));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const QuadHeader* header, Vec* scales, Vec* mins) {
    __attribute__((aligned(32))) uint8_t scale[32], min[32];
    const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi8(0x30);
    __m256i l = _mm256_loadu_si256((const __m256i*)header->low);
    __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)header->high));
    __m256i scale_high = _mm256_and_si256(_mm256_srlv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 0, 0, 0, 0)), upper);
    __m256i min_high = _mm256_and_si256(_mm256_sllv_epi32(h, _mm256_set_epi32(2, 2, 2, 2, 4, 4, 4, 4)), upper);
    __m256i min_low = _mm256_and_si256(_mm256_srli_epi16(l, 4), nibble);
    _mm256_storeu_si256((__m256i*)scale, _mm256_or_si256(_mm256_and_si256(l, nibble), scale_high));
    _mm256_storeu_si256((__m256i*)min, _mm256_or_si256(min_low, min_high));
    for (int32_t v = 0; v < 32 / WIDTH; v++) {
        scales[v] = bytes_to_floats(scale + v * WIDTH);
        mins[v] = bytes_to_floats(min + v * WIDTH);
    }
}

// ---- Matrices of planes: two chunks (128 rows each) a vector --------------------------------------------------------

INLINE VecInt bytes_low(VecInt a, VecInt b) { return (VecInt)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
INLINE VecInt bytes_high(VecInt a, VecInt b) { return (VecInt)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
// The 16 bytes at `offset` of four columns, of each of GATHERED chunks: lane k of the chunk's first vector has byte k of the
// four, of its second one byte 8 + k.
enum { GATHERED = 2 };
INLINE void gather_bytes(const uint8_t* const* columns, int64_t offset, VecInt to[4]) {
    VecInt column[4], fours[4];
    for (int32_t i = 0; i < 4; i++) column[i] = load_ints(columns[i] + offset);
    for (int32_t half = 0; half < 2; half++) {
        VecInt ab = half ? bytes_high(column[0], column[1]) : bytes_low(column[0], column[1]);
        VecInt cd = half ? bytes_high(column[2], column[3]) : bytes_low(column[2], column[3]);
        fours[2 * half] = words_low(ab, cd), fours[2 * half + 1] = words_high(ab, cd);
    }
    for (int32_t p = 0; p < 2; p++) {
        __m256i low = (__m256i)fours[2 * p], high = (__m256i)fours[2 * p + 1];
        to[p] = (VecInt)_mm256_permute2x128_si256(low, high, 0x20);
        to[2 + p] = (VecInt)_mm256_permute2x128_si256(low, high, 0x31);
    }
}
// Bits of a where the mask has ones, else of b; and the other way round.
INLINE VecInt keep_bits(VecInt a, VecInt b, VecInt mask) { return (a & mask) | (b & ~mask); }
INLINE VecInt replace_bits(VecInt a, VecInt b, VecInt mask) { return (b & mask) | (a & ~mask); }
INLINE VecInt or_bits(VecInt a, VecInt b, VecInt mask) { return a | (b & mask); }
// sum + unsigned bytes of a times signed ones of b, four per dword. WHOLE_BYTES: bytes of a may be above 63.
#ifdef __AVXVNNI__
enum { WHOLE_BYTES = 1 };
INLINE VecInt dot_bytes(VecInt sum, VecInt a, VecInt b) {
    return (VecInt)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
}
#else
enum { WHOLE_BYTES = 0 };
INLINE VecInt dot_bytes(VecInt sum, VecInt a, VecInt b) {
    __m256i words = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
    return (VecInt)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
#endif

// The same of two pairs, where bytes of a are at most 63.
INLINE VecInt dot_two(VecInt sum, VecInt a, VecInt b, VecInt a2, VecInt b2) {
#ifdef __AVXVNNI__
    return dot_bytes(dot_bytes(sum, a, b), a2, b2);
#else
    __m256i words =
        _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_maddubs_epi16((__m256i)a2, (__m256i)b2));
    return (VecInt)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
#endif
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(VecInt* a) { __asm__("" : "+x"(*a)); }

INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace vectors
}  // namespace
}  // namespace sparsepack
