// The slow policy (placement/policies.py) on a thread of its own: the caller hands over who was active, and at a token
// boundary takes the moves that are due, which were decided some tokens before. All is a function of the tokens: where a
// decision is not there when it is due, the caller waits.
//
//     caller   saw(t) moves() | saw(t + 1) moves() | ...      | saw(t + delay) moves(): the best `most` of these
//     thread     counts t, decides ............... counts t + 1 ...                     | saw() moves(): the next ones
#pragma once
#include "placement/slow_scores.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace sparsepack {

// The calls come from one thread.
class SlowPolicy {
public:
    // score, resident, ties: as SlowScores takes them. threads: that share several tokens seen at once; one follows a
    // sequence token by token, while others compute.
    SlowPolicy(const SlowSettings& settings, const float* score, const bool* resident, const int32_t* ties,
               int threads);
    ~SlowPolicy();  // never after a fork
    // Whether its thread exists: after a fork it does in the parent alone.
    bool is_here() const noexcept;

    // A sequence begins.
    void restart();

    // Tokens passed, the first `prompt` of them not decoded: [tokens][blocks], rows of so many bytes. Their bits stay as
    // they are until `ROOM` calls later: that one waits for them.
    void saw(const uint8_t* bits, int64_t row_bytes, int64_t tokens, int64_t prompt);
    static constexpr size_t ROOM = 8;

    // The calls of `saw` whose bits are still read.
    size_t waiting();

    // What has moved since the last call, up to the token that was seen last, or so many `unseen` ones later, at most
    // `delay`, ascending; and whether it is what `ahead` said last.
    std::pair<Moves, bool> moves(int64_t unseen);

    // What `moves` will give next where it is decided already and no call said so before; it does not wait.
    Moves ahead();

    SlowCounts counts();

private:
    struct Job {
        const uint8_t* bits;
        int64_t row_bytes, tokens, prompt;
    };
    struct Part {
        int64_t due;  // when so many tokens have been seen
        Moves moves;
    };

    void work() noexcept;
    void pass(const Job& job);
    int64_t until_next_change() const;
    std::vector<Part> parts_of(const Moves& pairs) const;
    int64_t due_at(int64_t seen) const;
    void raise();

    SlowSettings s_;
    SlowScores scores_;         // this and the next two are the thread's own while it has jobs
    int64_t passed_ = 0;        // tokens of the sequence
    std::deque<Part> pending_;  // decided, not yet in force

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;      // the first one is under way
    std::deque<Part> decided_;  // and not yet taken
    bool is_told_ = false;      // `ahead` has told of the first one
    int64_t decisions_ = 0;     // so far
    int64_t seen_ = 0;          // tokens, by the caller
    bool stop_ = false, is_asleep_ = false;
    std::atomic<bool> has_jobs_{false};  // looked at without the mutex
    std::exception_ptr failed_;
    long owner_;
    std::thread thread_;
};

}  // namespace sparsepack
