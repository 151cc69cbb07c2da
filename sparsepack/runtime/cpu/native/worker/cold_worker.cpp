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
// Between the blocks of a step the device computes for tens of microseconds, in a long text for hundreds: whoever sleeps
// then comes too late. Where there are more threads than processors, somebody else waits for the processor.
constexpr Seconds SPIN_IN_STEP{20e-3}, CROWDED_SPIN{2e-6};
// The threads stay awake so long after a step: longer than a caller takes between two tokens.
constexpr Seconds SPIN_AFTER_STEP{1e-3};
constexpr int32_t FIRST_RECORDS = 4;
// Whoever adds takes whole cache lines.
constexpr int64_t LINE = 16;           // floats
constexpr int32_t SPARE_COLUMNS = 16;  // kernels may read as many indices beyond the last

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

ColdWorker::ColdWorker(const Kernels& kernels, std::vector<const Neurons*> records, const HandOver& layout,
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
      crowded_(threads + 1 > int(std::thread::hardware_concurrency())),
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
            throw std::invalid_argument("records: expected as many, and as wide, as the hand-over has");
    of_gates_.resize(of_gates_.empty() ? records_.size() : of_gates_.size());
    if (of_gates_.size() != records_.size()) throw std::invalid_argument("gates: expected those of every block");
    bool any = false;
    for (const Gates* g : of_gates_) {
        if (g && (g->count != at_.neurons || g->bands * BAND_ROWS != at_.hidden))
            throw std::invalid_argument("gates: expected as many, and as wide, as the hand-over has");
        any |= g != nullptr;
    }
    if (products_.size() != at_.products.size())
        throw std::invalid_argument("products: expected those of the hand-over");
    int64_t floats = 0, columns = 0, kept = 0;
    int32_t block = 0;
    auto neurons_of = [&](int32_t block) {
        if (at_.neurons) requests_.push_back({block, -1});
    };
    for (size_t p = 0; p < products_.size(); ++p) {
        const AskedProduct& asked = at_.products[p];
        if (asked.block < block || asked.block >= at_.blocks || asked.columns != products_[p]->columns ||
            asked.rows != products_[p]->rows)
            throw std::invalid_argument("products: expected them by block, and the sizes that the hand-over has");
        for (; block < asked.block; ++block) neurons_of(block);
        requests_.push_back({block, int32_t(p)});
        int64_t slices = at_.sequences * most_slices(*products_[p], threads);
        floats = std::max(floats, slices * gemv_stride(*products_[p]));
        columns = std::max<int64_t>(columns, asked.columns);
        if (asked.skips) kept = columns;
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

void ColdWorker::begin(int32_t number, int32_t texts) {
    if (number < 1 || texts < 1 || texts > at_.sequences)
        throw std::invalid_argument("step: expected a number from 1 on, and texts that the hand-over has room for");
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
    texts_ = texts;
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
    const uint8_t* asked = this->asked(of);
    bool came = await(
        crowded_ ? CROWDED_SPIN : SPIN_IN_STEP, [&] { return acquire(asked) == number_; },
        [&](double so_far) {
            if (so_far > limit_) give_up(WORKER_WAITED);
            return leave_.load(std::memory_order_relaxed) || acquire(abort_word()) != GOES_ON;
        });
    int32_t count = 0;
    if (came && of.product < 0) {
        count = acquire(asked + at_.count);
        if (count < 0 || count > at_.neurons) give_up(BAD_REQUEST);
    }
    if (!came || acquire(abort_word()) != GOES_ON) {
        given_up_.store(true, std::memory_order_release);
        return false;
    }
    if (of.product >= 0) count = at_.products[of.product].columns;
    int64_t bytes = of.product < 0 ? count * neuron_stride(records_[of.block]) : zigzag_bytes(products_[of.product]);
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

// y [texts][hidden] = the sum over the thread's range of the listed neurons
void ColdWorker::compute(const Request& of, const Deal& deal, int thread, float* y) noexcept {
    const uint8_t* asked = this->asked(of);
    const Neurons& n = *records_[of.block];
    auto border = [&](int32_t thread) {  // a multiple of 8, as many as are multiplied together
        return thread == deal.threads ? deal.count : int32_t(int64_t(deal.count) * thread / deal.threads) & ~7;
    };
    int32_t first = border(thread), count = border(thread + 1) - first;
    const int32_t* indices = reinterpret_cast<const int32_t*>(asked + at_.indices) + first;
    const float* gates = reinterpret_cast<const float*>(asked + at_.gates) + first;
    const float* x = reinterpret_cast<const float*>(asked + at_.x);
    float* all = gates_.data();
    for (int32_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= at_.neurons) {
            give_up(BAD_REQUEST);
            count = 0;
            break;
        }
        for (int32_t text = 0; text < texts_ && !of_gates_[of.block]; ++text)
            all[int64_t(text) * at_.neurons + indices[i]] = gates[int64_t(text) * at_.neurons + i];
    }
    if (of_gates_[of.block]) {
        count = active_of(of, indices, count, x, thread);
        indices = own_[thread].active.data();
    }
    if (texts_ > 1) {
        NeuronsWork work = {&n, count, indices, x, all, texts_, y};
        kernels_.neuron_matmul(&work);
        return;
    }
    const int64_t stride = neuron_stride(&n);
    for (int32_t i = 0; i < std::min(count, FIRST_RECORDS); ++i)  // on their way while the input is made
        for (int64_t byte = 0; byte < stride; byte += 64) __builtin_prefetch(n.data + indices[i] * stride + byte);
    uint8_t* input = own_[thread].input.data();
    if (!of_gates_[of.block]) kernels_.neuron_input(x, n.bands, input);
    NeuronWork work = {&n, count, indices, all, input, y};
    kernels_.neuron_ffn(&work, nullptr);
}

// Those of the listed neurons that are active in any text, into the thread's own memory, and their gates into gates_.
int32_t ColdWorker::active_of(const Request& of, const int32_t* indices, int32_t count, const float* x,
                              int thread) noexcept {
    const Gates& g = *of_gates_[of.block];
    Own& own = own_[thread];
    const int64_t stride = neuron_input_stride(g.bands);
    for (int32_t text = 0; text < texts_; ++text)
        kernels_.neuron_input(x + int64_t(text) * at_.hidden, g.bands, own.input.data() + text * stride);
    float* products = own.products.data();
    GatesWork work = {&g, 0, count, indices, own.input.data(), texts_, products, at_.neurons};
    kernels_.gate_products(&work);
    int32_t active = 0;
    for (int32_t i = 0; i < count; ++i) {
        bool any = false;
        for (int32_t text = 0; text < texts_; ++text) {
            float product = products[int64_t(text) * at_.neurons + i];
            // Of what is not finite nothing is left out: it must show.
            float gate = product < 0 ? 0 : product;
            gates_.data()[int64_t(text) * at_.neurons + indices[i]] = gate;
            any |= gate != 0;
        }
        if (any) own.active.data()[active++] = indices[i];
    }
    return active;
}

void ColdWorker::answer_together(int32_t number, int thread) noexcept {
    const Request& of = requests_[number];
    const Deal& deal = deals_[number];
    int64_t floats = int64_t(texts_) * at_.hidden, stride = int64_t(at_.sequences) * at_.hidden;
    compute(of, deal, thread, partial_sums_.data() + thread * stride);
    Arrivals& at = arrivals_[number];
    arrive(at, deal);
    int64_t lines = floats / LINE, first = lines * thread / deal.threads * LINE;
    int64_t last = lines * (thread + 1) / deal.threads * LINE;
    float* y = reinterpret_cast<float*>(answer(of) + at_.y);
    kernels_.sum(partial_sums_.data() + first, stride, deal.threads, nullptr, int32_t(last - first), 0, y + first);
    if (at.added.fetch_add(1, std::memory_order_acq_rel) == deal.threads - 1) publish(of);
}

// y [texts][rows] = x [texts][columns] W^T. A text is multiplied as if it were alone; the weights of a slice stay in the
// cache meanwhile.
void ColdWorker::multiply_together(int32_t number, int thread) noexcept {
    const Request& of = requests_[number];
    const Deal& deal = deals_[number];
    const Zigzag& m = *products_[of.product];
    const AskedProduct& asked = at_.products[of.product];
    const float* x = reinterpret_cast<const float*>(memory_ + asked.x);
    const int32_t slices = product_slices(m, deal.threads), items = slices * spans(&m) * texts_;
    const int32_t tiles = (asked.columns + m.tile - 1) / m.tile;
    const int64_t stride = gemv_stride(m);
    auto border = [&](int32_t n) { return std::min(asked.columns, int32_t(int64_t(tiles) * n / slices) * m.tile); };
    Own& own = own_[thread];
    bool second = false;
    auto item = [&](int32_t at) {
        int64_t text = at % texts_;
        int32_t span = at / texts_ % spans(&m), slice = at / texts_ / spans(&m);
        int32_t first = border(slice), count = border(slice + 1) - first;
        const int32_t* indices = columns_.data() + first;
        if (asked.skips) {  // beside the list of the item before, which may still be read
            const float nothing = 0;
            int32_t* kept = own.kept.data() + (second ? int64_t(own.kept.size() / 2) : 0);
            const float* of_text = x + text * m.columns + first;
            count = kernels_.collect(of_text, nullptr, &nothing, 0, count, first, own.seen.data(), kept);
            std::fill_n(kept + count, SPARE_COLUMNS, first);
            indices = kept, second = !second;
        }
        float* y = slices_.data() + (int64_t(text) * slices + slice) * stride + int64_t(span) * m.span * QUAD_ROWS;
        return GemvWork{&m, span, count, indices, x + text * m.columns, y, true};
    };
    Arrivals& at = arrivals_[number];
    auto take = [&] { return at.taken.fetch_add(1, std::memory_order_relaxed); };
    bool fetched = false;
    for (int32_t here = take(); here < items;) {
        bool ahead = here + deal.threads < items;  // nobody holds one of the last items while others have none
        int32_t next = ahead ? take() : items;
        GemvWork now = item(here), after = next < items ? item(next) : now;
        now.cold = !fetched, fetched = next < items;
        kernels_.zigzag_gemv(&now, fetched ? &after : nullptr);
        here = ahead ? next : take();
    }
    arrive(at, deal);
    int64_t lines = (m.rows + LINE - 1) / LINE, first = lines * thread / deal.threads * LINE;
    int64_t last = std::min(m.rows, lines * (thread + 1) / deal.threads * LINE);
    float* y = reinterpret_cast<float*>(memory_ + asked.y);
    for (int32_t text = 0; text < texts_ && first < last; ++text)
        kernels_.sum(slices_.data() + int64_t(text) * slices * stride + first, stride, slices, nullptr,
                     int32_t(last - first), 0, y + int64_t(text) * m.rows + first);
    if (at.added.fetch_add(1, std::memory_order_acq_rel) == deal.threads - 1) publish(of);
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
