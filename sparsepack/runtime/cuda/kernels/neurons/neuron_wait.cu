// Until the processor has answered a block's request: its number stands at the answer, or either side has given up.
// Where nothing was asked of it, at once.
//
// Launch: one thread.

#include "neurons/mailbox.cuh"

static constexpr int LOOKS = 32;  // at the answer, for each at the word by which sides give up and at the time

// counts  int32 [3], as neuron_list left them; number: int32, of the step
// answer  int32 in the host's memory: the number of the answer; abort: why a side has given up, or 0
// limit   milliseconds to wait; waited: u64, to which the nanoseconds are added
extern "C" __global__ void __launch_bounds__(32)
    neuron_wait(const int* counts, const int* number, const int* answer, int* abort, int limit, u64* waited) {
    launch_dependents();
    wait_for_previous();
    if (threadIdx.x || !load_l2(counts + 2)) return;
    const int step = load_l2(number);
    const u64 begin = nanoseconds();
    for (int look = 1; load_acquire_system(answer) != step; ++look) {
        if (look % LOOKS) continue;
        if (load_system(abort)) return;
        if (nanoseconds() - begin > limit * 1000000ull) {
            store_system(abort, DEVICE_WAITED);
            return;
        }
    }
    *waited += nanoseconds() - begin;
}
