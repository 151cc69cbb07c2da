// The mailbox between the GPU and the processor, whose memory runtime/hybrid/mailbox.py draws. It lies in the host's
// memory. Numbers are those of steps; whoever announces writes the number last, with release, and who waits for it
// acquires it.

#pragma once

#include "common/common.cuh"

static constexpr int LAST_NUMBER = 0x7fffffff;
static constexpr int DEVICE_WAITED = 2;  // a reason to give up: Abort of mailbox.py

__device__ __forceinline__ int next_number(int number) { return number == LAST_NUMBER ? 1 : number + 1; }

// What this thread wrote, or has seen behind a barrier of its block, is seen by the processor before what comes later.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void store_release_system(int* p, int x) {
    asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ int load_acquire_system(const int* p) {
    int x;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ int load_system(const int* p) {
    int x;
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ float load_system(const float* p) { return __int_as_float(load_system((const int*)p)); }
__device__ __forceinline__ void store_system(int* p, int x) {
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
