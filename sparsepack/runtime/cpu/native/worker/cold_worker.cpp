#include "worker/cold_worker.h"

#include "threads/products.h"
#include "worker/slices.h"
#include "worker/waiting.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

namespace sparsepack {
namespace {

// A thread more saves less than its arrival costs where each has fewer bytes than these, some microseconds of reading.
constexpr int64_t LEAST_BYTES = 64 << 10;
// Between the blocks of a step the device computes for tens of microseconds, in a long sequence for hundreds: whoever sleeps
// then comes too late. Where there are more threads than processors, somebody else waits for the processor.
constexpr Seconds SPIN_IN_STEP{20e-3}, CROWDED_SPIN{2e-6};
// The threads stay awake so long after a step: longer than a caller takes between two tokens.
constexpr Seconds SPIN_AFTER_STEP{1e-3};

}  // namespace

// The thread that is thread 0 of the pool, and what it and the caller tell each other.
struct ColdWorker::Leader {
    std::atomic<uint32_t> begun{0}, ended{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::condition_variable changed;
    std::thread thread;

    void change(std::atomic<uint32_t>& value) noexcept {
        std::lock_guard<std::mutex> lock(mutex);
        value.fetch_add(1, std::memory_order_release);
        changed.notify_all();
    }
    bool open() const noexcept {
        return begun.load(std::memory_order_acquire) != ended.load(std::memory_order_acquire);
    }
};

ColdWorker::ColdWorker(const Kernels& kernels, std::vector<const Neurons*> records, const Mailbox& layout,
                       uint8_t* memory, int threads, double limit, std::vector<const Zigzag*> products,
                       std::vector<const Gates*> gates)
    : kernels_(kernels),
      records_(std::move(records)),
      products_(std::move(products)),
      of_gates_(std::move(gates)),
      at_(layout),
      memory_(memory),
      threads_(threads),
      limit_(limit),
      crowded_(threads + 1 > usable_processors()),
      pool_(threads, SPIN_AFTER_STEP),
      owner_(process()),
      deals_(layout.blocks + layout.products.size()),
      arrivals_(layout.blocks + layout.products.size()),
      own_(threads),
      gates_(size_t(layout.sequences) * layout.neurons),
      partial_sums_(layout.neurons ? size_t(threads) * layout.sequences * layout.hidden : 0) {
    if (records_.size() != size_t(at_.neurons ? at_.blocks : 0))
        throw std::invalid_argument("records: expected those of every block");
    for (const Neurons* n : records_)
        if (n->count != at_.neurons || neuron_hidden(n) != at_.hidden)
            throw std::invalid_argument("records: expected as many, and as wide, as the mailbox has");
    of_gates_.resize(of_gates_.empty() ? records_.size() : of_gates_.size());
    if (of_gates_.size() != records_.size()) throw std::invalid_argument("gates: expected those of every block");
    bool any = false;
    for (const Gates* g : of_gates_) {
        if (g && (g->count != at_.neurons || g->bands * BAND_ROWS != at_.hidden))
            throw std::invalid_argument("gates: expected as many, and as wide, as the mailbox has");
        any |= g != nullptr;
    }
    if (products_.size() != at_.products.size()) throw std::invalid_argument("products: expected those of the mailbox");
    int64_t floats = 0, columns = 0, kept = 0;
    int32_t block = 0;
    auto neurons_of = [&](int32_t block) {
        if (at_.neurons) requests_.push_back({block, -1});
    };
    for (size_t p = 0; p < products_.size(); ++p) {
        const MailboxProduct& product = at_.products[p];
        if (product.block < block || product.block >= at_.blocks || product.columns != products_[p]->columns ||
            product.rows != products_[p]->rows)
            throw std::invalid_argument("products: expected them by block, and the sizes that the mailbox has");
        for (; block < product.block; ++block) neurons_of(block);
        requests_.push_back({block, int32_t(p)});
        int64_t slices = at_.sequences * most_slices(*products_[p], threads);
        floats = std::max(floats, slices * gemv_stride(*products_[p]));
        columns = std::max<int64_t>(columns, product.columns);
        bool planes = products_[p]->block == Q6_P;
        if (planes != (product.levels > 0))
            throw std::invalid_argument("products: expected levels where there are planes");
        if (product.begins < 0 || product.begins > (planes ? product.columns : 0))
            throw std::invalid_argument("products: expected to begin at a column of planes");
        if (product.skips || planes) kept = columns;
    }
    for (; block < at_.blocks; ++block) neurons_of(block);
    slices_.grow(floats);
    columns_.resize(columns + SPARE_COLUMNS);
    std::iota(columns_.begin(), columns_.end(), 0);
    for (Own& own : own_) {
        own.input.grow((any ? at_.sequences : 1) * neuron_input_stride(at_.hidden / BAND_ROWS));
        own.products.grow(any ? size_t(at_.sequences) * at_.neurons : 0);
        own.active.grow(any ? at_.neurons + SPARE_COLUMNS : 0);
        own.kept.grow(kept ? 2 * (kept + SPARE_COLUMNS) : 0);
        own.seen.grow(kept);
    }
    auto leader = std::make_unique<Leader>();
    Leader* led = leader.get();
    led->thread = std::thread([=] { lead(*led); });
    leader_ = leader.release();
}

ColdWorker::~ColdWorker() {
    if (owner_ != process()) return;  // after a fork the thread exists in the parent only, and what it holds stays held
    stop();
    leader_->thread.join();
    delete leader_;
}

void ColdWorker::begin(int32_t number, int32_t sequences) {
    if (number < 1 || sequences < 1 || sequences > at_.sequences)
        throw std::invalid_argument("step: expected a number from 1 on, and sequences that the mailbox has room for");
    if (owner_ != process()) {  // see ~ColdWorker
        auto leader = std::make_unique<Leader>();
        Leader* led = leader.get();
        led->thread = std::thread([=] { lead(*led); });
        leader_ = leader.release();
        owner_ = process();
    }
    leave_.store(true);
    while (leader_->open() && !leader_->stop.load()) std::this_thread::sleep_for(NAP);
    leave_.store(false);
    if (failed_.load() == INTERRUPTED) failed_.store(GOES_ON);
    if (acquire(abort_word()) == INTERRUPTED) release(abort_word(), GOES_ON);
    raise();
    number_ = number;
    sequences_ = sequences;
    leader_->change(leader_->begun);
}

bool ColdWorker::wait(int32_t number, double seconds) {
    if (number != number_) throw std::invalid_argument("step: expected the number of the one that began last");
    Leader& leader = *leader_;
    auto over = [&] { return !leader.open() || leader.stop.load(); };
    if (owner_ == process() && !over()) {
        std::unique_lock<std::mutex> lock(leader.mutex);
        if (!leader.changed.wait_for(lock, Seconds(seconds), over)) return false;
    }
    raise();
    return true;
}

void ColdWorker::interrupt() noexcept { give_up(INTERRUPTED); }

void ColdWorker::stop() noexcept {
    std::lock_guard<std::mutex> lock(leader_->mutex);
    leader_->stop.store(true);
    leave_.store(true);
    if (leader_->open()) release(abort_word(), INTERRUPTED);
    leader_->changed.notify_all();
}

void ColdWorker::raise() const {
    std::string who = "the worker of the offloaded neurons ", then = "; load the model again";
    if (leader_->stop.load() || owner_ != process()) throw std::runtime_error(who + "is gone" + then);
    int32_t failed = failed_.load() ? failed_.load() : acquire(abort_word());
    std::string limit = std::to_string(limit_);
    limit.erase(limit.find_last_not_of('0') + 1);
    switch (failed) {
        case GOES_ON: return;
        case INTERRUPTED: throw std::runtime_error("the step of the offloaded neurons was interrupted");
        case DEVICE_WAITED: throw std::runtime_error(who + "has not answered in time" + then);
        case WORKER_WAITED: throw std::runtime_error(who + "has waited " + limit + " s for the device" + then);
        default: throw std::runtime_error(who + "was asked for neurons that there are not" + then);
    }
}

// The first reason counts, on both sides.
void ColdWorker::give_up(int32_t reason) noexcept {
    int32_t none = GOES_ON;
    failed_.compare_exchange_strong(none, reason);
    none = GOES_ON;
    __atomic_compare_exchange_n(abort_word(), &none, reason, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

void ColdWorker::lead(Leader& leader) noexcept {
    for (uint32_t seen = 0;; ++seen) {
        auto called = [&] { return leader.begun.load(std::memory_order_acquire) != seen || leader.stop.load(); };
        Seconds spin = crowded_ ? CROWDED_SPIN : SPIN_AFTER_STEP;
        if (!await(spin, called, [&](double so_far) { return so_far > spin.count(); })) {
            std::unique_lock<std::mutex> lock(leader.mutex);
            leader.changed.wait(lock, called);
        }
        if (leader.stop.load()) return;
        step();
        leader.change(leader.ended);
    }
}

void ColdWorker::step() noexcept {
    for (Arrivals& at : arrivals_) {
        at.taken.store(0, std::memory_order_relaxed);
        at.computed.store(0, std::memory_order_relaxed);
        at.added.store(0, std::memory_order_relaxed);
    }
    dealt_.store(0, std::memory_order_relaxed);
    given_up_.store(false, std::memory_order_relaxed);
    pool_.run([this](int thread) { part(thread); });
}

void ColdWorker::part(int thread) noexcept {
    for (int32_t number = 0; number < int32_t(requests_.size()); ++number) {
        if (!(thread == 0 ? deal(number) : await_deal(number))) return;
        const Deal& deal = deals_[number];
        const Request& of = requests_[number];
        if (thread >= deal.threads) continue;
        auto start = Clock::now();
        if (of.product >= 0) {
            multiply_together(number, thread);
        } else if (deal.threads == 1) {
            compute(of, deal, thread, reinterpret_cast<float*>(answer(of) + at_.y));
            publish(of);
        } else {
            answer_together(number, thread);
        }
        if (thread == 0) {
            double taken = Seconds(Clock::now() - start).count();
            neurons_ += of.product < 0 ? deal.count : 0;
            (of.product < 0 ? seconds_ : product_seconds_) += taken;
        }
    }
}

// Awaits the device's request and says how many threads share it. False where the step is given up.
bool ColdWorker::deal(int32_t number) noexcept {
    const Request& of = requests_[number];
    const uint8_t* request = this->request(of);
    bool came = await(
        crowded_ ? CROWDED_SPIN : SPIN_IN_STEP, [&] { return acquire(request) == number_; },
        [&](double so_far) {
            if (so_far > limit_) give_up(WORKER_WAITED);
            return leave_.load(std::memory_order_relaxed) || acquire(abort_word()) != GOES_ON;
        });
    int32_t count = 0;
    if (came && of.product < 0) {
        count = acquire(request + at_.count);
        if (count < 0 || count > at_.neurons) give_up(BAD_REQUEST);
    }
    if (!came || acquire(abort_word()) != GOES_ON) {
        given_up_.store(true, std::memory_order_release);
        return false;
    }
    if (of.product >= 0) count = at_.products[of.product].columns;
    auto product_bytes = [](const Zigzag* m) { return m->block == Q6_P ? planes_bytes(m) : zigzag_bytes(m); };
    int64_t bytes = of.product < 0 ? count * neuron_stride(records_[of.block]) : product_bytes(products_[of.product]);
    if (of.product < 0 && of_gates_[of.block]) bytes += count * gate_stride(of_gates_[of.block]);
    deals_[number] = {count, count ? int32_t(std::clamp<int64_t>(bytes / LEAST_BYTES, 1, threads_)) : 0};
    dealt_.store(number + 1, std::memory_order_release);
    return true;
}

// Every request that was dealt out is computed, so that nobody waits in vain for a thread's arrival.
bool ColdWorker::await_deal(int32_t number) noexcept {
    auto dealt = [&] { return dealt_.load(std::memory_order_acquire) > number; };
    return await(crowded_ ? CROWDED_SPIN : SPIN_IN_STEP, dealt,
                 [&](double) { return given_up_.load(std::memory_order_acquire); });
}

// Waits until all threads that a request is dealt to have computed.
void ColdWorker::arrive(Arrivals& at, const Deal& deal) noexcept {
    at.computed.fetch_add(1, std::memory_order_acq_rel);
    auto all = [&] { return at.computed.load(std::memory_order_acquire) == deal.threads; };
    await(crowded_ ? CROWDED_SPIN : SPIN_IN_STEP, all, [](double) { return false; });
}

void ColdWorker::publish(const Request& of) noexcept {
    if (acquire(abort_word()) == GOES_ON) release(answer(of), number_);
}

}  // namespace sparsepack
