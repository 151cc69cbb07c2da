// How the blocks of a group come to one sum each of what they added up.
//
// Each of them has the same COUNT sums, first those of its warps. Where SPLITS > 1 it writes its own to words
// (words.cuh), and finishes a share of the COUNT: it takes what all of them wrote there, in order, so that the same
// bits come every run, and leaves the words empty.
//
//     slots     | COUNT words of block 0 | of block 1 | .. SPLITS - 1 | ... the next group's
//
// The warps' sums lie in shared memory, 256 of a band after the other (of each input, then of the next band). Lanes
// that write at a time are 64 apart, which would be the same bank: so 4 places stay empty after each 64, and 4 more
// after 256.
//
// Macros: SPLITS, and those of zigzag.cuh

#pragma once

#include "words.cuh"
#include "zigzag.cuh"

static constexpr int PLACES = BAND_ROWS + 20;  // of a band's sums
__device__ __forceinline__ int place(int i) { return i / BAND_ROWS * PLACES + i % BAND_ROWS + i % BAND_ROWS / 64 * 4; }

// What a block finishes of COUNT: from begin on, before end.
template <int COUNT> struct Share {
    static constexpr int EACH = (COUNT + SPLITS - 1) / SPLITS;
    int begin, end;

    __device__ __forceinline__ explicit Share(int split)
        : begin(min(split * EACH, COUNT)), end(min(begin + EACH, COUNT)) {}
};

// The sums of a block's warps, of each as many as its band has, become the block's: in its words, or where it is alone
// in its first warps' places, so that sum i is at own[place(i)].
template <int COUNT> __device__ __forceinline__ void add_up(float* own, float* words) {
#pragma unroll 1
    for (int r = threadIdx.x * 4; r < COUNT; r += THREADS * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const float4 v = *(const float4*)(own + place(set * COUNT + r));
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
        if (SPLITS > 1) {
            write_words(words + r, sum);
        } else {
            *(float4*)(own + place(r)) = sum;  // which no other thread reads before
        }
    }
    if (SPLITS == 1) sync_first<THREADS>();
}

// Adds to sums, in order, the words that the blocks of a group wrote STRIDE apart, in COUNT places of them, the i-th
// apart(i) from the first, the last ones of which may be missing. The words are empty then.
template <int STRIDE, int COUNT, typename Apart>
__device__ __forceinline__ void take(float* slot, float (&sums)[COUNT], Apart apart, int places = COUNT) {
    constexpr int MOST = COUNT > 2 ? 16 : 32, ONCE = SPLITS <= MOST ? SPLITS : MOST;  // blocks asked at a time
#pragma unroll 1
    for (int first = 0; first < SPLITS; first += ONCE, slot += ONCE * STRIDE) {
        float values[ONCE][COUNT];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int s = 0; s < ONCE; ++s) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const bool none = SPLITS % ONCE && first + s >= SPLITS || i >= places;
                    const u32 word = none ? 0 : read_word(slot + s * STRIDE + apart(i));
                    values[s][i] = __uint_as_float(word);
                    missing |= word == EMPTY;
                }
            }
        } while (missing);
#pragma unroll
        for (int s = 0; s < ONCE; ++s) {
            if (SPLITS % ONCE && first + s >= SPLITS) break;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                sums[i] += values[s][i];
                if (i < places) *(u32*)(slot + s * STRIDE + apart(i)) = EMPTY;
            }
        }
    }
}
