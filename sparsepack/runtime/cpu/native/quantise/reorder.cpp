#include "quantise/reorder.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sparsepack {
namespace {

constexpr int64_t TILE = 64;  // rows and columns: two tiles fit into the L1 cache
constexpr int64_t LINE = 16;  // floats of a cache line

int64_t tiles(int64_t size) { return (size + TILE - 1) / TILE; }

// Calls tile(top, left) for each tile on the diagonal or above it; an item is a row of tiles, the longest first.
template <class Tile>
void upper_tiles(Pool& pool, int64_t size, Tile&& tile) {
    pool.run([&](int) {
        pool.share((int)tiles(size), [&](int row, int) {
            for (int64_t left = row * TILE; left < size; left += TILE) tile(row * TILE, left);
        });
    });
}

}  // namespace

void mirror(Pool& pool, float* matrix, int64_t size, float divisor) {
    upper_tiles(pool, size, [=](int64_t top, int64_t left) {
        int64_t bottom = std::min(top + TILE, size), right = std::min(left + TILE, size);
        for (int64_t i = top; i < bottom; i++)
            for (int64_t j = std::max(left, i); j < right; j++) matrix[i * size + j] /= divisor;
        for (int64_t j = left; j < right; j++)
            for (int64_t i = top; i < std::min(bottom, j); i++) matrix[j * size + i] = matrix[i * size + j];
    });
}

void permute(Pool& pool, const float* matrix, int64_t size, const int64_t* order, float* out, int64_t count) {
    pool.run([&](int) {
        pool.share((int)((count + LINE - 1) / LINE), [&](int item, int) {
            for (int64_t i = item * LINE; i < std::min((item + 1) * LINE, count); i++) {
                const float* row = matrix + order[i] * size;
                for (int64_t j = 0; j < count; j++) out[i * count + j] = row[order[j]];
            }
        });
    });
}

void flip_diagonal(Pool& pool, float* matrix, int64_t size) {
    // Tile (top, left) goes to rows size - right .. and columns size - bottom .., and the other way round: each pair once.
    upper_tiles(pool, size, [=](int64_t top, int64_t left) {
        int64_t bottom = std::min(top + TILE, size), right = std::min(left + TILE, size);
        for (int64_t i = top; i < bottom; i++)
            for (int64_t j = std::max(left, i); j < std::min(right, size - 1 - i); j++)
                std::swap(matrix[i * size + j], matrix[(size - 1 - j) * size + size - 1 - i]);
    });
}

void transpose_columns(Pool& pool, const float* matrix, const int64_t* order, float* out, int64_t rows,
                       int64_t columns) {
    // A row is put in order while it is in the L1 cache. So many rows, in the L2 cache, are then transposed; they lie a
    // cache line further apart than a power of two, lest they share a few sets of the cache.
    const int64_t stride = columns + LINE;
    std::vector<float> ordered((size_t)(pool.threads() * LINE * stride));
    pool.run([&](int thread) {
        float* strip = ordered.data() + thread * LINE * stride;
        pool.share((int)((rows + LINE - 1) / LINE), [&](int item, int) {
            int64_t first = item * LINE, count = std::min(LINE, rows - first);
            for (int64_t i = 0; i < count; i++) {
                const float* row = matrix + (first + i) * columns;
                for (int64_t j = 0; j < columns; j++) strip[i * stride + j] = row[order[j]];
            }
            for (int64_t j = 0; j < columns; j++)
                for (int64_t i = 0; i < count; i++) out[j * rows + first + i] = strip[i * stride + j];
        });
    });
}

}  // namespace sparsepack
