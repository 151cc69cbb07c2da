#include "placement/slow_policy.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <unordered_map>

namespace sparsepack {
namespace {

// While a sequence goes on, the thread looks for tokens this often; for so long after one. Waking it would cost the caller
// more than all else that it does here.
constexpr std::chrono::microseconds LOOK{200};
constexpr std::chrono::milliseconds AWAKE{200};

// The moves of several decisions, one after the other, as one.
Moves net_of(std::vector<Moves> all) {
    if (all.size() == 1) return std::move(all.front());
    std::unordered_map<int32_t, int32_t> change;
    for (const Moves& each : all) {
        for (int32_t neuron : each.coming) ++change[neuron];
        for (int32_t neuron : each.going) --change[neuron];
    }
    Moves net;
    for (auto [neuron, by] : change) {
        if (by > 0) net.coming.push_back(neuron);
        if (by < 0) net.going.push_back(neuron);
    }
    std::sort(net.coming.begin(), net.coming.end());
    std::sort(net.going.begin(), net.going.end());
    return net;
}

}  // namespace

SlowPolicy::SlowPolicy(const SlowSettings& settings, const float* score, const bool* resident, const int32_t* ties,
                       int threads)
    : s_(settings), scores_(settings, score, resident, ties, threads), owner_(process()) {
    thread_ = std::thread([this] { work(); });
}

SlowPolicy::~SlowPolicy() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        has_jobs_.store(true);
        changed_.notify_all();
    }
    thread_.join();
}

bool SlowPolicy::is_here() const noexcept { return owner_ == process(); }

void SlowPolicy::restart() {
    raise();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty() || failed_; });
    scores_.begin_anew();
    pending_.clear();
    decided_.clear();
    passed_ = decisions_ = seen_ = 0;
    is_told_ = false;
}

void SlowPolicy::saw(const uint8_t* bits, int64_t row_bytes, int64_t tokens, int64_t prompt) {
    raise();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.size() < ROOM || failed_; });
    jobs_.push_back({bits, row_bytes, tokens, prompt});
    has_jobs_.store(true);
    seen_ += tokens;
    if (is_asleep_) changed_.notify_all();
}

size_t SlowPolicy::waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.size();
}

std::pair<Moves, bool> SlowPolicy::moves(int64_t unseen) {
    raise();
    const int64_t until = seen_ + unseen;
    std::vector<Moves> taken;
    bool as_told = false;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return decisions_ >= due_at(until) || failed_; });
        while (!decided_.empty() && decided_.front().due <= until) {
            as_told = is_told_ && taken.empty();
            is_told_ = false;
            taken.push_back(std::move(decided_.front().moves));
            decided_.pop_front();
        }
    }
    raise();
    if (taken.empty()) return {};
    return {net_of(std::move(taken)), as_told};
}

Moves SlowPolicy::ahead() {
    raise();
    std::lock_guard<std::mutex> lock(mutex_);
    if (decided_.empty() || is_told_) return {};
    is_told_ = true;
    return decided_.front().moves;
}

// Of how many decisions the first moves are due when so many tokens have been seen.
int64_t SlowPolicy::due_at(int64_t seen) const { return seen < s_.delay ? 0 : (seen - s_.delay) / s_.every; }

SlowCounts SlowPolicy::counts() {
    raise();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty() || failed_; });
    return scores_.counts();
}

void SlowPolicy::raise() {
    if (!is_here()) throw std::runtime_error("the thread of the policy is gone; load the model again");
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) std::rethrow_exception(failed_);
}

void SlowPolicy::work() noexcept {
    for (;;) {
        Job job;
        auto called = [&] { return stop_ || !jobs_.empty(); };
        for (auto until = Clock::now() + AWAKE; !has_jobs_.load() && Clock::now() < until;)
            std::this_thread::sleep_for(LOOK);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            is_asleep_ = true;
            changed_.wait(lock, called);
            is_asleep_ = false;
            if (stop_) return;
            job = jobs_.front();
        }
        try {
            pass(job);
        } catch (...) {  // no memory
            std::lock_guard<std::mutex> lock(mutex_);
            failed_ = std::current_exception();
            changed_.notify_all();
            return;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        jobs_.pop_front();
        has_jobs_.store(!jobs_.empty());
        changed_.notify_all();
    }
}

void SlowPolicy::pass(const Job& job) {
    scores_.share_among_threads(job.tokens > s_.every);
    for (int64_t token = 0; token < job.tokens;) {
        bool decoded = token >= job.prompt;
        int64_t last = decoded ? job.tokens : std::min(job.prompt, job.tokens);
        int64_t tokens = std::min(last - token, until_next_change());
        scores_.count(job.bits + token * s_.blocks * job.row_bytes, job.row_bytes, tokens, decoded);
        passed_ += tokens;
        token += tokens;
        if (passed_ % s_.every == 0) {
            std::vector<Part> parts = parts_of(scores_.decide());
            pending_.assign(parts.begin(), parts.end());
            std::lock_guard<std::mutex> lock(mutex_);
            if (stop_) return;
            std::move(parts.begin(), parts.end(), std::back_inserter(decided_));
            ++decisions_;
            changed_.notify_all();
        }
        if (!pending_.empty() && pending_.front().due == passed_) {
            scores_.apply(pending_.front().moves, decoded);
            pending_.pop_front();
        }
    }
}

int64_t SlowPolicy::until_next_change() const {
    return pending_.empty() ? s_.every - passed_ % s_.every : pending_.front().due - passed_;
}

// The pairs of a decision, the best first, as they move after one token and the next ones.
std::vector<SlowPolicy::Part> SlowPolicy::parts_of(const Moves& pairs) const {
    std::vector<Part> parts;
    const size_t all = pairs.coming.size(), most = s_.most, room = s_.every - s_.delay;
    for (size_t first = 0; first < all && parts.size() < room; first += most) {
        auto some = [&](const std::vector<int32_t>& of) {
            std::vector<int32_t> part(of.begin() + first, of.begin() + std::min(first + most, all));
            std::sort(part.begin(), part.end());
            return part;
        };
        int64_t due = passed_ + s_.delay + int64_t(parts.size());
        parts.push_back({due, {some(pairs.coming), some(pairs.going)}});
    }
    return parts;
}

}  // namespace sparsepack
