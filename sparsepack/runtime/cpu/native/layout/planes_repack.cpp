// Matrices of planes from the order of the file to the order in which they run (layout/planes.h).
#include "layout/planes.h"
#include "layout/repack.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t COLUMNS_AT_ONCE = 64;

// to [16] |= of a group's rows 16 f ... 16 f + 15, f from 0 to 3, the bits `mask` from bit `from` of their bytes on, moved to
// 2 f + `to_shift`. Rows 32 and up are in bytes 2 `upper` further on, `more` bits higher. Eight bytes at a time.
void gather_bits(const uint8_t* bits, int64_t upper, int32_t from, int32_t more, uint64_t mask, int32_t to_shift,
                 uint8_t* to) {
    mask *= 0x0101010101010101;
    for (int32_t half = 0; half < 16; half += 8) {
        uint64_t gathered;
        std::memcpy(&gathered, to + half, 8);
        for (int32_t f = 0; f < 4; f++) {
            uint64_t word;
            std::memcpy(&word, bits + f % 2 * 16 + f / 2 * 2 * upper + half, 8);
            gathered |= (word >> (from + f / 2 * more) & mask) << (2 * f + to_shift);
        }
        std::memcpy(to + half, &gathered, 8);
    }
}

// Group `from` of a superblock of the file becomes group `group` of a column of a span.
void pack_group(const Q6PBlock& block, int32_t from, const PlanesSpan& to, int64_t column, int32_t group) {
    auto& scales = ((PlaneScales*)(to.scales + column * to.stride))[group / QUAD_GROUPS];
    int32_t slot = plane_slot(group % QUAD_GROUPS);
    scales.s[slot] = block.s[from];
    uint8_t& bound = const_cast<uint8_t*>(to.bounds)[group / QUAD_GROUPS * to.columns + column];
    bound = std::max(bound, block.s[from]);
    scales.b[slot] = block.b[from];
    uint8_t* parts[PLANE_PARTS];
    for (int32_t i = 0; i < PLANE_PARTS; i++) parts[i] = const_cast<uint8_t*>(to.parts[i]) + column * to.stride;
    int32_t chunk = group / 2, second = group % 2;
    if (!to.absent)
        gather_bits(block.first, 16, 2 * from, 0, 3, 0, parts[0] + first_plane_offset(to.chunks, chunk, second));
    for (int32_t plane = std::max(2, to.absent + 1); plane <= PLANES; plane++) {
        uint8_t* other = parts[plane / 2] + plane_offset(to.chunks, chunk, plane);
        gather_bits(block.others[plane - 2], 0, 2 * from, 1, 1, second, other);
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
