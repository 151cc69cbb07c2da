// Into how many slices of its columns a far matrix' product is cut, each for a thread at a time.
#pragma once

#include "threads/products.h"

#include <algorithm>

namespace sparsepack {

// A thread has at least so many items of a product, and at most so many where the last ones come out even.
constexpr int32_t LEAST_ITEMS = 3, MOST_ITEMS = 9;
constexpr int32_t TILES_PER_SLICE = 2;  // a shorter slice would spend its time beginning

inline int32_t most_slices(const Zigzag& m, int32_t threads) noexcept {
    int32_t tiles = int32_t((m.columns + m.tile - 1) / m.tile);
    return std::max(1, std::min(tiles / TILES_PER_SLICE, (MOST_ITEMS * threads + spans(&m) - 1) / spans(&m)));
}

// The slices of a product's columns with which the fewest threads have nothing to do while the last items are computed.
inline int32_t product_slices(const Zigzag& m, int32_t threads) noexcept {
    int32_t most = most_slices(m, threads), chosen = most;
    double best = 0;
    for (int32_t slices = std::min(most, (LEAST_ITEMS * threads + spans(&m) - 1) / spans(&m)); slices <= most;
         ++slices) {
        int32_t items = slices * spans(&m), rounds = (items + threads - 1) / threads;
        double busy = double(items) / (rounds * threads);
        if (busy > best) best = busy, chosen = slices;
    }
    return chosen;
}

}  // namespace sparsepack
