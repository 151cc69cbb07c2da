#include "threads/pool.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace sparsepack {

void pause() noexcept {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

long process() noexcept {
#if defined(_WIN32)
    return 0;
#else
    return getpid();
#endif
}

namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr int PAUSES_PER_CLOCK = 32;

// How long a thread spins at a barrier before it sleeps. Others may well be busy for the longest of these; but where
// another process holds a processor, whoever spins may keep the very thread that it waits for from running. So each
// time in vain halves what a thread spins in the rest of the region.
constexpr Microseconds LONGEST_SPIN{400}, SHORTEST_SPIN{10};
// Where there are more threads than processors, a waiting thread keeps another one from running at every barrier.
constexpr Microseconds CROWDED_SPIN{2};

int pauses(Microseconds time) {
    static const double per_microsecond = [] {
        constexpr int SOME = 2000;
        double best = 1;
        for (int attempt = 0; attempt < 5; ++attempt) {
            auto start = Clock::now();
            for (int n = 0; n < SOME; ++n) pause();
            best = std::max(best, SOME / Microseconds(Clock::now() - start).count());
        }
        return best;
    }();
    return int(time.count() * per_microsecond) + 1;
}

}  // namespace

struct Pool::State {
    // Each on its own cache line: threads wait on `generation` while others count in `arrived` and `next`.
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<uint32_t> region{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> stop{false};
    Call call = nullptr;
    void* body = nullptr;
    int threads = 1;
    bool crowded = false;
    std::chrono::duration<double> spin{};
    int longest = pauses(LONGEST_SPIN), shortest = pauses(SHORTEST_SPIN);
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

    // spins: how often the thread looks before it sleeps.
    void meet(int& spins) noexcept {
        uint32_t before = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            // Nobody touches these two before the generation tells them to go on.
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            if (threads > 1) change(generation);
            return;
        }
        for (int spin = 0; spin < spins; ++spin) {
            if (generation.load(std::memory_order_acquire) != before) return;
            pause();
        }
        spins = std::max(spins / 2, shortest);
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
        budget() = longest;
        call(body, thread);
        meet(budget());
    }

    // The thread's own `spins`.
    static int& budget() noexcept {
        static thread_local int spins = 0;
        return spins;
    }

    // The number of the next region, or of none where the pool stops.
    uint32_t await(uint32_t seen) noexcept {
        auto until = Clock::now() + spin;
        do {
            for (int n = 0; n < PAUSES_PER_CLOCK; ++n) {
                uint32_t now = region.load(std::memory_order_acquire);
                if (now != seen) return now;
                pause();
            }
        } while (!crowded && Clock::now() < until);
        sleep_while(region, seen);
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
    state->spin = spin_;
    unsigned processors = std::thread::hardware_concurrency();
    if (processors && threads_ > static_cast<int>(processors)) {
        state->crowded = true;
        state->longest = state->shortest = pauses(CROWDED_SPIN);
    }
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
    state_->next.store(0, std::memory_order_relaxed);
    if (threads_ > 1) state_->change(state_->region);
    state_->run(0);
}

void Pool::barrier() noexcept { state_->meet(State::budget()); }

int Pool::take() noexcept { return state_->next.fetch_add(1, std::memory_order_relaxed); }

}  // namespace sparsepack
