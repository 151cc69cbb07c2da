#include "threads/reads.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace sparsepack {
namespace {

// Whole cache lines, from the first to before the last.
struct Piece {
    const uint8_t *begin, *end;
};

// Appends the parts of a work item's columns that its product reads, in the order in which it does, up to so many.
void append_pieces(const GemvWork& work, size_t most, std::vector<Piece>& pieces) {
    const Zigzag& m = *work.matrix;
    most += pieces.size();
    auto add = [&](const uint8_t* from, int64_t bytes) {
        const uint8_t *begin = from - uintptr_t(from) % 64, *end = begin + (from + bytes - begin + 63) / 64 * 64;
        if (!pieces.empty() && begin <= pieces.back().end && begin >= pieces.back().begin)
            pieces.back().end = end;  // the same column's, or the next one's
        else
            pieces.push_back({begin, end});
    };
    if (m.block != Q6_P) {
        const int64_t stride = span_stride(&m, work.span);
        for (int32_t i = 0; i < work.count && pieces.size() < most; i++)
            add(span_data(&m, work.span) + work.indices[i] * stride, stride);
        return;
    }
    const PlanesSpan span = planes_span(&m, work.span);
    const int32_t end_quad = std::min(span.quads, work.end_quad), begin = work.first_quad * QUAD_PLANE_CHUNKS;
    const int32_t chunks = std::min(span.chunks, end_quad * QUAD_PLANE_CHUNKS) - begin;
    LevelRanges left = work.levels;
    while (pieces.size() < most) {
        int32_t level = 0, lowest = INT32_MAX;
        for (int32_t i = 0; i < PLANES; i++)
            if (left.first[i] < left.last[i] && work.indices[left.first[i]] < lowest)
                lowest = work.indices[left.first[i]], level = i + 1;
        if (!level) return;
        for (int32_t n = 0; n < m.tile && left.first[level - 1] < left.last[level - 1]; n++) {
            int64_t column = work.indices[left.first[level - 1]++];
            add(span.scales + column * span.stride + work.first_quad * sizeof(PlaneScales),
                (end_quad - work.first_quad) * int64_t(sizeof(PlaneScales)));
            for (int32_t plane = span.absent + 1; plane <= level; plane++)
                add(span.parts[plane / 2] + column * span.stride +
                        (plane > 1 ? plane_offset(span.chunks, begin, plane) : begin * CHUNK_PART_BYTES),
                    chunks * int64_t(CHUNK_PART_BYTES) / (plane > 1 ? 2 : 1));
        }
    }
}

template <int AHEAD>
void read_ahead(const GemvWork* work, const GemvWork* next) {
    static thread_local std::vector<Piece> pieces;  // its memory stays
    pieces.clear();
    append_pieces(*work, SIZE_MAX / 2, pieces);
    const size_t count = pieces.size();
    if (next) append_pieces(*next, AHEAD, pieces);
    auto fetch = [&](size_t number) {
        for (const uint8_t* at = pieces[number].begin; at < pieces[number].end; at += 64)
            __builtin_prefetch(at, 0, AHEAD > 8 ? 2 : 3);  // many lines into the second-level cache
    };
    for (size_t i = 0; AHEAD && work->cold && i < std::min<size_t>(AHEAD, count); i++) fetch(i);
    uint64_t sums[8] = {};
    for (size_t i = 0; i < count; i++) {
        if (AHEAD && i + AHEAD < pieces.size()) fetch(i + AHEAD);
        auto* end = reinterpret_cast<const uint64_t*>(pieces[i].end);
        for (auto* words = reinterpret_cast<const uint64_t*>(pieces[i].begin); words < end; words += 8)
            for (int lane = 0; lane < 8; lane++) sums[lane] += words[lane];
    }
    for (int lane = 0; lane < 8; lane++) work->y[lane] = float(sums[lane]);
}

}  // namespace

ReadPieces read_pieces(int ahead) {
    switch (ahead) {
        case 0: return read_ahead<0>;
        case 2: return read_ahead<2>;
        case 8: return read_ahead<8>;
        case 32: return read_ahead<32>;
        default: throw std::invalid_argument("ahead: expected 0, 2, 8 or 32");
    }
}

}  // namespace sparsepack
