#include "layout/repack.h"

#include "blocks/q6_k.h"
#include "blocks/q8_0.h"
#include "layout/rows.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t COLUMNS_AT_ONCE = 64;      // of one span: both sides stay in the second-level cache
constexpr int64_t BYTES_AT_ONCE = 32 << 20;  // of rows: what of a file is held beside its copy

// The scales of a block of Q4_K, four sub-blocks to a word.
struct Scales {
    uint32_t first, second, mixed;
};

// low: eight bytes at the band's slots; high: eight bytes to be added to the header's.
void pack_scales(const uint8_t* packed, uint8_t* low, uint8_t* high, int32_t high_shift) {
    Scales s;
    std::memcpy(&s, packed, sizeof s);
    uint32_t words[4] = {
        (s.first & 0x0f0f0f0f) | (s.second & 0x0f0f0f0f) << 4,
        s.mixed,
        (s.first & 0x30303030) | (s.second >> 4 & 0x03030303),
        (s.first >> 2 & 0x30303030) | (s.second >> 6 & 0x03030303),
    };
    uint32_t held[2];
    std::memcpy(low, words, 8);
    std::memcpy(held, high, 8);
    held[0] |= words[2] << high_shift;
    held[1] |= words[3] << high_shift;
    std::memcpy(high, held, 8);
}

void unpack_scales(const uint8_t* low, const uint8_t* high, int32_t high_shift, uint8_t* packed) {
    uint32_t l[2], h[2];
    std::memcpy(l, low, 8);
    std::memcpy(h, high, 8);
    h[0] >>= high_shift;
    h[1] >>= high_shift;
    Scales s;
    s.first = (l[0] & 0x0f0f0f0f) | (h[0] & 0x30303030) | (h[1] & 0x30303030) << 2;
    s.second = (l[0] >> 4 & 0x0f0f0f0f) | (h[0] & 0x03030303) << 4 | (h[1] & 0x03030303) << 6;
    s.mixed = l[1];
    std::memcpy(packed, &s, sizeof s);
}

// 32 bytes of the file, two sub-blocks of 32 rows, become two chunks of 16 bytes.
void pack_nibbles(const uint8_t* __restrict file, uint8_t* __restrict chunks) {
    for (int32_t w = 0; w < 8; w++) {
        uint8_t a = file[w], b = file[8 + w], c = file[16 + w], d = file[24 + w];
        chunks[2 * w] = (uint8_t)((a & 15) | b << 4);
        chunks[2 * w + 1] = (uint8_t)((c & 15) | d << 4);
        chunks[16 + 2 * w] = (uint8_t)(a >> 4 | (b & 0xf0));
        chunks[16 + 2 * w + 1] = (uint8_t)(c >> 4 | (d & 0xf0));
    }
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

// The largest |d| of a column's bands: as integers, halves without their sign are in order.
uint16_t bound(const QuadHeader& header, int32_t bands) {
    uint16_t largest = 0;
    for (int32_t band = 0; band < bands; band++) largest = std::max(largest, (uint16_t)(header.d[band] & 0x7fff));
    return largest;
}

// Calls work(quad's bytes in a column, its first block in the file, its bands, its place among the bounds) for all
// quads and columns of a span.
template <class Work>
void for_each_quad(const Zigzag& m, int32_t span, Pool& pool, Work&& work) {
    int64_t data = span_data(&m, span) - m.data, stride = span_stride(&m, span);
    int64_t superblock = zigzag_block(m.block).superblock, band_bytes = m.columns * superblock;
    int32_t first = span * m.span, last = std::min(first + m.span, quads(&m));
    auto item = [&](int number, int) {
        int64_t from = number * COLUMNS_AT_ONCE, to = std::min(from + COLUMNS_AT_ONCE, m.columns);
        for (int32_t quad = first; quad < last; quad++) {
            for (int64_t column = from; column < to; column++)
                work(data + column * stride + (quad - first) * quad_bytes(&m),
                     quad * QUAD_BANDS * band_bytes + column * superblock, quad_bands(&m, quad),
                     quad * m.columns + column);
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

// Puts one column of a tail behind the whole bands of its quad. Its pieces have one d and one dmin, whichever blocks they
// lie in.
void pack_tail(const Q4KBlock* tail, int32_t pieces, int64_t column, int32_t band, Quad* quad) {
    QuadHeader& header = quad->header;
    for (int32_t i = 0; i < pieces; i++) {
        int64_t piece = column * pieces + i, quarter = piece % 4;
        const Q4KBlock& from = tail[piece / 4];
        header.d[band] = from.header.d;
        header.dmin[band] = from.header.dmin;
        pack_nibbles(from.nibbles[quarter], quad->bands[band].chunks[PIECE_SUBS * i]);
        for (int32_t sub = 0; sub < PIECE_SUBS; sub++) {
            int32_t at = (int32_t)quarter * PIECE_SUBS + sub, slot = first_slot(band) + PIECE_SUBS * i + sub;
            const uint8_t *a = from.header.scales, *b = a + 4, *c = a + 8;
            int32_t scale = at < 4 ? a[at] & 63 : (c[at - 4] & 15) | a[at - 4] >> 6 << 4;
            int32_t min = at < 4 ? b[at] & 63 : c[at - 4] >> 4 | b[at - 4] >> 6 << 4;
            header.low[slot] = (uint8_t)((scale & 15) | (min & 15) << 4);
            header.high[slot % 16] |= (uint8_t)((scale >> 4 << 4 | min >> 4) << slot / 16 * 2);
        }
    }
}

// One column of a quad of any block of blocks/*.h, some of its chunks out of the tail. place: quad * columns + column.
template <class Block>
void pack_chunks(const Zigzag& m, const uint8_t* blocks, const uint8_t* tail, int64_t place, uint8_t* to) {
    static_assert(sizeof(typename Block::Header) % 2 == 0, "chunks follow headers without a gap");
    auto* header = (typename Block::Header*)to;
    auto* chunks = (typename Block::Chunk*)(header + 1);
    int32_t quad = (int32_t)(place / m.columns);
    int64_t column = place % m.columns;
    std::memset((void*)header, 0, sizeof *header);
    for (int32_t i = 0; i < quad_chunks(&m, quad); i++) {
        int32_t band = quad * QUAD_BANDS + i / BAND_SUBS, sub = i % BAND_SUBS;
        const uint8_t* from = blocks + (band * m.columns + column) * Block::SUPERBLOCK_BYTES;
        if (m.pieces && band == m.bands - 1) {
            int64_t piece = column * m.pieces + sub / PIECE_SUBS;
            from = tail + piece / 4 * Block::SUPERBLOCK_BYTES;
            sub = (int32_t)(piece % 4) * PIECE_SUBS + sub % PIECE_SUBS;
        }
        Block::pack(from, sub, header, i, chunks + i);
    }
}

// A matrix of that shape at `data`, which has room for it and its bounds.
Zigzag repack_at(Zigzag view, const uint8_t* blocks, const uint8_t* tail, uint8_t* data, Pool& pool) {
    auto* bounds = reinterpret_cast<uint16_t*>(data + zigzag_bytes(&view));
    view.data = data;
    view.bounds = bounds;
    int64_t superblock = zigzag_block(view.block).superblock, band_bytes = view.columns * superblock;
    for (int32_t span = 0; span < spans(&view); span++) {
        for_each_quad(view, span, pool, [=](int64_t to, int64_t from, int32_t bands, int64_t place) {
            if (view.block == Q8_0) return pack_chunks<ZigzagQ8_0>(view, blocks, tail, place, data + to);
            if (view.block == Q6_K) return pack_chunks<ZigzagQ6_K>(view, blocks, tail, place, data + to);
            auto* quad = (Quad*)(data + to);
            bool ends = view.pieces && place >= (quads(&view) - 1) * view.columns;
            pack_quad(blocks + from, band_bytes, bands - ends, quad);
            if (ends) pack_tail((const Q4KBlock*)tail, view.pieces, place % view.columns, bands - 1, quad);
            bounds[place] = bound(quad->header, bands);
        });
        int64_t whole = span_bands(&view, span) - (view.pieces && span == spans(&view) - 1);
        give_back(blocks + (int64_t)span * view.span * QUAD_BANDS * band_bytes, whole * band_bytes);
    }
    if (view.pieces) give_back(tail, tail_blocks(view.rows, view.columns) * superblock);
    return view;
}

}  // namespace

void pack_quad(const uint8_t* blocks, int64_t band_bytes, int32_t bands, Quad* quad) {
    QuadHeader& header = quad->header;
    std::memset(&header, 0, sizeof header);
    for (int32_t band = 0; band < bands; band++, blocks += band_bytes) {
        auto* block = (const Q4KBlock*)blocks;
        header.d[band] = block->header.d;
        header.dmin[band] = block->header.dmin;
        int32_t slot = first_slot(band);
        pack_scales(block->header.scales, header.low + slot, header.high + slot % 16, slot / 16 * 2);
        for (int32_t i = 0; i < 4; i++) pack_nibbles(block->nibbles[i], quad->bands[band].chunks[2 * i]);
    }
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
                           const uint8_t* tail, int32_t block) {
    ExpertsMatrix one = repack_experts(blocks, 1, rows, columns, span, tile, pool, tail, block);
    return {one.views[0], std::move(one.memory), {}};
}

ExpertsMatrix repack_experts(const uint8_t* blocks, int64_t experts, int64_t rows, int64_t columns, int32_t span,
                             int32_t tile, Pool& pool, const uint8_t* tail, int32_t block) {
    int32_t bands = (int32_t)((rows + BAND_ROWS - 1) / BAND_ROWS), pieces = tail ? tail_pieces(rows) : 0;
    Zigzag shape = {nullptr, rows, columns, bands, span, tile, nullptr, pieces, nullptr, block};
    shape.span = std::min(span, quads(&shape));
    int64_t bytes = zigzag_bytes(&shape) + bounds_bytes(&shape), stride = (bytes + 63) & ~(int64_t)63;
    Memory memory((experts - 1) * stride + bytes);
    std::vector<Zigzag> views;
    int64_t superblock = zigzag_block(block).superblock, of_each = (bands - (pieces > 0)) * columns * superblock;
    for (int64_t expert = 0; expert < experts; expert++) {
        auto* of_tail = tail ? tail + expert * tail_blocks(rows, columns) * superblock : nullptr;
        views.push_back(repack_at(shape, blocks + expert * of_each, of_tail, memory.data() + expert * stride, pool));
    }
    return {std::move(views), std::move(memory)};
}

void unpack_zigzag(const Zigzag& matrix, uint8_t* blocks, Pool& pool) {
    int64_t band_bytes = matrix.columns * (int64_t)sizeof(Q4KBlock);
    for (int32_t span = 0; span < spans(&matrix); span++) {
        for_each_quad(matrix, span, pool, [&](int64_t from, int64_t to, int32_t bands, int64_t) {
            unpack_quad((const Quad*)(matrix.data + from), bands, blocks + to, band_bytes);
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

int64_t block_columns(int32_t type) { return type < Q4_K ? 1 : type == Q8_0 ? Q8_0_COLUMNS : BLOCK_COLUMNS; }

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
