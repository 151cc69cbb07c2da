// A superblock of Q4_K on the GPU:
//
//     byte      0 .. 3     4 .. 15                        16 .. 143
//             | d, dmin  | bits 12 s .. 12 s + 5: scale | 32 p + l: row 64 p + l (low nibble), 64 p + 32 + l (high)  |
//             |          |      12 s + 6 .. 12 s + 11: min |
//
//     weight = d * scale[s] * q - dmin * min[s],  s = row / 32

#pragma once

#define LANE_ROWS 0

static constexpr int BLOCK_BYTES = 144;
