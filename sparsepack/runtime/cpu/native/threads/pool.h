// Persistent worker threads. A region runs one function on all of them; within it they meet at barriers and take work
// items from a counter.
#pragma once
#include "system/system.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <type_traits>

namespace sparsepack {

// Longer than Python takes between two tokens, shorter than anyone notices.
constexpr std::chrono::microseconds SPIN_BETWEEN_REGIONS{80};

// Workers spin for some tens of microseconds after a region and then sleep: an idle pool costs no CPU. Regions come
// from one thread at a time. A process that forks may go on using its pool: the child starts workers of its own.
class Pool {
public:
    // spin: how long workers stay awake after a region. Throws std::system_error where so many do not start.
    explicit Pool(int threads, std::chrono::duration<double> spin = SPIN_BETWEEN_REGIONS);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const noexcept { return threads_; }

    // Calls body(thread) once per thread, thread 0 being the caller's, and returns when all have ended. The body must
    // not throw, so all memory that it needs is there before. What was written before the region is visible in it, and
    // what it wrote is visible after.
    template <class Body>
    void run(Body&& body) {
        start([](void* body, int thread) { (*static_cast<std::remove_reference_t<Body>*>(body))(thread); }, &body);
    }

    // In a region: waits until every thread of the pool is here. Begins the work items anew.
    void barrier() noexcept;

    // In a region: calls item(number, next) for each number below `items` that no other thread took since the last
    // barrier. `next` is the number that this thread takes afterwards, -1 for none: time to fetch its data ahead.
    //
    // The first items, one for each thread, are nobody's `next`: who comes early would take those of who comes late.
    template <class Item>
    void share(int items, Item&& item) noexcept {
        const int first = items < threads_ ? items : threads_;
        auto take_first = [&] {
            int number = take(0);
            return number < first ? number : -1;
        };
        auto take_next = [&] {
            int number = threads_ + take(1);
            return number < items ? number : -1;
        };
        int here = take_first();
        if (here < 0) here = take_next();
        while (here >= 0) {
            int next = take_next();
            item(here, next);
            here = next < 0 ? take_first() : next;
        }
    }

private:
    struct State;
    using Call = void (*)(void* body, int thread);

    void start(Call call, void* body);
    void spawn();
    int take(int counter) noexcept;  // 0: of first items; 1: of the others

    int threads_;
    std::chrono::duration<double> spin_;
    State* state_ = nullptr;
};

}  // namespace sparsepack
