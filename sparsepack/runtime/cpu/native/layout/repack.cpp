#include "layout/repack.h"

#include "layout/planes.h"
#include "layout/rows.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t COLUMNS_AT_ONCE = 64;      // of one span: both sides stay in the second-level cache
constexpr int64_t BYTES_AT_ONCE = 32 << 20;  // of rows: what of a file is held beside its copy

void unpack_scales(const uint8_t* low, const uint8_t* high, int32_t high_shift, uint8_t* packed) {
    uint32_t l[2], h[2];
    std::memcpy(l, low, 8);
    std::memcpy(h, high, 8);
    h[0] >>= high_shift;
    h[1] >>= high_shift;
    uint32_t words[3] = {
        (l[0] & 0x0f0f0f0f) | (h[0] & 0x30303030) | (h[1] & 0x30303030) << 2,
        (l[0] >> 4 & 0x0f0f0f0f) | (h[0] & 0x03030303) << 4 | (h[1] & 0x03030303) << 6,
        l[1],
    };
    std::memcpy(packed, words, sizeof words);
}

void unpack_nibbles(const uint8_t* __restrict chunks, uint8_t* __restrict file) {
    for (int32_t w = 0; w < 8; w++) {
        uint8_t e = chunks[2 * w], o = chunks[2 * w + 1], e2 = chunks[16 + 2 * w], o2 = chunks[16 + 2 * w + 1];
        file[w] = (uint8_t)((e & 15) | e2 << 4);
        file[8 + w] = (uint8_t)(e >> 4 | (e2 & 0xf0));
        file[16 + w] = (uint8_t)((o & 15) | o2 << 4);
        file[24 + w] = (uint8_t)(o >> 4 | (o2 & 0xf0));
    }
}

// Calls work(where its bytes lie, quad, column) for all quads and columns of a span.
template <class Work>
void for_each_quad(const Zigzag& m, int32_t span, Pool& pool, Work&& work) {
    int64_t data = span_data(&m, span) - m.data, stride = span_stride(&m, span);
    int32_t first = span * m.span, last = std::min(first + m.span, quads(&m));
    auto item = [&](int number, int) {
        int64_t from = number * COLUMNS_AT_ONCE, to = std::min(from + COLUMNS_AT_ONCE, m.columns);
        for (int32_t quad = first; quad < last; quad++) {
            for (int64_t column = from; column < to; column++)
                work(data + column * stride + (quad - first) * quad_bytes(&m), quad, column);
        }
    };
    pool.run([&](int) { pool.share((int)((m.columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE), item); });
}

// Calls work(first row, row after the last) for the tiles of ROW_TILE rows from `begin` (a multiple of it) to `end`.
template <class Work>
void for_each_tile(int64_t begin, int64_t end, Pool& pool, Work&& work) {
    auto item = [&](int number, int) {
        int64_t first = begin + (int64_t)number * ROW_TILE;
        work(first, std::min(first + ROW_TILE, end));
    };
    pool.run([&](int) { pool.share((int)((end - begin + ROW_TILE - 1) / ROW_TILE), item); });
}

// What q4_k.h has functions of its own for.
template <class Block>
void pack_band(Block, const uint8_t* superblock, typename Block::Header* header, int32_t band,
               typename Block::Chunk* chunks) {
    for (int32_t i = 0; i < BAND_SUBS; i++) Block::pack(superblock, i, header, band * BAND_SUBS + i, chunks + i);
}

template <class Header>
uint16_t largest_d(const Header&) {
    return 0;
}

// One column of a quad, with its bound; some of its chunks may be out of the tail.
template <class Block>
void pack_column(const Zigzag& m, const uint8_t* blocks, const uint8_t* tail, int32_t quad, int64_t column, uint8_t* to,
                 uint16_t* bounds) {
    auto* header = (typename Block::Header*)to;
    auto* chunks = (typename Block::Chunk*)(header + 1);
    std::memset((void*)header, 0, sizeof *header);
    int32_t first = quad * QUAD_BANDS, bands = quad_bands(&m, quad) - (m.pieces && quad == quads(&m) - 1);
    for (int32_t band = 0; band < bands; band++, chunks += BAND_SUBS)
        pack_band(Block(), blocks + ((first + band) * m.columns + column) * Block::SUPERBLOCK_BYTES, header, band,
                  chunks);
    for (int32_t i = bands * BAND_SUBS; i < quad_chunks(&m, quad); i++, chunks++) {
        int64_t sub = column * m.pieces * PIECE_SUBS + i % BAND_SUBS;  // of all of the tail
        Block::pack(tail + sub / BAND_SUBS * Block::SUPERBLOCK_BYTES, (int32_t)(sub % BAND_SUBS), header, i, chunks);
    }
    bounds[quad * m.columns + column] = largest_d(*header);
}

// A matrix of that shape at `data`, which has room for it and its bounds.
Zigzag repack_at(Zigzag view, const uint8_t* blocks, const uint8_t* tail, uint8_t* data, Pool& pool) {
    auto* bounds = reinterpret_cast<uint16_t*>(data + zigzag_bytes(&view));
    view.data = data;
    view.bounds = bounds;
    int64_t superblock = view.bytes.superblock, band_bytes = view.columns * superblock;
    for (int32_t span = 0; span < spans(&view); span++) {
        ZigzagBlocks::find(view.block, [&](auto block) {
            for_each_quad(view, span, pool, [=](int64_t to, int32_t quad, int64_t column) {
                pack_column<decltype(block)>(view, blocks, tail, quad, column, data + to, bounds);
            });
        });
        int64_t whole = span_bands(&view, span) - (view.pieces && span == spans(&view) - 1);
        give_back(blocks + (int64_t)span * view.span * QUAD_BANDS * band_bytes, whole * band_bytes);
    }
    if (view.pieces) give_back(tail, tail_blocks(view.rows, view.columns) * superblock);
    return view;
}

}  // namespace

void pack_quad(const uint8_t* blocks, int64_t band_bytes, int32_t bands, Quad* quad) {
    std::memset(&quad->header, 0, sizeof quad->header);
    auto* chunks = (ZigzagQ4_K::Chunk*)quad->bands;
    for (int32_t band = 0; band < bands; band++)
        pack_band(ZigzagQ4_K(), blocks + band * band_bytes, &quad->header, band, chunks + band * BAND_SUBS);
}

void unpack_quad(const Quad* quad, int32_t bands, uint8_t* blocks, int64_t band_bytes) {
    const QuadHeader& header = quad->header;
    for (int32_t band = 0; band < bands; band++, blocks += band_bytes) {
        auto* block = (Q4KBlock*)blocks;
        block->header.d = header.d[band];
        block->header.dmin = header.dmin[band];
        int32_t slot = first_slot(band);
        unpack_scales(header.low + slot, header.high + slot % 16, slot / 16 * 2, block->header.scales);
        for (int32_t i = 0; i < 4; i++) unpack_nibbles(quad->bands[band].chunks[2 * i], block->nibbles[i]);
    }
}

ZigzagMatrix repack_zigzag(const uint8_t* blocks, int64_t rows, int64_t columns, int32_t span, int32_t tile, Pool& pool,
                           const uint8_t* tail, int32_t block, int32_t absent) {
    ExpertsMatrix one = repack_experts(blocks, 1, rows, columns, span, tile, pool, tail, block, absent);
    return {one.views[0], std::move(one.memory), {}};
}

ExpertsMatrix repack_experts(const uint8_t* blocks, int64_t experts, int64_t rows, int64_t columns, int32_t span,
                             int32_t tile, Pool& pool, const uint8_t* tail, int32_t block, int32_t absent) {
    int32_t bands = (int32_t)((rows + BAND_ROWS - 1) / BAND_ROWS), pieces = tail ? tail_pieces(rows) : 0;
    Zigzag shape = {nullptr, rows, columns, bands, span, tile, nullptr, pieces, nullptr, block, zigzag_block(block),
                    absent};
    shape.span = std::min(span, quads(&shape));
    bool planes = block == Q6_P;
    int64_t bytes =
        planes ? planes_bytes(&shape) + plane_bounds_bytes(&shape) : zigzag_bytes(&shape) + bounds_bytes(&shape);
    int64_t stride = (bytes + 63) & ~(int64_t)63;
    Memory memory((experts - 1) * stride + bytes);
    std::vector<Zigzag> views;
    int64_t superblock = shape.bytes.superblock, of_each = (bands - (pieces > 0)) * columns * superblock;
    for (int64_t expert = 0; expert < experts; expert++) {
        auto* of_tail = tail ? tail + expert * tail_blocks(rows, columns) * superblock : nullptr;
        auto repack = planes ? repack_planes : repack_at;
        views.push_back(repack(shape, blocks + expert * of_each, of_tail, memory.data() + expert * stride, pool));
    }
    return {std::move(views), std::move(memory)};
}

void unpack_zigzag(const Zigzag& matrix, uint8_t* blocks, Pool& pool) {
    int64_t band_bytes = matrix.columns * (int64_t)sizeof(Q4KBlock);
    for (int32_t span = 0; span < spans(&matrix); span++) {
        for_each_quad(matrix, span, pool, [&](int64_t from, int32_t quad, int64_t column) {
            unpack_quad((const Quad*)(matrix.data + from), quad_bands(&matrix, quad),
                        blocks + quad * QUAD_BANDS * band_bytes + column * (int64_t)sizeof(Q4KBlock), band_bytes);
        });
    }
}

int64_t row_bytes(int32_t type, int64_t columns) {
    switch (type) {
        case F32: return 4 * columns;
        case F16:
        case BF16: return 2 * columns;
        case Q4_K: return columns / BLOCK_COLUMNS * (int64_t)sizeof(Q4KBlock);
        case Q8_0: return columns / Q8_0_COLUMNS * (int64_t)sizeof(Q80Block);
        default: return columns / BLOCK_COLUMNS * (int64_t)sizeof(Q6KBlock);
    }
}

int64_t block_columns(int32_t type) {
    switch (type) {
        case F32:
        case F16:
        case BF16: return 1;
        case Q4_K:
        case Q6_K: return BLOCK_COLUMNS;
        default: return type == Q8_0 ? Q8_0_COLUMNS : 0;
    }
}

RowsMatrix repack_rows(const uint8_t* data, int64_t rows, int64_t columns, int32_t type, Pool& pool) {
    int64_t bytes = row_bytes(type, columns);
    Memory memory(type == Q6_K ? q6_k_tiled_bytes(rows, columns) : rows * bytes);
    uint8_t* to = memory.data();
    int64_t at_once = std::max<int64_t>(1, BYTES_AT_ONCE / bytes / ROW_TILE) * ROW_TILE;
    for (int64_t begin = 0; begin < rows; begin += at_once) {
        int64_t end = std::min(begin + at_once, rows);
        for_each_tile(begin, end, pool, [=](int64_t first, int64_t last) {
            if (type == Q6_K)
                q6_k_tile_rows(data, rows, columns, first, last, to);
            else
                std::memcpy(to + first * bytes, data + first * bytes, (last - first) * bytes);
        });
        give_back(data + begin * bytes, (end - begin) * bytes);
    }
    return {{to, rows, columns, type}, std::move(memory)};
}

void unpack_rows(const Rows& m, uint8_t* data, Pool& pool) {
    int64_t bytes = row_bytes(m.type, m.columns);
    for_each_tile(0, m.rows, pool, [=](int64_t first, int64_t last) {
        if (m.type == Q6_K)
            q6_k_untile_rows(m.data, m.rows, m.columns, first, last, data);
        else
            std::memcpy(data + first * bytes, m.data + first * bytes, (last - first) * bytes);
    });
}

Rows rows_in_place(const uint8_t* data, int64_t rows, int64_t columns, int32_t type) {
    return {data, rows, columns, type == Q6_K ? Q6_K_ROWS : type};
}

}  // namespace sparsepack
