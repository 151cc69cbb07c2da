// Who is active: the neurons whose gate is not zero after the activation in any of the texts, in ascending order, with
// their gates, and the normed input with which their records are multiplied.
//
//     gates    float32 [INPUTS][neurons]   before the activation, as the product of the gate left them
//     masks    shared: 32 neurons a word, a warp has a range of the words: who is active, and who of them is resident
//     index    int32, gates_of [INPUTS][neurons]:   | residents | offloaded ones that the GPU computes |
//     request  indices, gates_of, as handover.py draws them: | offloaded ones that the processor computes |
//
// Where DIVIDED, a resident neuron has a slot, whose number is listed in place of its own; the last offloaded ones are
// read over the bus, so many that both sides end together (placement/links.py); all others are asked of the processor,
// once all of the request is written. Else all are resident, their records in the order of the neurons.
//
// Launch: one block of 1024 threads; shared memory for the masks, 4 bytes a word, twice where DIVIDED.
//
// Macros: INPUTS 1 to 8; ACTIVATION: number of the function (activations.cuh); ALL 1: every neuron is listed;
//         FLAG_IN_DATA 1: gates and x are read as soon as they are stored (one input); DIVIDED; REPLAYED 1: who is
//         active is read from a trace instead, for benchmarks, and gates of zero become 1

#include "common/activations.cuh"
#include "common/flag_in_data.cuh"
#include "neurons/hand_over.cuh"

#ifndef INPUTS
#define INPUTS 1
#define ACTIVATION 1
#define ALL 0
#define FLAG_IN_DATA 0
#define DIVIDED 1
#define REPLAYED 0
#endif

static constexpr int THREADS = 1024, WARPS = 32, AT_ONCE = 8;

// AT_ONCE values, asked for together.
template <int COUNT, typename At>
__device__ __forceinline__ void read(float (&values)[COUNT], At at) {
    if (FLAG_IN_DATA) {
        ll_wait(values, at);
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = at(i) ? load_l2(at(i)) : 0;
}

// How many of the offloaded neurons the GPU reads itself: `over_the_bus` of placement/links.py. links: seconds a neuron
// from slots, over the bus, and by the processor; seconds of a hand-over.
__device__ __forceinline__ int over_the_bus(int resident, int offloaded, const double* links) {
    const double bus = links[1], worker = links[2], handover = links[3], slots = resident * links[0];
    const auto seconds = [&](int n) {
        const int beside = offloaded - n;
        return fmax(slots + n * bus, beside ? handover + beside * worker : 0.0);
    };
    const double even = (handover + offloaded * worker - slots) / (bus + worker);
    const int least = (int)fmin(fmax(even, 0.0), (double)offloaded), more = min(least + 1, offloaded);
    int chosen = least;
    if (seconds(more) < seconds(chosen)) chosen = more;
    if (seconds(offloaded) < seconds(chosen)) chosen = offloaded;
    return chosen;
}

// x        float32 [INPUTS][hidden]; norm [hidden]: RMSNorm's weight; normed: the same as x, after the norm
// counts   int32 [3]: how many are listed of the first memory, in all, and how many are asked of the processor
// active   the number of active neurons is added; or null
// tables   int32 [2][blocks][neurons], of this block in the first: the slots, or -1; version: int32, which of the two
// traffic  u64 [5], to which is added: neurons from slots, over the bus, by the processor, blocks that were handed over
// replayed u32 [rows][blocks][words], of this block in the first: who is active, row after row
// number   int32 [2]: of the step, and of the step before the first one of the text
// seen     u32 [kept][blocks][words], of this block in the first: who is active, in step n at n modulo `kept`
// begins   it is the first block's list, which gives the step its number
extern "C" __global__ void __launch_bounds__(THREADS)
    neuron_list(const float* gates, int neurons, const float* x, int hidden, const float* norm, float eps,
                float* normed, int* index, float* gates_of, int* counts, u64* active,
                // where DIVIDED
                const int* tables, int table_pitch, const int* version, const double* links, u32* seen, int seen_pitch,
                int kept, int* number, int begins, int* request_number, int* request_indices, float* request_gates,
                float* request_x, u64* traffic, const u32* replayed, int replayed_pitch, int rows) {
    extern __shared__ u32 masks[];
    __shared__ float squares[INPUTS][WARPS];
    __shared__ int found[2][WARPS], beside_bus[1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int words = (neurons + 31) / 32, each = (words + WARPS - 1) / WARPS;
    const int first = min(warp * each, words), last = min(first + each, words);
    u32* const residents = masks + words;
    launch_dependents();
    if (!FLAG_IN_DATA) wait_for_previous();

    // The input is there before the gates are.
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        float sum = 0;
#pragma unroll 1
        for (int begin = threadIdx.x; begin < hidden; begin += 4 * THREADS) {
            float v[4];
            read(v, [&](int i) {
                const int k = begin + i * THREADS;
                return k < hidden ? x + b * hidden + k : nullptr;
            });
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += v[i] * v[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[b][warp] = sum;
    }
    __syncthreads();
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before
    const int step = DIVIDED ? begins ? next_number(load_l2(number)) : load_l2(number) : 0;
    const u32* const row =
        REPLAYED ? replayed + (u64)((step - 1 - load_l2(number + 1)) % rows) * replayed_pitch : nullptr;
    const auto after = [](float gate) {
        const float a = activated(ACTIVATION, gate);
        return REPLAYED && a == 0 ? 1.0f : a;
    };
    const int* const table = DIVIDED ? tables + load_l2(version) * table_pitch : nullptr;
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        const float scale = 1 / sqrtf(warp_sum(squares[b][lane]) / hidden + eps);
#pragma unroll 2
        for (int k = threadIdx.x; k < hidden; k += THREADS) {
            const float v = load_l2(x + b * hidden + k) * scale * norm[k];
            normed[b * hidden + k] = v;
            if (DIVIDED) request_x[b * hidden + k] = v;
        }
    }

    int of_warp = 0, resident_of_warp = 0;
#pragma unroll 1
    for (int begin = first; begin < last; begin += AT_ONCE) {
        const auto neuron = [&](int i) { return (begin + i) * 32 + lane; };
        const auto real = [&](int i) { return begin + i < last && neuron(i) < neurons; };
        bool is[AT_ONCE], has_slot[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            is[i] = real(i) && (ALL || REPLAYED && row[begin + i] >> lane & 1);
            has_slot[i] = !DIVIDED || (real(i) && load_l2(table + neuron(i)) >= 0);
        }
#pragma unroll
        for (int b = 0; b < (ALL || REPLAYED ? 0 : INPUTS); ++b) {
            float v[AT_ONCE];
            read(v, [&](int i) { return real(i) ? gates + b * neurons + neuron(i) : nullptr; });
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)  // NaN is active, so that it is seen
                is[i] |= real(i) && activated(ACTIVATION, v[i]) != 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u32 mask = __ballot_sync(ALL_LANES, is[i]), resident = __ballot_sync(ALL_LANES, is[i] && has_slot[i]);
            of_warp += __popc(mask);
            resident_of_warp += __popc(resident);
            if (lane || begin + i >= last) continue;
            masks[begin + i] = mask;
            if (DIVIDED) {
                residents[begin + i] = resident;
                seen[step % kept * seen_pitch + begin + i] = mask;
            }
        }
    }
    if (lane == 0) {
        found[0][warp] = resident_of_warp;
        found[1][warp] = of_warp - resident_of_warp;
    }
    __syncthreads();
    int resident = 0, offloaded = 0, next_resident = 0, next_offloaded = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) {
            next_resident += found[0][w];
            next_offloaded += found[1][w];
        }
        resident += found[0][w];
        offloaded += found[1][w];
    }
    int beside = 0;  // of the offloaded, the first so many are the processor's
    if (DIVIDED) {
        if (threadIdx.x == 0) beside_bus[0] = over_the_bus(resident, offloaded, links);
        __syncthreads();
        beside = offloaded - beside_bus[0];
    }
#pragma unroll 2
    for (int word = first; word < last; ++word) {
        const u32 mask = masks[word], with_slot = DIVIDED ? residents[word] : mask;
        const u32 before = (1u << lane) - 1;
        if (mask >> lane & 1) {
            const int n = word * 32 + lane;
            int *to = index, listed = n, at;
            float* gates_to = gates_of;
            if (!DIVIDED) {
                at = next_resident + __popc(mask & before);
            } else if (with_slot >> lane & 1) {
                at = next_resident + __popc(with_slot & before);
                listed = load_l2(table + n);
            } else {
                at = next_offloaded + __popc(mask & ~with_slot & before);
                if (at < beside) {
                    to = request_indices;
                    gates_to = request_gates;
                } else {
                    at += resident - beside;
                }
            }
            to[at] = listed;
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) gates_to[b * neurons + at] = after(load_l2(gates + b * neurons + n));
        }
        next_resident += __popc(with_slot);
        next_offloaded += __popc(mask & ~with_slot);
    }
    if (DIVIDED) {
        fence_system();
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        counts[0] = resident;
        counts[1] = resident + offloaded - beside;
        counts[2] = beside;
        if (active) atomic_add(active, resident + offloaded);
        if (DIVIDED) {
            if (begins) *number = step;
            traffic[0] += resident;
            traffic[1] += offloaded - beside;
            traffic[2] += beside;
            traffic[3] += beside > 0;
            request_number[1] = beside;
            store_release_system(request_number, step);
        }
    }
}
