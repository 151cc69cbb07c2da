#include "threads/pool.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsepack {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;

// How long a thread spins at a barrier before it sleeps. Others may well be busy for the longest of these; but where another
// process or another engine holds a processor, whoever spins may keep the very thread that it waits for from running. So
// each time in vain halves what a thread spins in the rest of the region. Nobody yields in place of sleeping: Linux 6.18
// takes a whole slice of time from a thread that does.
constexpr Microseconds LONGEST_SPIN{100}, SHORTEST_SPIN{10};
// Where there are more threads than processors, a waiting thread keeps another one from running at every barrier.
constexpr Microseconds CROWDED_SPIN{2};
constexpr int LOOKS_PER_CLOCK = 32;

}  // namespace

struct Pool::State {
    // Each on its own cache line: threads wait on `generation` while others count in `arrived`, `first` and `next`.
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> first{0};
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<uint32_t> region{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> stop{false};
    Call call = nullptr;
    void* body = nullptr;
    int threads = 1;
    bool crowded = false;
    Microseconds after_region{};
    long owner = process();
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> workers;

    // Either whoever changes the value sees the sleeper and wakes it, or the sleeper sees the change before it sleeps.
    void sleep_while(const std::atomic<uint32_t>& value, uint32_t seen) noexcept {
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return value.load() != seen; });
        sleepers.fetch_sub(1);
    }

    void change(std::atomic<uint32_t>& value) noexcept {
        value.fetch_add(1);
        if (sleepers.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
    }

    // Returns whether the value changes while this thread spins for so long.
    static bool changes(const std::atomic<uint32_t>& value, uint32_t seen, Microseconds spin) noexcept {
        auto until = Clock::now() + spin;
        do {
            for (int n = 0; n < LOOKS_PER_CLOCK; ++n) {
                if (value.load(std::memory_order_acquire) != seen) return true;
                pause();
            }
        } while (Clock::now() < until);
        return false;
    }

    void begin_items() noexcept {
        first.store(0, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed);
    }

    // spin: how long the thread spins before it sleeps.
    void meet(Microseconds& spin) noexcept {
        uint32_t before = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            // Nobody touches these before the generation tells them to go on.
            arrived.store(0, std::memory_order_relaxed);
            begin_items();
            if (threads > 1) change(generation);
            return;
        }
        if (changes(generation, before, spin)) return;
        spin = crowded ? CROWDED_SPIN : std::max(spin / 2, SHORTEST_SPIN);
        sleep_while(generation, before);
    }

    void end() noexcept {
        stop = true;
        change(region);
        for (std::thread& worker : workers) worker.join();
    }

    void work(int thread) noexcept {
        for (uint32_t seen = 0;;) {
            seen = await(seen);
            if (stop.load(std::memory_order_relaxed)) return;
            run(thread);
        }
    }

    void run(int thread) noexcept {
        budget() = crowded ? CROWDED_SPIN : LONGEST_SPIN;
        call(body, thread);
        meet(budget());
    }

    // The thread's own `spin`.
    static Microseconds& budget() noexcept {
        static thread_local Microseconds spin{};
        return spin;
    }

    // The number of the next region, or of none where the pool stops.
    uint32_t await(uint32_t seen) noexcept {
        if (!changes(region, seen, after_region)) sleep_while(region, seen);
        return region.load(std::memory_order_acquire);
    }
};

Pool::Pool(int threads, std::chrono::duration<double> spin) : threads_(threads), spin_(spin) { spawn(); }

Pool::~Pool() {
    // After a fork the workers exist in the parent only: nothing here may be waited for, or even destroyed.
    if (state_->owner != process()) return;
    state_->end();
    delete state_;
}

void Pool::spawn() {
    auto made = std::make_unique<State>();
    State* state = made.get();
    state->threads = threads_;
    state->crowded = threads_ > usable_processors();
    state->after_region = state->crowded ? CROWDED_SPIN : Microseconds(spin_);
    state->workers.reserve(threads_ - 1);
    try {
        for (int thread = 1; thread < threads_; ++thread) state->workers.emplace_back([=] { state->work(thread); });
    } catch (...) {  // the system starts no more: those that run must not outlive what they look at
        state->end();
        throw;
    }
    state_ = made.release();
}

void Pool::start(Call call, void* body) {
    if (state_->owner != process()) spawn();
    state_->call = call;
    state_->body = body;
    state_->begin_items();
    if (threads_ > 1) state_->change(state_->region);
    state_->run(0);
}

void Pool::barrier() noexcept { state_->meet(State::budget()); }

int Pool::take(int counter) noexcept {
    return (counter ? state_->next : state_->first).fetch_add(1, std::memory_order_relaxed);
}

}  // namespace sparsepack
