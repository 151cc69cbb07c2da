// Where the time of a token goes: nanoseconds of each phase and thread, at work and waiting for other threads.
#pragma once
#include "system/system.h"

#include <stdint.h>

#include <vector>

namespace sparsepack {

// In the order of a block. LISTS: what every thread does for itself between two products: it adds partial sums, norms, and
// lists the active columns.
enum Phase {
    LISTS,
    ATTN_IN_PRODUCT,
    ATTENTION,
    ATTN_OUT_PRODUCT,
    MLP_IN_PRODUCT,
    GATE,
    MLP_MID_PRODUCT,
    OUTPUT,
    SAMPLING,
    PHASES
};
constexpr const char* PHASE_NAMES[PHASES] = {"lists", "attn_in", "attention", "attn_out", "mlp_in",
                                             "gate",  "mlp_mid", "output",    "sampling"};

class PhaseClock {
public:
    struct alignas(64) Times {
        int64_t since = 0, work[PHASES] = {}, waiting[PHASES] = {};
    };

    explicit PhaseClock(int threads) : threads_(threads) {}

    const std::vector<Times>& threads() const noexcept { return threads_; }

    void begin() noexcept {
        for (Times& thread : threads_) thread.since = now();
    }
    void worked(Phase phase, int thread) noexcept { add(threads_[thread], threads_[thread].work[phase]); }
    void waited(Phase phase, int thread) noexcept { add(threads_[thread], threads_[thread].waiting[phase]); }
    void all_waited(Phase phase) noexcept {
        for (Times& thread : threads_) add(thread, thread.waiting[phase]);
    }

private:
    static int64_t now() noexcept { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }
    static void add(Times& thread, int64_t& to) noexcept {
        int64_t before = thread.since;
        thread.since = now();
        to += thread.since - before;
    }

    std::vector<Times> threads_;
};

}  // namespace sparsepack
