// The threads of a block as fibres of one thread of the system: each runs until it waits for its warp or for its block, in
// an order of its own each time, so that what needs a barrier and has none is found.

#pragma once

#include <cstdint>
#include <cstring>

#include "stacks.h"

namespace fibres {

constexpr int MOST = 1024, LANES = 32, STACK = 1 << 17;
enum State { READY, AT_WARP, AT_BARRIER, ENDED };

struct Fibre {
    void* stack;  // its pointer while others run
    State state;
    int turns;
};

inline Fibre all[MOST];
inline int current;
inline char* stacks;  // MOST of them
inline void* scheduler;
inline void (*body)();

inline void leave(State state) {
    all[current].state = state;
    switch_stack(&all[current].stack, scheduler);
}
inline void wait(State state) { leave(state); }
inline int turn() { return all[current].turns++ % 2; }
inline void begin() {
    body();
    leave(ENDED);
}

// Let those go on for whom all others have come. False: nobody can.
inline bool release(int threads) {
    int at_barrier = 0;
    bool any = false;
    for (int first = 0; first < threads; first += LANES) {
        const int end = first + LANES < threads ? first + LANES : threads;
        int at_warp = 0;
        for (int i = first; i < end; ++i) {
            at_warp += all[i].state == AT_WARP;
            at_barrier += all[i].state == AT_BARRIER;
        }
        if (at_warp < end - first) continue;
        for (int i = first; i < end; ++i) all[i].state = READY;
        any = true;
    }
    if (at_barrier < threads) return any;
    for (int i = 0; i < threads; ++i) all[i].state = READY;
    return true;
}

// Run so many threads of a block. Returns null, or what went wrong.
inline const char* run(void (*kernel)(), int threads, uint64_t seed) {
    body = kernel;
    for (int i = 0; i < threads; ++i) {
        char* const stack = stacks + (size_t)i * STACK;
        memset(stack, 0, 8);
        all[i] = {new_stack(stack + STACK, begin), READY, 0};
    }
    uint64_t random = seed * 0x9e3779b97f4a7c15 + 1;
    do {
        int order[MOST], ready = 0;
        for (int i = 0; i < threads; ++i) {
            if (all[i].state != READY) continue;
            random = random * 6364136223846793005 + 1442695040888963407;
            const int at = (int)((random >> 33) % (uint64_t)++ready);
            order[ready - 1] = order[at];
            order[at] = i;
        }
        for (int i = 0; i < ready; ++i) {
            current = order[i];
            switch_stack(&scheduler, all[current].stack);
        }
    } while (release(threads));
    for (int i = 0; i < threads; ++i) {
        uint64_t last;
        memcpy(&last, stacks + (size_t)i * STACK, sizeof last);
        if (last) return "a thread has used more than its stack";
        if (all[i].state != ENDED) return "threads wait for others that do not come";
    }
    return nullptr;
}

}  // namespace fibres
