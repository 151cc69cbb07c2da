// A product with a matrix in the host's memory, of which the GPU reads the first bands over the bus, by the product that
// reads all others, and the processor multiplies the last rows: runtime/hybrid/mailbox.py draws the memory.
//
//     request_rows  x, normed  ->  request, number             the processor begins; 0 in columns that it leaves out
//     (product)   rows 0 .. sum_rows - 1  ->  sums               meanwhile
//     take_rows     awaits the answer; y = sums + answer + bias + residual  ->  squares of y
//
// The answer is of rows from gpu_rows on. Of planes the GPU multiplies the first ones of all rows, so that sums are of all, and
// the processor the others of the last rows; the request then also says at which level each column is read.
//
// Where no list of neurons gives a step its number, count_step does so at the step's end.
//
// All of them wait for the kernel before first, and let the next one begin later: what flag_in_data.cuh asks for. What they read
// may be in its words; y is. The product, whose weights travel as soon as it begins, begins only when the request has
// reached the host: behind so many reads on the bus it would come when they are over.

#include "common/activations.cuh"
#include "common/flag_in_data.cuh"
#include "neurons/mailbox.cuh"

// Macros: INPUTS: how many sequences ask together; GATED 1: x is activation(gate) * up of what lies there, as in
//         column_split.cuh, ACTIVATION the function's number; LEVELS: of planes, OF_LEVELS 1: each has a threshold
#ifndef INPUTS
#define INPUTS 1
#define GATED 0
#define ACTIVATION 0
#endif
#ifndef LEVELS
#define LEVELS 1
#define OF_LEVELS 0
#endif

static constexpr int LIMITS = OF_LEVELS ? LEVELS : 1;
static constexpr int EACH = GATED == 1 ? 2 : 1;                              // numbers of a column
static constexpr int AT_ONCE = INPUTS * EACH < 8 ? 8 / (INPUTS * EACH) : 1;  // columns that a thread loads together
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

// x          float32 [INPUTS][columns], GATED [INPUTS][2 columns]; norm [columns]: of an RMSNorm that comes first, or null
// threshold  float32 [1], or with per_channel [columns], or where OF_LEVELS [LEVELS][columns]; null: every column is active.
//            A column is left out where it is inactive in all sequences, and else has the largest of their levels. offset [columns], taken from x before, or null; scales [INPUTS]: what the threshold of
//            each sequence is multiplied by, or null
// skipped    u64 [INPUTS] or null, where there are scales: to which the weights in inactive columns are added, of `rows`
// request    int32, the number; request_x: float32 [INPUTS][columns]; both in the host's memory, with planes levels [columns],
//            too, and x as the product shall read it: own_x float32 [INPUTS][columns], in the GPU's
// number     int32, of the step
//
// What is active is what column_split.cuh says, but for a norm's sum of squares, whose order is another: a column at its
// threshold may be read on one side alone; not with planes, of which the product reads own_x. Launch: one block of 1024
// threads.
extern "C" __global__ void __launch_bounds__(THREADS)
    request_rows(const float* x, int columns, const float* norm, float eps, const float* threshold, int per_channel,
                 const float* offset, const float* scales, int rows, u64* skipped, int* request, float* request_x,
                 const int* number, int before_list, u8* levels, float* own_x) {
    __shared__ float scratch[THREADS / 32];
    __shared__ int inactive[INPUTS];
    if (threadIdx.x < INPUTS) inactive[threadIdx.x] = 0;
    wait_for_previous();
    float norms[INPUTS], scale[INPUTS];
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        norms[b] = 1, scale[b] = scales ? load_l2(scales + b) : 1;
        if (!norm) continue;
        float sum = 0;
#pragma unroll 4
        for (int k = threadIdx.x; k < columns; k += THREADS) {
            const float v = load_l2(x + (u64)b * columns + k);
            sum += v * v;
        }
        norms[b] = 1 / sqrtf(block_sum<THREADS>(sum, scratch) / columns + eps);
    }
    __syncthreads();
#pragma unroll 1
    for (int first = threadIdx.x; first < columns; first += THREADS * AT_ONCE) {
        float v[AT_ONCE][INPUTS][EACH];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int k = first + i * THREADS;
#pragma unroll
            for (int each = 0; each < INPUTS * EACH; ++each)
                v[i][each / EACH][each % EACH] = k < columns ? load_l2(x + (u64)each * columns + k) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int k = first + i * THREADS;
            if (k >= columns) break;
            float limit[LIMITS] = {};
#pragma unroll
            for (int l = 0; threshold && l < LIMITS; ++l) limit[l] = threshold[per_channel ? l * columns + k : 0];
            int level = threshold ? 0 : LEVELS;
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) {
                float& of = v[i][b][0];
                if (GATED) of = gated(ACTIVATION, of, v[i][b][EACH - 1]);
                if (norm) of *= norms[b] * norm[k];
                if (offset) of -= offset[k];
                if (!threshold) continue;
                int exceeded = 0;
#pragma unroll
                for (int l = 0; l < LIMITS; ++l)
                    exceeded += fabsf(of) > (scales ? __fmul_rn(scale[b], limit[l]) : limit[l]);
                level = max(level, OF_LEVELS ? exceeded : exceeded * LEVELS);
                if (skipped && !exceeded) atomicAdd(inactive + b, 1);
            }
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) {
                request_x[(u64)b * columns + k] = level ? v[i][b][0] : 0;
                if (own_x) own_x[(u64)b * columns + k] = v[i][b][0];
            }
            if (levels) levels[k] = level;
        }
    }
    fence_system();
    __syncthreads();
    if (skipped && threadIdx.x < INPUTS) atomic_add(skipped + threadIdx.x, (u64)rows * inactive[threadIdx.x]);
    if (threadIdx.x) return;
    store_release_system(request, number_of_step(number, before_list));
    fence_system();
    launch_dependents();
}

// sums      float32 [sequences][sum_rows]: what the product left
// answer    float32 [sequences][rows - gpu_rows] in the host's memory, there when `answered` is the step's number
// abort     why a side has given up, or 0; limit: milliseconds to wait
// bias      float32 [rows], or null; residual: float32 [sequences][rows], maybe y itself, or null
// squares   float32 [sequences][gridDim.x]: of each block what its rows add to the sum of y^2; or null
// waited    u64, to which the nanoseconds are added that the first block waited
//
// Launch: grid (any number, sequences), 256 threads; a block takes a part of the rows.
extern "C" __global__ void __launch_bounds__(TAKE_THREADS)
    take_rows(const float* sums, int sum_rows, int gpu_rows, const int* answered, const float* answer, int rows,
              int* abort, int limit, const int* number, int before_list, const float* bias, const float* residual,
              float* y, float* squares, u64* waited) {
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
        float v = row < sum_rows ? load_l2(sums + (u64)b * sum_rows + row) : 0;
        if (row >= gpu_rows) v += load_system(answer + (u64)b * (rows - gpu_rows) + (row - gpu_rows));
        if (bias) v += bias[row];
        if (residual) v += load_l2(residual + at);
        ll_store(y + at, v);
        sum += v * v;
    }
    if (!squares) return;
    sum = block_sum<TAKE_THREADS>(sum, scratch);
    if (threadIdx.x == 0) ll_store(squares + (u64)b * gridDim.x + blockIdx.x, sum);
}

// number  int32: of the step that ends. The next one has the next number. Launch: one thread.
extern "C" __global__ void count_step(int* number) {
    wait_for_previous();
    *number = next_number(*number);
    launch_dependents();
}
