// Runs a compute kernel's threads as fibres, one threadgroup after the other, and checks what they do.
//
//     fibre --simd function--> waits for the 32 lanes of its simdgroup
//     fibre --barrier--------> waits for all threads of its threadgroup
//     fibre --any access-----> __tsan_read4(address) .. : is it inside a buffer, and may another thread be there?
//
// The compiler calls the last of these because sources are compiled with -fsanitize=thread; its own library is not
// linked, the functions are here. Whoever waits at another place than the others, touches memory that is not the
// kernel's, reads threadgroup memory that nobody wrote, or touches what another thread writes without a barrier between
// the two: the launch ends with a message.
//
// Threads are executed in the order of their numbers, or with a seed in an order of its own each time that they go on;
// so are threadgroups.

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "metal_stdlib.h"
#include "stacks.h"

namespace {

constexpr uint MOST_THREADS = 1024, LANES = 32, PAGE = 16384, STACK = 8 * PAGE;
constexpr uint SEVERAL = 0xffffffff;

enum State { READY, AT_SIMD, AT_BARRIER, ENDED };

struct Fibre {
    void* stack;  // its pointer while others run
    State state;
    const char* function;
    uint line, turns;
    Place place;
};

// Who touched two bytes last: group 0 nobody; time: how many barriers the threadgroup had passed
struct Touched {
    uint write_group, write_time, writer;
    uint read_group, read_time, reader;
};

struct Range {
    char *begin, *end;
    Touched* touched;  // for each two bytes; null: nobody writes here
    bool shared;       // by the threads of one threadgroup alone
};

constexpr uint MOST_RANGES = 64;
Range ranges[MOST_RANGES];
uint range_count;

Fibre fibres[MOST_THREADS];
char* stacks;
uint64_t bank[2][MOST_THREADS];
void* scheduler;
uint current, threads, group;
uint device_time, threadgroup_time;
bool failed;
char message[512];

typedef void (*Kernel)(void** buffers, const Place& place);
Kernel kernel_function;
void** kernel_buffers;

void fail(const char* format, ...) {
    if (!failed) {
        va_list values;
        va_start(values, format);
        vsnprintf(message, sizeof message, format, values);
        va_end(values);
    }
    failed = true;
}

void leave() { switch_stack(&fibres[current].stack, scheduler); }

void begin() {
    kernel_function(kernel_buffers, fibres[current].place);
    fibres[current].state = ENDED;
    leave();
}

uint64_t random_state;
uint random_below(uint limit) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint)((random_state >> 11) % limit);
}

void shuffle(uint* numbers, uint count) {
    for (uint i = count; random_state && i > 1; --i) {
        const uint j = random_below(i), swapped = numbers[i - 1];
        numbers[i - 1] = numbers[j];
        numbers[j] = swapped;
    }
}

void describe(char* text, size_t room, char* at) {
    for (uint i = 0; i < range_count; ++i) {
        if (ranges[i].shared || at < ranges[i].begin - 4096 || at >= ranges[i].end + 4096) continue;
        snprintf(text, room, ": byte %ld of buffer %u, which has %ld", (long)(at - ranges[i].begin), i,
                 (long)(ranges[i].end - ranges[i].begin));
        return;
    }
    snprintf(text, room, ": no memory of the kernel");
}

Range* range_of(char* at, size_t size) {
    Range* found = nullptr;
    for (uint i = 0; i < range_count; ++i) {
        if (at < ranges[i].begin || at + size > ranges[i].end) continue;
        if (ranges[i].touched) return &ranges[i];
        found = &ranges[i];
    }
    return found;
}

const char* touch(Touched& of, bool writes, bool shared) {
    const uint time = shared ? threadgroup_time : device_time;
    if (of.write_group && of.write_group != group)
        return writes ? "writes what another threadgroup writes" : "reads what another threadgroup writes";
    if (of.write_group && of.write_time == time && of.writer != current)
        return writes ? "writes what another thread writes, without a barrier between the two"
                      : "reads what another thread writes, without a barrier between the two";
    if (writes) {
        if (of.read_group && of.read_group != group) return "writes what another threadgroup reads";
        if (of.read_group && of.read_time == time && of.reader != current)
            return "writes what another thread reads, without a barrier between the two";
        of.write_group = group;
        of.write_time = time;
        of.writer = current;
        return nullptr;
    }
    if (shared && !of.write_group) return "reads threadgroup memory that nobody wrote";
    if (of.read_group && of.read_group != group) {
        of.read_group = SEVERAL;
    } else if (of.read_group && of.read_time == time) {
        if (of.reader != current) of.reader = SEVERAL;
    } else {
        of.read_group = group;
        of.read_time = time;
        of.reader = current;
    }
    return nullptr;
}

// aligned: as the type in the source says
void access(void* address, size_t size, bool writes, bool aligned = true) {
    char* const at = (char*)address;
    const char* const own = stacks + (size_t)current * STACK;
    if (at >= own && at < own + STACK) return;
    const char* wrong = nullptr;
    char where[128] = "";
    Range* const range = range_of(at, size);
    if (!range) {
        describe(where, sizeof where, at);
        wrong = writes ? "writes beyond its memory" : "reads beyond its memory";
    } else if (aligned && (uintptr_t)at % size) {
        describe(where, sizeof where, at);
        wrong = "is not aligned";
    } else if (range->touched) {
        const size_t first = (size_t)(at - range->begin) / 2, last = (size_t)(at + size - 1 - range->begin) / 2;
        for (size_t i = first; i <= last && !wrong; ++i) wrong = touch(range->touched[i], writes, range->shared);
        if (wrong && !range->shared) {
            snprintf(where, sizeof where, ": byte %ld of buffer %ld", (long)(at - range->begin),
                     (long)(range - ranges));
        } else if (wrong) {
            snprintf(where, sizeof where, ": threadgroup memory");
        }
    } else if (writes) {
        describe(where, sizeof where, at);
        wrong = "writes what is only to be read";
    }
    if (!wrong) return;
    const Place& place = fibres[current].place;
    fail("thread %u of threadgroup (%u, %u, %u) %s%s", current, place.threadgroup_position_in_grid[0],
         place.threadgroup_position_in_grid[1], place.threadgroup_position_in_grid[2], wrong, where);
    fibres[current].state = ENDED;
    leave();
}

// Let those go on for whom all others have come. False: nobody can.
bool release() {
    bool any = false;
    uint ended = 0, at_barrier = 0;
    for (uint simd = 0; simd < threads / LANES; ++simd) {
        Fibre* const lanes = fibres + simd * LANES;
        uint waiting = 0;
        bool same = true;
        for (uint i = 0; i < LANES; ++i) {
            waiting += lanes[i].state == AT_SIMD;
            ended += lanes[i].state == ENDED;
            at_barrier += lanes[i].state == AT_BARRIER;
            same &= lanes[i].line == lanes[0].line && lanes[i].function == lanes[0].function;
        }
        if (!waiting) continue;
        if (waiting < LANES || !same) {
            fail("line %u: %u of 32 lanes come to %s, the others do not", lanes[0].line, waiting,
                 lanes[0].state == AT_SIMD ? lanes[0].function : "a simd function");
            return false;
        }
        for (uint i = 0; i < LANES; ++i) lanes[i].state = READY;
        any = true;
    }
    if (any || ended == threads) return any;
    bool same = true;
    for (uint i = 0; i < threads; ++i) same &= fibres[i].line == fibres[0].line;
    if (at_barrier < threads || !same) {
        fail("line %u: %u of %u threads come to a barrier, the others do not", fibres[0].line, at_barrier, threads);
        return false;
    }
    for (uint i = 0; i < threads; ++i) fibres[i].state = READY;
    return true;
}

uint pending_spaces;

void run_threadgroup() {
    device_time = threadgroup_time = 1;
    for (uint i = 0; i < threads; ++i) {
        fibres[i].state = READY;
        fibres[i].line = fibres[i].turns = 0;
        fibres[i].stack = new_stack(stacks + (size_t)(i + 1) * STACK, begin);
    }
    uint order[MOST_THREADS];
    for (;;) {
        uint ready = 0;
        for (uint i = 0; i < threads; ++i)
            if (fibres[i].state == READY) order[ready++] = i;
        if (!ready) {
            const bool barrier = fibres[0].state == AT_BARRIER;
            if (!release()) return;
            if (barrier && fibres[0].state == READY) {
                device_time += pending_spaces & 1;
                threadgroup_time += pending_spaces >> 1 & 1;
            }
            continue;
        }
        shuffle(order, ready);
        for (uint i = 0; i < ready && !failed; ++i) {
            current = order[i];
            switch_stack(&scheduler, fibres[current].stack);
        }
        if (failed) return;
    }
}

void* pages(size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
}
}  // namespace

extern "C" {

void emulation_barrier(uint spaces, uint line) {
    Fibre& fibre = fibres[current];
    fibre.state = AT_BARRIER;
    fibre.line = line;
    pending_spaces = spaces;
    leave();
}

const uint64_t* emulation_exchange(const void* value, size_t size, const char* function, uint line) {
    Fibre& fibre = fibres[current];
    // A lane is at most one call ahead of another one of its simdgroup: two banks, in turn.
    uint64_t* const at = bank[fibre.turns++ % 2];
    memcpy(at + current, value, size);
    fibre.state = AT_SIMD;
    fibre.function = function;
    fibre.line = line;
    leave();
    return at + current / LANES * LANES;
}

uint emulation_lane() { return current % LANES; }

// Take the stacks that another library has made, or make them, and return them: one library executes at a time, and two
// thousand mappings of each would make /proc/self/maps a text that takes long to read.
void* emulation_stacks(void* made) {
    stacks = (char*)made;
    if (!stacks) {
        stacks = (char*)pages((size_t)MOST_THREADS * STACK);
        for (uint i = 0; i < MOST_THREADS; ++i) mprotect(stacks + (size_t)i * STACK, PAGE, PROT_NONE);
    }
    return stacks;
}

// Execute a kernel. Returns 0, or 1 with a message.
//
// buffers, lengths, writable -- in the order of the kernel's arguments; lengths in bytes
// pieces                     -- the kernel's threadgroup memory: pairs of a beginning and a number of bytes
// groups, group_size         -- threadgroups, and threads of one: a multiple of 32
// seed                       -- of the order; 0: the order of numbers
int emulation_launch(Kernel function, void** buffers, const uint64_t* lengths, const uint8_t* writable, uint count,
                     void** pieces, const uint64_t* piece_lengths, uint piece_count, const uint* groups,
                     const uint* group_size, uint64_t seed, char* error, uint64_t room) {
    failed = false;
    message[0] = 0;
    threads = group_size[0] * group_size[1] * group_size[2];
    const uint all = groups[0] * groups[1] * groups[2];
    range_count = count + piece_count;
    size_t cells = 0;
    for (uint i = 0; i < range_count; ++i) {
        const bool shared = i >= count;
        char* const begin = (char*)(shared ? pieces[i - count] : buffers[i]);
        const uint64_t length = shared ? piece_lengths[i - count] : lengths[i];
        ranges[i] = {begin, begin + length, nullptr, shared};
        if (shared || writable[i]) cells += length / 2 + 1;
    }
    Touched* const touched = (Touched*)pages(cells * sizeof(Touched) + 1);
    Touched *next = touched, *threadgroup_cells = nullptr;
    for (uint i = 0; i < range_count; ++i) {
        if (i == count) threadgroup_cells = next;
        if (i < count && !writable[i]) continue;
        ranges[i].touched = next;
        next += (ranges[i].end - ranges[i].begin) / 2 + 1;
    }
    random_state = seed;
    for (int i = 0; seed && i < 8; ++i) random_below(2);
    uint* const order = (uint*)pages((size_t)all * sizeof(uint) + 1);
    for (uint i = 0; i < all; ++i) order[i] = i;
    shuffle(order, all);
    kernel_function = function;
    kernel_buffers = buffers;
    for (uint at = 0; at < all && !failed; ++at) {
        group = order[at] + 1;
        for (uint i = 0; i < threads; ++i) {
            Place& place = fibres[i].place;
            uint rest_group = order[at], rest = i;
            for (uint axis = 0; axis < 3; ++axis) {
                place.threadgroup_position_in_grid[axis] = rest_group % groups[axis];
                place.threadgroups_per_grid[axis] = groups[axis];
                place.thread_position_in_threadgroup[axis] = rest % group_size[axis];
                place.threads_per_threadgroup[axis] = group_size[axis];
                rest_group /= groups[axis];
                rest /= group_size[axis];
            }
            place.thread_index_in_threadgroup = i;
            place.simdgroup_index_in_threadgroup = i / LANES;
            place.thread_index_in_simdgroup = i % LANES;
            place.simdgroups_per_threadgroup = threads / LANES;
        }
        for (uint i = count; i < range_count; ++i) memset(ranges[i].begin, 0xff, ranges[i].end - ranges[i].begin);
        if (threadgroup_cells) memset((void*)threadgroup_cells, 0, (char*)next - (char*)threadgroup_cells);
        run_threadgroup();
    }
    munmap(touched, cells * sizeof(Touched) + 1);
    munmap(order, (size_t)all * sizeof(uint) + 1);
    snprintf(error, room, "%s", message);
    return failed;
}

#define ACCESS(size)                                                               \
    void __tsan_read##size(void* at) { access(at, size, false); }                  \
    void __tsan_write##size(void* at) { access(at, size, true); }                  \
    void __tsan_unaligned_read##size(void* at) { access(at, size, false, false); } \
    void __tsan_unaligned_write##size(void* at) { access(at, size, true, false); } \
    void __tsan_read_write##size(void* at) {                                       \
        access(at, size, false);                                                   \
        access(at, size, true);                                                    \
    }                                                                              \
    void __tsan_unaligned_read_write##size(void* at) {                             \
        access(at, size, false, false);                                            \
        access(at, size, true, false);                                             \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, size_t size) { access(at, size, false, false); }
void __tsan_write_range(void* at, size_t size) { access(at, size, true, false); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, size_t size) { return memcpy(to, from, size); }
void* __tsan_memset(void* to, int byte, size_t size) { return memset(to, byte, size); }
}
