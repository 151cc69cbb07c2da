// Where planes lie in a stage of the ring (zigzag.cuh), by its constants: CARD_LEVELS of a column at PITCH, and where a matrix is
// divided the others behind all of the k_tile's columns, at REST_PITCH.

#pragma once

static constexpr bool ALL_PLANES = DENSE && !PLANES_DIVIDED;
// Where plane `number` of an entry 4 j further begins in a stage, from where a lane's entry has plane 2, and what lies elsewhere.
// Rests are as far apart as in memory, so that bulk copies of 4 bands are of whole lines.
__device__ __forceinline__ int plane_in_stage(int planes, int rest, int number, int j) {
    return number <= CARD_LEVELS ? planes + (number - 2) * TILE_BANDS * PLANE_BYTES + 4 * j * PITCH
                                 : rest + rest_bytes(TILE_BANDS, CARD_LEVELS, number - 1) + 4 * j * REST_PITCH;
}
