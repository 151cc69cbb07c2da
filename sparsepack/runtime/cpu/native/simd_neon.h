// The vectors of zigzag_gemv.inc and its like, with NEON: one chunk (32 rows) a vector.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef int32x4_t Ints;
typedef float32x4_t Floats;
enum { CHUNKS = 1, LANES = 4, MATMUL_POSITIONS = 4, MATMUL_HALVES = 1 };

INLINE int16x8_t words(Ints a) { return vreinterpretq_s16_s32(a); }
INLINE Ints dwords(int16x8_t a) { return vreinterpretq_s32_s16(a); }

INLINE Ints load(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
INLINE void store(void* p, Ints a) { vst1q_u8((uint8_t*)p, vreinterpretq_u8_s32(a)); }
INLINE Ints zeros() { return vdupq_n_s32(0); }
INLINE Ints broadcast(int32_t a) { return vdupq_n_s32(a); }
INLINE Ints words_low(Ints a, Ints b) { return dwords(vzip1q_s16(words(a), words(b))); }
INLINE Ints words_high(Ints a, Ints b) { return dwords(vzip2q_s16(words(a), words(b))); }
INLINE Ints both(Ints a, Ints b) { return vandq_s32(a, b); }
INLINE Ints words_right_8(Ints a) {
    return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), 8));
}
INLINE Ints words_right_12(Ints a) {
    return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), 12));
}
INLINE Ints times_16(Ints a) { return vshlq_n_s32(a, 4); }
INLINE Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
// Per word, a b / 2^15 rounded.
INLINE Ints multiply_high(Ints a, Ints b) { return dwords(vqrdmulhq_s16(words(a), words(b))); }
// sum + a.low b.low + a.high b.high per dword.
INLINE Ints dot(Ints sum, Ints a, Ints b) {
    int32x4_t low = vmull_s16(vget_low_s16(words(a)), vget_low_s16(words(b)));
    int32x4_t high = vmull_high_s16(words(a), words(b));
    return vaddq_s32(sum, vpaddq_s32(low, high));
}
// One dword per chunk, each four times: what the lanes of the chunks are multiplied with.
INLINE Ints per_chunk(const int32_t* p) { return vdupq_n_s32(*p); }
INLINE Floats per_chunk_floats(const float* p) { return vdupq_n_f32(*p); }

INLINE Floats to_floats(Ints a) { return vcvtq_f32_s32(a); }
INLINE Floats load_floats(const float* p) { return vld1q_f32(p); }
INLINE void store_floats(float* p, Floats a) { vst1q_f32(p, a); }
INLINE Floats broadcast_float(float a) { return vdupq_n_f32(a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
INLINE Floats add_floats(Floats a, Floats b) { return vaddq_f32(a, b); }
// Four lanes of each chunk to the chunk's rows: chunk c at y + 32 c.
INLINE void store_chunks(float* y, Floats a) { vst1q_f32(y, a); }

// What prepare.inc needs. `slots`: which LANES of the 32 slots of a quad.
INLINE Ints to_ints(Floats a) { return vcvtnq_s32_f32(a); }
INLINE Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
INLINE Floats subtract_product(Floats sum, Floats a, Floats b) { return vfmsq_f32(sum, a, b); }
// The low words of a and b side by side: a | b << 16.
INLINE Ints pair_words(Ints a, Ints b) { return vsliq_n_s32(a, b, 16); }
// One number per band, at the slots of the band: bands 0, 2, 1, 3.
INLINE Floats at_slots(const float* bands, int32_t slots) {
    return vdupq_n_f32(bands[slots >> 2 | (slots >> 1 & 1) << 1]);
}
INLINE Floats bytes_to_floats(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
// Eight fp16 numbers times x.
INLINE void multiply_halves(const uint8_t* p, float x, float* y) {
    float16x8_t d = vreinterpretq_f16_u8(vld1q_u8(p));
    vst1q_f32(y, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(d)), x));
    vst1q_f32(y + 4, vmulq_n_f32(vcvt_high_f32_f16(d), x));
}
// The 6-bit numbers of a header (layout.h), by slot.
INLINE void unpack_header(const uint8_t* low, const uint8_t* high, Floats* scales, Floats* mins) {
    __attribute__((aligned(32))) uint8_t scale[32], min[32];
    const uint8x16_t nibble = vdupq_n_u8(0x0f), upper = vdupq_n_u8(0x30);
    uint8x16_t first = vld1q_u8(low), second = vld1q_u8(low + 16), h = vld1q_u8(high);
    vst1q_u8(scale, vorrq_u8(vandq_u8(first, nibble), vandq_u8(h, upper)));
    vst1q_u8(scale + 16, vorrq_u8(vandq_u8(second, nibble), vandq_u8(vshrq_n_u8(h, 2), upper)));
    vst1q_u8(min, vorrq_u8(vshrq_n_u8(first, 4), vandq_u8(vshlq_n_u8(h, 4), upper)));
    vst1q_u8(min + 16, vorrq_u8(vshrq_n_u8(second, 4), vandq_u8(vshlq_n_u8(h, 2), upper)));
    for (int32_t v = 0; v < 32 / LANES; v++) {
        scales[v] = bytes_to_floats(scale + v * LANES);
        mins[v] = bytes_to_floats(min + v * LANES);
    }
}

// Keeps a sum in its register around a loop, where GCC would copy it.
INLINE void keep(Ints* a) { __asm__("" : "+w"(*a)); }

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
