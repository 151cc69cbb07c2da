// What vectors do by instructions of NEON.
#pragma once
#include <arm_neon.h>

#define SPARSEPACK_WIDTH 4
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
INLINE Vec at_most(Vec v, float bound) { return v > splat(bound) ? splat(bound) : v; }
INLINE Vec at_least(Vec v, float bound) { return v < splat(bound) ? splat(bound) : v; }
// The larger of a and b in each lane; b where either is NaN.
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
// Lane i: the sum of the lanes of v[i]. WIDTH vectors.
INLINE Vec totals(const Vec* v) {
    return (Vec)vpaddq_f32(vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]),
                           vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
}
// Half precision, as bits.
INLINE Vec load_half(const Bits16* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE Vec load_half_first(const Bits16* p, int32_t n) {
    uint16_t lanes[WIDTH] = {};
    for (int32_t i = 0; i < n; i++) lanes[i] = p[i];
    return load_half(lanes);
}
INLINE float from_half(uint16_t h) { return load_half_first(&h, 1)[0]; }
// Rounded to nearest, ties to even; infinity beyond the range.
INLINE void store_half(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
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
INLINE VecInt load_bytes(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return (VecInt)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
INLINE VecInt load_signed_bytes(const int8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return (VecInt)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))));
}
// The low bytes of 16 whole numbers.
INLINE void store_bytes(int8_t* p, const VecInt* v) {
    int16x8_t first = vcombine_s16(vmovn_s32((int32x4_t)v[0]), vmovn_s32((int32x4_t)v[1]));
    int16x8_t second = vcombine_s16(vmovn_s32((int32x4_t)v[2]), vmovn_s32((int32x4_t)v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(first), vmovn_s16(second)));
}
// Per lane, the sum of its low nibbles times the bytes of `low` and its high nibbles times those of `high`.
INLINE VecInt dot_nibbles(VecInt codes, VecInt low, VecInt high) {
    uint8x16_t bytes = vreinterpretq_u8_s32((int32x4_t)codes);
    int8x16_t first = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    int8x16_t q_first = vreinterpretq_s8_s32((int32x4_t)low), q_second = vreinterpretq_s8_s32((int32x4_t)high);
    int16x8_t a = vmull_s8(vget_low_s8(first), vget_low_s8(q_first)), b = vmull_high_s8(first, q_first);
    a = vmlal_s8(a, vget_low_s8(second), vget_low_s8(q_second));
    b = vmlal_high_s8(b, second, q_second);
    return (VecInt)vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b));
}
// Sums of neighbouring lanes: those of a, then those of b.
INLINE VecInt add_neighbours(VecInt a, VecInt b) { return (VecInt)vpaddq_s32((int32x4_t)a, (int32x4_t)b); }
// Rows become columns.
INLINE void transpose(VecInt v[WIDTH]) {
    int32x4_t ab = vtrn1q_s32(v[0], v[1]), ab2 = vtrn2q_s32(v[0], v[1]);
    int32x4_t cd = vtrn1q_s32(v[2], v[3]), cd2 = vtrn2q_s32(v[2], v[3]);
    v[0] = (VecInt)vtrn1q_s64((int64x2_t)ab, (int64x2_t)cd), v[2] = (VecInt)vtrn2q_s64((int64x2_t)ab, (int64x2_t)cd);
    v[1] = (VecInt)vtrn1q_s64((int64x2_t)ab2, (int64x2_t)cd2),
    v[3] = (VecInt)vtrn2q_s64((int64x2_t)ab2, (int64x2_t)cd2);
}
// The mask of the scores, of 2 * WIDTH, that are at least the limit: bit BITS * lane.
enum { BITS = 8 };
INLINE uint64_t at_least_mask(const int16_t* scores, int16_t limit) {
    VecShort met = load_shorts(scores) >= limit;
    return vget_lane_u64(vreinterpret_u64_u8(vmovn_u16((uint16x8_t)met)), 0) & 0x0101010101010101u;
}
// The low nibbles of bytes that a vector holds one in a lane, and the high ones.
INLINE void nibbles_to_floats(VecInt bytes, Vec* low, Vec* high) {
    *low = to_floats(bytes & 15);
    *high = to_floats(bytes >> 4);
}
// The lanes, numbers that a byte holds, to groups of 8 bytes that lie `stride` apart.
INLINE void store_eights(int8_t* p, int32_t, VecInt v) {
    for (int32_t i = 0; i < WIDTH; i++) p[i] = (int8_t)v[i];
}

// ---- Zigzag matrices: one chunk (32 rows) a vector ------------------------------------------------------------------

enum { VECTOR_CHUNKS = 1 };

INLINE int16x8_t words(VecInt a) { return vreinterpretq_s16_s32(a); }
INLINE VecInt dwords(int16x8_t a) { return vreinterpretq_s32_s16(a); }

INLINE VecInt words_low(VecInt a, VecInt b) { return dwords(vzip1q_s16(words(a), words(b))); }
INLINE VecInt words_high(VecInt a, VecInt b) { return dwords(vzip2q_s16(words(a), words(b))); }
INLINE VecInt words_right_8(VecInt a) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), 8)); }
INLINE VecInt words_right_12(VecInt a) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), 12)); }
// Per word, a b / 2^15 rounded.
INLINE VecInt multiply_high(VecInt a, VecInt b) { return dwords(vqrdmulhq_s16(words(a), words(b))); }
// sum + a.low b.low + a.high b.high per dword.
INLINE VecInt dot(VecInt sum, VecInt a, VecInt b) {
    int32x4_t low = vmull_s16(vget_low_s16(words(a)), vget_low_s16(words(b)));
    int32x4_t high = vmull_high_s16(words(a), words(b));
    return vaddq_s32(sum, vpaddq_s32(low, high));
}
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE VecInt per_chunk(const int32_t* p) { return vdupq_n_s32(*p); }
INLINE Vec per_chunk_floats(const float* p) { return vdupq_n_f32(*p); }

INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return vfmaq_f32(sum, a, b); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Vec a) { vst1q_f32(y, a); }

// `slots`: which WIDTH of the 32 slots of a quad.
INLINE VecInt to_ints(Vec a) { return vcvtnq_s32_f32(a); }
INLINE Vec subtract_product(Vec sum, Vec a, Vec b) { return vfmsq_f32(sum, a, b); }
// The low words of a and b side by side: a | b << 16.
INLINE VecInt pair_words(VecInt a, VecInt b) { return vsliq_n_s32(a, b, 16); }
// One number per band, at the slots of the band: bands 0, 2, 1, 3.
INLINE Vec at_slots(const float* bands, int32_t slots) {
    return vdupq_n_f32(bands[slots >> 2 | (slots >> 1 & 1) << 1]);
}
INLINE Vec bytes_to_floats(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
// Eight fp16 numbers times x: `d` of a header is followed by its dmin.
INLINE void multiply_halves(const void* p, float x, float* y) {
    float16x8_t d = vreinterpretq_f16_u8(vld1q_u8((const uint8_t*)p));
    vst1q_f32(y, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(d)), x));
    vst1q_f32(y + 4, vmulq_n_f32(vcvt_high_f32_f16(d), x));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const QuadHeader* header, Vec* scales, Vec* mins) {
    __attribute__((aligned(32))) uint8_t scale[32], min[32];
    const uint8x16_t nibble = vdupq_n_u8(0x0f), upper = vdupq_n_u8(0x30);
    uint8x16_t first = vld1q_u8(header->low), second = vld1q_u8(header->low + 16), h = vld1q_u8(header->high);
    vst1q_u8(scale, vorrq_u8(vandq_u8(first, nibble), vandq_u8(h, upper)));
    vst1q_u8(scale + 16, vorrq_u8(vandq_u8(second, nibble), vandq_u8(vshrq_n_u8(h, 2), upper)));
    vst1q_u8(min, vorrq_u8(vshrq_n_u8(first, 4), vandq_u8(vshlq_n_u8(h, 4), upper)));
    vst1q_u8(min + 16, vorrq_u8(vshrq_n_u8(second, 4), vandq_u8(vshlq_n_u8(h, 2), upper)));
    for (int32_t v = 0; v < 32 / WIDTH; v++) {
        scales[v] = bytes_to_floats(scale + v * WIDTH);
        mins[v] = bytes_to_floats(min + v * WIDTH);
    }
}

// ---- Matrices of planes: one chunk (128 rows) a vector --------------------------------------------------------------

INLINE VecInt bytes_low(VecInt a, VecInt b) { return (VecInt)vzip1q_s8((int8x16_t)a, (int8x16_t)b); }
INLINE VecInt bytes_high(VecInt a, VecInt b) { return (VecInt)vzip2q_s8((int8x16_t)a, (int8x16_t)b); }
// The 16 bytes at `offset` of four columns: lane k of vector p has byte 4 p + k of the four.
enum { GATHERED = 1 };
INLINE void gather_bytes(const uint8_t* const* columns, int64_t offset, VecInt to[4]) {
    VecInt column[4];
    for (int32_t i = 0; i < 4; i++) column[i] = load_ints(columns[i] + offset);
    for (int32_t half = 0; half < 2; half++) {
        VecInt ab = half ? bytes_high(column[0], column[1]) : bytes_low(column[0], column[1]);
        VecInt cd = half ? bytes_high(column[2], column[3]) : bytes_low(column[2], column[3]);
        to[2 * half] = words_low(ab, cd), to[2 * half + 1] = words_high(ab, cd);
    }
}
// Bits of a where the mask has ones, else of b; and the other way round.
INLINE VecInt keep_bits(VecInt a, VecInt b, VecInt mask) {
    return (VecInt)vbslq_s32((uint32x4_t)mask, (int32x4_t)a, (int32x4_t)b);
}
INLINE VecInt replace_bits(VecInt a, VecInt b, VecInt mask) { return keep_bits(b, a, mask); }
INLINE VecInt or_bits(VecInt a, VecInt b, VecInt mask) { return a | (b & mask); }
// sum + unsigned bytes of a times signed ones of b, four per dword. WHOLE_BYTES: bytes of a may be above 63.
enum { WHOLE_BYTES = 0 };
INLINE VecInt dot_bytes(VecInt sum, VecInt a, VecInt b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (VecInt)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#else
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
    int16x8_t high = vmull_high_s8((int8x16_t)a, (int8x16_t)b);
    return (VecInt)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}

// The same of two pairs, where bytes of a are at most 63.
INLINE VecInt dot_two(VecInt sum, VecInt a, VecInt b, VecInt a2, VecInt b2) {
    return dot_bytes(dot_bytes(sum, a, b), a2, b2);
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(VecInt* a) { __asm__("" : "+w"(*a)); }

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace vectors
}  // namespace
}  // namespace sparsepack
