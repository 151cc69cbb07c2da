// Words that two sides share, and waiting for what the other side writes there.
#pragma once

#include "system/system.h"

#include <chrono>
#include <thread>

namespace sparsepack {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::microseconds NAP{20};

inline int32_t acquire(const void* word) noexcept {
    return __atomic_load_n(static_cast<const int32_t*>(word), __ATOMIC_ACQUIRE);
}
inline void release(void* word, int32_t value) noexcept {
    __atomic_store_n(static_cast<int32_t*>(word), value, __ATOMIC_RELEASE);
}

// Waits until `met` says so, or until `vain` does, which is asked now and then and given the seconds so far.
template <class Met, class Vain>
bool await(Seconds spin, Met&& met, Vain&& vain) noexcept {
    constexpr int LOOKS = 32;
    auto start = Clock::now();
    for (;;) {
        for (int look = 0; look < LOOKS; ++look) {
            if (met()) return true;
            pause();
        }
        Seconds so_far = Clock::now() - start;
        if (vain(so_far.count())) return met();
        if (so_far > spin) std::this_thread::sleep_for(NAP);
    }
}

}  // namespace sparsepack
