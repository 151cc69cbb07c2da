// Matrices of planes from the order of the file to the order in which they run (layout/planes.h).
#include "layout/planes.h"
#include "layout/repack.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t COLUMNS_AT_ONCE = 64;

// Group `from` of a superblock of the file becomes group `group` of a column of a span.
void pack_group(const Q6PBlock& block, int32_t from, const PlanesSpan& to, int64_t column, int32_t group) {
    auto& scales = ((PlaneScales*)(to.scales + column * to.scales_stride))[group / QUAD_GROUPS];
    int32_t slot = plane_slot(group % QUAD_GROUPS);
    scales.s[slot] = block.s[from];
    uint8_t& bound = const_cast<uint8_t*>(to.bounds)[group / QUAD_GROUPS * to.columns + column];
    bound = std::max(bound, block.s[from]);
    scales.b[slot] = block.b[from];
    uint8_t* parts[PLANE_PARTS];
    for (int32_t i = 0; i < PLANE_PARTS; i++) parts[i] = const_cast<uint8_t*>(to.parts[i]) + column * to.stride;
    int32_t chunk = group / 2, second = group % 2;
    uint8_t* first = parts[0] + first_plane_offset(to.chunks, chunk, second);
    for (int32_t i = 0; i < PLANE_GROUP; i++)
        first[i % 16] |= (uint8_t)((block.first[i] >> 2 * from & 3) << i / 16 * 2);
    for (int32_t plane = 2; plane <= PLANES; plane++) {
        uint8_t* other = parts[plane / 2] + plane_offset(to.chunks, chunk, plane);
        const uint8_t* bits = block.others[plane - 2];
        for (int32_t i = 0; i < PLANE_GROUP; i++)
            other[i % 16] |= (uint8_t)((bits[i % 32] >> (2 * from + i / 32) & 1) << (i / 16 * 2 + second));
    }
}

}  // namespace

Zigzag repack_planes(Zigzag view, const uint8_t* blocks, const uint8_t* tail, uint8_t* data, Pool& pool) {
    view.data = data;
    auto of_file = (const Q6PBlock*)blocks, of_tail = (const Q6PBlock*)tail;
    for (int32_t span = 0; span < spans(&view); span++) {
        PlanesSpan to = planes_span(&view, span);
        int32_t first = span * view.span * QUAD_BANDS;
        int32_t whole = span_bands(&view, span) - (view.pieces && span == spans(&view) - 1);
        auto item = [&](int number, int) {
            int64_t from = number * COLUMNS_AT_ONCE, end = std::min(from + COLUMNS_AT_ONCE, view.columns);
            for (int64_t column = from; column < end; column++) {
                for (int32_t group = 0; group < whole * PLANE_GROUPS; group++) {
                    const Q6PBlock& block = of_file[(first + group / PLANE_GROUPS) * view.columns + column];
                    pack_group(block, group % PLANE_GROUPS, to, column, group);
                }
                for (int32_t piece = 0; piece < view.pieces && whole < span_bands(&view, span); piece++) {
                    int64_t number = column * view.pieces + piece;
                    const Q6PBlock& block = of_tail[number / PLANE_GROUPS];
                    pack_group(block, int32_t(number % PLANE_GROUPS), to, column, whole * PLANE_GROUPS + piece);
                }
            }
        };
        pool.run([&](int) { pool.share((int)((view.columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE), item); });
        int64_t band_bytes = view.columns * (int64_t)sizeof(Q6PBlock);
        give_back(blocks + first * band_bytes, whole * band_bytes);
    }
    if (view.pieces) give_back(tail, tail_blocks(view.rows, view.columns) * (int64_t)sizeof(Q6PBlock));
    return view;
}

}  // namespace sparsepack
