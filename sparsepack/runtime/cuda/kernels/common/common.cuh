// What every kernel shares. No header of the toolkit is included: NVRTC alone compiles these files.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static constexpr u32 ALL_LANES = 0xffffffff;

// Order between kernels. Each is launched with programmatic stream serialisation (programmatic dependent launch, PDL):
// it may begin while the one before it still runs, and must call wait_for_previous() before it touches what another
// kernel writes or reads, but for what common/flag_in_data.cuh allows. Because every kernel waits for its predecessor
// before it ends, all earlier ones have ended then.

// Let the next kernel begin once all blocks have called this or ended: cudaTriggerProgrammaticLaunchCompletion,
// CUTLASS's launch_dependent_grids.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before has ended, and what it wrote is visible: cudaGridDependencySynchronize, CUTLASS's
// wait_on_dependent_grids.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What other kernels wrote is read past the L1 cache: a line of it may be older than the wait.
template <typename T>
__device__ __forceinline__ T load_l2(const T* p) {
    return __ldcg(p);
}

// For constants that the kernel will need once it may begin.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Two float16 in a word, the first in the low half.
__device__ __forceinline__ u32 pack_half2(float first, float second) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

// The products of two float16 in each argument.
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// a b + c of two float16 in each argument, rounded once.
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The sums of two float16 in each argument.
__device__ __forceinline__ u32 add_half2(u32 a, u32 b) {
    u32 c;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Two bfloat16 in a word, the first in the low half.
__device__ __forceinline__ u32 pack_bfloat2(float first, float second) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

__device__ __forceinline__ float bfloat_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 float_to_bfloat(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// The bits of `a` where the mask has ones, of `b` elsewhere, in one instruction.
template <u32 MASK>
__device__ __forceinline__ u32 select(u32 a, u32 b) {
    u32 c;
    asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(c) : "r"(a), "n"(MASK), "r"(b));
    return c;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copy 16 bytes, both sides aligned, without passing through registers or the L1 cache.
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from_global));
}
// The same, of zeros unless `real`.
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
                 "r"(real ? 16 : 0));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Sums and maxima over the lanes of a warp, in the same order every time; every lane gets them.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
// Of magnitudes, which as bits are in the same order.
__device__ __forceinline__ float warp_max_magnitude(float x) {
    return __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(x)));
}

// A lane's value as it is, in a register: compilers that are short of those compute what they can again in every round of a loop.
// For all lanes of a warp.
__device__ __forceinline__ int kept(int x) { return __shfl_sync(ALL_LANES, x, threadIdx.x % 32); }

// Named barriers (CUTLASS's NamedBarrier) of some THREADS of a block, which others need not reach. 0 is
// __syncthreads'.
enum { CONSUMER_BARRIER = 1, PRODUCER_BARRIER = 2, BLOCK_BARRIER = 3 };
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
// Let those who sync() pass, and go on.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// Barriers in shared memory that count arrivals, and from sm_90 on also bytes that are being copied.
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}
// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
            "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// A build for racecheck (kernel.py) has CHECKED 1. The tool (CUDA 13.0) does not see that a barrier of all warps
// comes after one of some, nor that one lane arrives for its warp, and reports races where there are none. So there the
// first warps meet at a barrier in shared memory, and every lane arrives for itself, which it sees in small kernels.
#ifndef CHECKED
#define CHECKED 0
#endif
#if CHECKED
__shared__ u64 consumer_barrier;
#endif

// Before sync_consumers(), by all threads.
template <int THREADS>
__device__ __forceinline__ void init_consumer_barrier() {
#if CHECKED
    if (threadIdx.x == 0) barrier_init(&consumer_barrier, THREADS);
    __syncthreads();
#endif
}
// Until the first THREADS threads of a block are here.
template <int THREADS>
__device__ __forceinline__ void sync_consumers() {
#if CHECKED
    asm volatile(
        "{\n.reg .b64 state;\n.reg .pred p;\nmbarrier.arrive.shared.b64 state, [%0];\n"
        "again: mbarrier.test_wait.shared.b64 p, [%0], state;\n@!p bra again;\n}" ::"r"(
            shared_address(&consumer_barrier))
        : "memory");
#else
    sync<CONSUMER_BARRIER, THREADS>();
#endif
}
// A warp's arrivals at a barrier.
static constexpr int ARRIVALS = CHECKED ? 32 : 1;
__device__ __forceinline__ void warp_arrive(u64* barrier) {
    __syncwarp();
    if (CHECKED || threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Add to a counter of the whole GPU.
__device__ __forceinline__ void atomic_add(u64* counter, u64 n) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(n) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Bring bytes into the L2 cache: a multiple of 16, aligned to 16.
__device__ __forceinline__ void prefetch_l2_bulk(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
#endif
