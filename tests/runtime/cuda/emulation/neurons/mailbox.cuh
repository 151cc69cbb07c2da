// In the place of kernels/neurons/mailbox.cuh: both sides are threads of one processor.

#pragma once

#include <chrono>

#include "common/common.cuh"

static constexpr int LAST_NUMBER = 0x7fffffff;
static constexpr int DEVICE_WAITED = 2;

inline int next_number(int number) { return number == LAST_NUMBER ? 1 : number + 1; }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void store_release_system(int* p, int x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline int load_acquire_system(const int* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
template <typename T>
inline T load_system(const T* p) {
    return *p;
}
inline void store_system(int* p, int x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
inline u64 nanoseconds() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
