// Who is active: the neurons whose gate is not zero after the activation in any of the sequences, in ascending order, with
// their gates, and the normed input with which their records are multiplied.
//
//     gates    float32 [INPUTS][neurons]   before the activation, as the product of the gate left them
//     words    | of warp 0 of block 0: ROUNDS times 32 neurons | of warp 1 | .. | of block 1 | .. |    in registers
//     counts   of a warp -> of the block -> of the cluster's blocks, which tell each other
//     index    int32, gates_of [INPUTS][neurons]:   | residents | offloaded ones that the GPU computes |
//     request  indices, gates_of, as mailbox.py draws them: | offloaded ones that the processor computes |
//
// Where DIVIDED, a resident neuron has a slot, whose number is listed in place of its own; the last offloaded ones are
// read over the bus, so many that both sides end together (placement/machine.py); all others are asked of the processor,
// once all of the request is written. Else all are resident, their records in the order of the neurons.
//
// Launch: one cluster, grid (CLUSTER), of blocks of 512 threads.
//
// Macros: CLUSTER; INPUTS 1 to 8; ROUNDS: words of a warp; ACTIVATION: number of the function (activations.cuh); ALL 1:
//         every neuron is listed; FLAG_IN_DATA 1: gates and x are read as soon as they are stored (one input); DIVIDED;
//         REPLAYED 1: who is active is read from a trace instead, for benchmarks, and gates of zero become 1

#include "common/activations.cuh"
#include "common/cluster.cuh"
#include "common/flag_in_data.cuh"
#include "neurons/mailbox.cuh"

#ifndef INPUTS
#define INPUTS 1
#define ROUNDS 2
#define ACTIVATION 1
#define ALL 0
#define FLAG_IN_DATA 0
#define DIVIDED 1
#define REPLAYED 0
#endif

static constexpr int THREADS = 512, WARPS = 16;

// How many of the offloaded neurons the GPU reads itself: `over_the_bus` of placement/machine.py. costs: seconds a neuron
// from slots, over the bus, and by the processor; seconds of a round through the mailbox.
__device__ __forceinline__ int over_the_bus(int resident, int offloaded, const double* costs) {
    const double bus = costs[1], worker = costs[2], handover = costs[3], slots = resident * costs[0];
    const auto seconds = [&](int n) {
        const int cpu_neurons = offloaded - n;
        return fmax(slots + n * bus, cpu_neurons ? handover + cpu_neurons * worker : 0.0);
    };
    const double even = (handover + offloaded * worker - slots) / (bus + worker);
    const int least = (int)fmin(fmax(even, 0.0), (double)offloaded), more = min(least + 1, offloaded);
    int chosen = least;
    if (seconds(more) < seconds(chosen)) chosen = more;
    if (seconds(offloaded) < seconds(chosen)) chosen = offloaded;
    return chosen;
}

// x        float32 [INPUTS][hidden]; norm [hidden]: RMSNorm's weight, null: x is normed already; normed: the
//          same as x, after the norm
// counts   int32 [3]: how many are listed of the first memory, in all, and how many are asked of the processor
// active   the number of active neurons is added; or null
// tables   int32 [2][blocks][neurons], of this block in the first: the slots, or -1; version: int32, which of the two
// traffic  u64 [5], to which is added: neurons from slots, over the bus, by the processor, blocks that were handed over
// replayed u32 [rows][blocks][words], of this block in the first: who is active, row after row
// number   int32 [2]: of the step, and of the step before the first one of the sequence
// seen     u32 [kept][blocks][words], of this block in the first: who is active, in step n at n modulo `kept`
// begins   it is the first block's list, which gives the step its number
extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS)
    neuron_list(const float* gates, int neurons, const float* x, int hidden, const float* norm, float eps,
                float* normed, int* index, float* gates_of, int* counts, u64* active,
                // where DIVIDED
                const int* tables, int table_pitch, const int* version, const double* costs, u32* seen, int seen_pitch,
                int kept, int* number, int begins, int* request_number, int* request_indices, float* request_gates,
                float* request_x, u64* traffic, const u32* replayed, int replayed_pitch, int rows) {
    __shared__ float squares[INPUTS][WARPS];
    __shared__ int found[2][WARPS], totals[CLUSTER][2], over_bus;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = block_in_cluster();
    const int words = (neurons + 31) / 32, first = (block * WARPS + warp) * ROUNDS;
    const auto neuron = [&](int r) { return (first + r) * 32 + lane; };
    begin_in_cluster();
    launch_dependents();
    if (!FLAG_IN_DATA) wait_for_previous();

    // The input is there before the gates are.
#pragma unroll 1
    for (int b = 0; b < INPUTS; ++b) {
        float sum = 0;
#pragma unroll 1
        for (int begin = threadIdx.x; begin < hidden; begin += 4 * THREADS) {
            float v[4];
            ll_receive<FLAG_IN_DATA>(v, [&](int i) {
                const int k = begin + i * THREADS;
                return k < hidden ? x + b * hidden + k : nullptr;
            });
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += v[i] * v[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[b][warp] = sum;
    }
    float gate[INPUTS][ROUNDS];
#pragma unroll
    for (int b = 0; b < INPUTS; ++b)
        ll_receive<FLAG_IN_DATA>(
            gate[b], [&](int r) { return neuron(r) < neurons ? gates + b * neurons + neuron(r) : nullptr; });
    if (FLAG_IN_DATA) wait_for_previous();  // nothing is written before

    const int step = DIVIDED ? begins ? next_number(load_l2(number)) : load_l2(number) : 0;
    const u32* const row =
        REPLAYED ? replayed + (u64)((step - 1 - load_l2(number + 1)) % rows) * replayed_pitch : nullptr;
    const int* const table = DIVIDED ? tables + load_l2(version) * table_pitch : nullptr;
    int slot[ROUNDS];
    u32 mask[ROUNDS], with_slot[ROUNDS];
    int resident_of_warp = 0, offloaded_of_warp = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        slot[r] = !DIVIDED ? neuron(r) : neuron(r) < neurons ? load_l2(table + neuron(r)) : -1;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        bool is = ALL || REPLAYED && first + r < words && row[first + r] >> lane & 1;
#pragma unroll
        for (int b = 0; b < INPUTS; ++b) {
            gate[b][r] = activated(ACTIVATION, gate[b][r]);
            if (!REPLAYED) is |= gate[b][r] != 0;  // NaN is active, so that it is seen
            if (REPLAYED && gate[b][r] == 0) gate[b][r] = 1;
        }
        is &= neuron(r) < neurons;
        mask[r] = __ballot_sync(ALL_LANES, is);
        with_slot[r] = DIVIDED ? __ballot_sync(ALL_LANES, is && slot[r] >= 0) : mask[r];
        resident_of_warp += __popc(with_slot[r]);
        offloaded_of_warp += __popc(mask[r] & ~with_slot[r]);
        if (DIVIDED && lane == 0 && first + r < words) seen[step % kept * seen_pitch + first + r] = mask[r];
    }
    if (lane == 0) {
        found[0][warp] = resident_of_warp;
        found[1][warp] = offloaded_of_warp;
    }
    __syncthreads();

    // The blocks' counts, to each block.
    int next[2] = {};  // the first place of the warp's residents, and of its offloaded ones
    if (warp < 2) {
        int sum = lane < WARPS ? found[warp][lane] : 0;
#pragma unroll
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
        wait_for_cluster();
#if CLUSTER > 1
        if (lane < CLUSTER) store_there(address_of_block(&totals[block][warp], lane), sum);
#else
        if (lane == 0) totals[0][warp] = sum;
#endif
    } else {
        wait_for_cluster();
    }
#pragma unroll
    for (int b = 0; b < INPUTS; ++b) {
        const float scale = 1 / sqrtf(warp_sum(lane < WARPS ? squares[b][lane] : 0) / hidden + eps);
#pragma unroll 1
        for (int k = block * THREADS + threadIdx.x; k < hidden; k += CLUSTER * THREADS) {
            const float v = load_l2(x + b * hidden + k) * (norm ? scale * norm[k] : 1);
            normed[b * hidden + k] = v;
            if (DIVIDED) request_x[b * hidden + k] = v;
        }
    }
    sync_cluster();
    int count[2] = {};  // residents, offloaded ones
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int n = 0; n < CLUSTER; ++n) {
            if (n < block) next[kind] += totals[n][kind];
            count[kind] += totals[n][kind];
        }
        const int before = lane < warp ? found[kind][lane] : 0;
        next[kind] += __reduce_add_sync(ALL_LANES, before);
    }
    const int resident = count[0], offloaded = count[1];
    int cpu_neurons = 0;  // of the offloaded, the first so many are the processor's
    if (DIVIDED) {
        if (threadIdx.x == 0) over_bus = over_the_bus(resident, offloaded, costs);
        __syncthreads();
        cpu_neurons = offloaded - over_bus;
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const u32 before = (1u << lane) - 1, of_others = mask[r] & ~with_slot[r];
        if (mask[r] >> lane & 1) {
            int *to = index, listed = slot[r], at = next[0] + __popc(with_slot[r] & before);
            float* gates_to = gates_of;
            if (DIVIDED && slot[r] < 0) {
                listed = neuron(r);
                at = next[1] + __popc(of_others & before);
                if (at < cpu_neurons) {
                    to = request_indices;
                    gates_to = request_gates;
                } else {
                    at += resident - cpu_neurons;
                }
            }
            to[at] = listed;
#pragma unroll
            for (int b = 0; b < INPUTS; ++b) gates_to[b * neurons + at] = gate[b][r];
        }
        next[0] += __popc(with_slot[r]);
        next[1] += __popc(of_others);
    }
    if (DIVIDED) {
        fence_system();
        sync_cluster();
    }
    if (block == 0 && threadIdx.x == 0) {
        counts[0] = resident;
        counts[1] = resident + offloaded - cpu_neurons;
        counts[2] = cpu_neurons;
        if (active) atomic_add(active, resident + offloaded);
        if (DIVIDED) {
            if (begins) *number = step;
            traffic[0] += resident;
            traffic[1] += offloaded - cpu_neurons;
            traffic[2] += cpu_neurons;
            traffic[3] += cpu_neurons > 0;
            request_number[1] = cpu_neurons;
            store_release_system(request_number, step);
        }
    }
}
