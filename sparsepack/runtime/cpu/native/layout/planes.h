// How a zigzag matrix of planes (Q6_P) lies in memory while it runs. Plain structs and inline arithmetic: every instruction
// set includes this.
//
// A token reads the first planes of a column, and of another column other ones. So what an active column reads of a span
// (layout.h) is one run of memory, from its first byte on; each column and its plane 1 begin on a new cache line:
//
//     span:  column 0: scales | plane 1 | planes 2 and 3 | planes 4 and 5;  column 1: scales | ...
//
// The unit of planes is a chunk of 128 rows, two groups of 64: 32 bytes of plane 1 and 16 of each of the others. Bits of row
// 16 f + p of a group, f from 0 to 3, are in byte p: of plane 1 of the group's own 16 bytes bits 2 f and 2 f + 1; of another
// plane, whose 16 bytes both groups share, bit 2 f for the first group and bit 2 f + 1 for the second. Of up to four chunks,
// a block, plane 1 has the bytes of all first groups, then those of all second ones:
//
//     plane 1:         first groups of chunk 0 | 1 | 2 | 3 | second groups of chunk 0 | 1 | 2 | 3 | of chunk 4 | ...
//     planes 2 and 3:  plane 2 of chunk 0 | 1 | 2 | ... | plane 3 of chunk 0 | 1 | 2 | ...
//
// Where the first planes lie elsewhere, parts that have only these are not there, and products add the others alone: their
// columns are of levels above `absent`, and a weight is
//
//     S (32 p2 + 16 p3 + 8 p4 + 4 p5), of these the planes from absent + 1 to the level
//
// So each 128 bits of a vector are of one group, and every byte holds bits of one group alone.
#pragma once
#include "layout/layout.h"

namespace sparsepack {

enum {
    PLANE_CHUNK = 2 * PLANE_GROUP,
    QUAD_PLANE_CHUNKS = QUAD_ROWS / PLANE_CHUNK,
    BLOCK_CHUNKS = 4,  // whose first planes lie together
    QUAD_GROUPS = QUAD_ROWS / PLANE_GROUP,
    PLANE_PARTS = 3,        // plane 1, planes 2 and 3, planes 4 and 5
    CHUNK_PART_BYTES = 32,  // of a chunk in each part
    PLANE_SLACK = 128       // bytes that may be read beyond the last chunk
};

// Of one column of a quad; of absent groups the least scale, and bits that are zero. Group g of the quad is at slot
// `plane_slot(g)`: of each block of chunks the first groups, then the second ones.
struct PlaneScales {
    uint8_t s[QUAD_GROUPS], b[QUAD_GROUPS];
};
static_assert(sizeof(PlaneScales) == 32, "PlaneScales");
static inline int32_t plane_slot(int32_t group) { return group / 8 * 8 + group % 2 * 4 + group % 8 / 2; }

// Where the parts of a span's first column begin, and how far the next column is.
struct PlanesSpan {
    const uint8_t *scales, *parts[PLANE_PARTS];
    int64_t stride;
    int32_t quads, chunks, absent;
    int64_t columns;
    const uint8_t* bounds;  // [quads][columns]
};

static inline int32_t plane_chunks(const Zigzag* m, int32_t span) {
    return (span_chunks(m, span) * CHUNK_ROWS + PLANE_CHUNK - 1) / PLANE_CHUNK;
}
static inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }
// The first part that has planes after so many.
static inline int32_t first_part(int32_t absent) { return (absent + 1) / 2; }
// Of one column of a span.
static inline int64_t planes_stride(int32_t quads, int32_t chunks, int32_t absent) {
    return whole_lines(quads * (int64_t)sizeof(PlaneScales)) +
           whole_lines((PLANE_PARTS - first_part(absent)) * chunks * (int64_t)CHUNK_PART_BYTES);
}
// All spans of a matrix. After them come the bounds, uint8 [quads][columns]: the largest s of a column's groups.
static inline int64_t planes_bytes(const Zigzag* m) {
    int32_t last = spans(m) - 1, chunks = plane_chunks(m, last);
    int32_t quads = (chunks + QUAD_PLANE_CHUNKS - 1) / QUAD_PLANE_CHUNKS;
    return m->columns * (last * planes_stride(m->span, m->span * QUAD_PLANE_CHUNKS, m->absent) +
                         planes_stride(quads, chunks, m->absent)) +
           PLANE_SLACK;
}
static inline int64_t plane_bounds_bytes(const Zigzag* m) { return quads(m) * m->columns; }
static inline PlanesSpan planes_span(const Zigzag* m, int32_t span) {
    PlanesSpan at;
    at.columns = m->columns;
    at.chunks = plane_chunks(m, span);
    at.quads = (at.chunks + QUAD_PLANE_CHUNKS - 1) / QUAD_PLANE_CHUNKS;
    at.absent = m->absent;
    at.stride = planes_stride(at.quads, at.chunks, m->absent);
    at.scales = m->data + span * m->columns * planes_stride(m->span, m->span * QUAD_PLANE_CHUNKS, m->absent);
    at.parts[0] = at.scales + whole_lines(at.quads * (int64_t)sizeof(PlaneScales));
    at.bounds = m->data + planes_bytes(m) + span * m->span * m->columns;
    for (int32_t i = 1; i < PLANE_PARTS; i++)
        at.parts[i] = at.parts[i - 1] + (i > first_part(m->absent) ? at.chunks * (int64_t)CHUNK_PART_BYTES : 0);
    return at;
}

// The byte of a column's plane 1, in its part of a span, at which a chunk's first or second group begins.
static inline int64_t first_plane_offset(int32_t chunks, int32_t chunk, int32_t second) {
    int32_t begin = chunk / BLOCK_CHUNKS * BLOCK_CHUNKS, left = chunks - begin;
    int32_t together = left < BLOCK_CHUNKS ? left : BLOCK_CHUNKS;
    return begin * (int64_t)CHUNK_PART_BYTES + 16 * (second * together + chunk - begin);
}
// The same of plane 2 to 5, for the groups of a chunk together.
static inline int64_t plane_offset(int32_t chunks, int32_t chunk, int32_t plane) {
    return 16 * (plane % 2 * (int64_t)chunks + chunk);
}

}  // namespace sparsepack
