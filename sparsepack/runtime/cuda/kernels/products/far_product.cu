// A product with a matrix in the host's memory, of which the GPU reads the first bands over the bus, by the product that
// reads all others, and the processor multiplies the last rows: runtime/hybrid/handover.py draws the memory.
//
//     far_ask     x, normed  ->  request, number             the processor begins
//     (product)   rows 0 .. near - 1  ->  sums               meanwhile
//     far_take    awaits the answer; y = sums, then the answer, + bias + residual  ->  squares of y
//
// Both wait for the kernel before first, and let the next one begin later: what flag_in_data.cuh asks for. What they read
// may be in its words; y is. The product, whose weights travel as soon as it begins, begins only when the request has
// reached the host: behind so many reads on the bus it would come when they are over.

#include "common/flag_in_data.cuh"
#include "neurons/hand_over.cuh"

static constexpr int THREADS = 1024, TAKE_THREADS = 256;
static constexpr int LOOKS = 32;  // at the answer, for each at the word by which sides give up and at the time

// The sum over a block, in the same order every time; every thread gets it. scratch: [COUNT / 32] of shared memory.
template <int COUNT>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < COUNT / 32 ? scratch[threadIdx.x % 32] : 0);
}

// The step's number, which the first block's list of neurons gives it: before that it is the next one.
__device__ __forceinline__ int number_of_step(const int* number, int before_list) {
    const int last = load_l2(number);
    return before_list ? next_number(last) : last;
}

// x          float32 [texts][columns]; norm [columns]: of an RMSNorm that comes first, or null
// request    int32, the number; request_x: float32 [texts][columns]; both in the host's memory
// number     int32, of the step
//
// Launch: one block of 1024 threads.
extern "C" __global__ void __launch_bounds__(THREADS)
    far_ask(const float* x, int columns, int texts, const float* norm, float eps, int* request, float* request_x,
            const int* number, int before_list) {
    __shared__ float scratch[THREADS / 32];
    wait_for_previous();
#pragma unroll 1
    for (int b = 0; b < texts; ++b) {
        const float* const from = x + (u64)b * columns;
        float sum = 0;
#pragma unroll 4
        for (int k = threadIdx.x; k < columns; k += THREADS) {
            const float v = load_l2(from + k);
            sum += v * v;
        }
        const float scale = norm ? 1 / sqrtf(block_sum<THREADS>(sum, scratch) / columns + eps) : 1;
#pragma unroll 4
        for (int k = threadIdx.x; k < columns; k += THREADS)
            request_x[(u64)b * columns + k] = load_l2(from + k) * scale * (norm ? norm[k] : 1);
    }
    fence_system();
    __syncthreads();
    if (threadIdx.x) return;
    store_release_system(request, number_of_step(number, before_list));
    fence_system();
    launch_dependents();
}

// sums      float32 [texts][near]: what the product left
// answer    float32 [texts][rows - near] in the host's memory, there when `answered` is the step's number
// abort     why a side has given up, or 0; limit: milliseconds to wait
// bias      float32 [rows], or null; residual: float32 [texts][rows], maybe y itself, or null
// squares   float32 [texts][gridDim.x]: of each block what its rows add to the sum of y^2; or null
// waited    u64, to which the nanoseconds are added that the first block waited
//
// Launch: grid (any number, texts), 256 threads; a block takes a part of the rows.
extern "C" __global__ void __launch_bounds__(TAKE_THREADS)
    far_take(const float* sums, int near, const int* answered, const float* answer, int rows, int* abort, int limit,
             const int* number, int before_list, const float* bias, const float* residual, float* y, float* squares,
             u64* waited) {
    __shared__ float scratch[TAKE_THREADS / 32];
    wait_for_previous();
    launch_dependents();
    if (threadIdx.x == 0) {
        const int step = number_of_step(number, before_list);
        const u64 begin = nanoseconds();
        for (int look = 1; load_acquire_system(answered) != step; ++look) {
            if (look % LOOKS) continue;
            if (load_system(abort)) break;
            if (nanoseconds() - begin > limit * 1000000ull) {
                store_system(abort, DEVICE_WAITED);
                break;
            }
        }
        if (blockIdx.x == 0 && blockIdx.y == 0) *waited += nanoseconds() - begin;
    }
    __syncthreads();
    const int each = (rows + gridDim.x - 1) / gridDim.x, b = blockIdx.y;
    const int first = blockIdx.x * each, last = min(first + each, rows);
    float sum = 0;
#pragma unroll 2
    for (int row = first + threadIdx.x; row < last; row += TAKE_THREADS) {
        const u64 at = (u64)b * rows + row;
        float v = row < near ? load_l2(sums + (u64)b * near + row)
                             : load_system(answer + (u64)b * (rows - near) + (row - near));
        if (bias) v += bias[row];
        if (residual) v += load_l2(residual + at);
        ll_store(y + at, v);
        sum += v * v;
    }
    if (!squares) return;
    sum = block_sum<TAKE_THREADS>(sum, scratch);
    if (threadIdx.x == 0) ll_store(squares + (u64)b * gridDim.x + blockIdx.x, sum);
}
