// Blocks of a cluster, side by side in x: they run at the same time and reach each other's shared memory. CLUSTER 1, as
// on GPUs before Hopper: a block by itself.
//
// Macro: CLUSTER

#pragma once

#include "common/common.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif

// Until all threads of the cluster are here; what they wrote is visible then, in global memory, too.
__device__ __forceinline__ void sync_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Every block of the cluster has begun when `wait_for_cluster` returns, and calls `begin_in_cluster` first: nobody may
// touch another's shared memory before.
__device__ __forceinline__ void begin_in_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A block's number in its cluster.
__device__ __forceinline__ u32 block_in_cluster() {
#if CLUSTER > 1
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

#if CLUSTER > 1
// The address at which another block of the cluster has what lies at p in this block's shared memory.
__device__ __forceinline__ u32 address_of_block(const void* p, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_there(u32 address, int x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_there(u32 address, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}
__device__ __forceinline__ u16 load_there(u32 address) {
    u16 x;
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}
#endif
