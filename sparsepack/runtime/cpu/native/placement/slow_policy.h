// The slow policy (placement/policies.py) on a thread of its own: the caller hands over who was active, and at a token
// boundary takes the moves that are due, which were decided some tokens before. All is a function of the tokens: where a
// decision is not there when it is due, the caller waits.
//
//     caller   saw(t) moves() | saw(t + 1) moves() | ...      | saw(t + delay) moves(): the best `most` of these
//     thread     counts t, decides ............... counts t + 1 ...                     | saw() moves(): the next ones
//
// Bits are [blocks][neurons / 8], rounded up, bit i of byte b of neuron 8 b + i, and those beyond the neurons zero. They
// are counted in planes: bit k of the count of a neuron is in plane k, at the neuron's place.
#pragma once
#include "threads/pool.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace sparsepack {

struct SlowSettings {
    int32_t blocks, neurons;
    float decay, gain, margin;  // of a decision; a neuron that was active in a token gains this
    int32_t every, delay;       // tokens between two decisions, and from a decision until its first moves
    int32_t most;               // move after a token
};

struct SlowCounts {  // placement/counts.py, HitCounts
    int64_t tokens = 0, needed = 0, hits = 0, moves = 0, unused = 0;
};

// Neurons that get slots and that lose them, ascending: block * neurons + place in the block.
struct Moves {
    std::vector<int32_t> coming, going;
};

// The calls come from one thread.
class SlowPolicy {
public:
    // score, resident, ties: [blocks][neurons], where a text begins; of two neurons with the same score the one with
    // the lower number in `ties` is the better one. threads: that share several tokens seen at once; one follows a text
    // token by token, while others compute.
    SlowPolicy(const SlowSettings& settings, const float* score, const bool* resident, const int32_t* ties,
               int threads);
    ~SlowPolicy();  // never after a fork
    // Whether its thread exists: after a fork it does in the parent alone.
    bool is_here() const noexcept;

    // A text begins.
    void restart();

    // Tokens passed, the first `prompt` of them not decoded: [tokens][blocks], rows of so many bytes. Their bits stay as they are until `ROOM` calls later: that
    // one waits for them.
    void saw(const uint8_t* bits, int64_t row_bytes, int64_t tokens, int64_t prompt);
    static constexpr size_t ROOM = 8;

    // The calls of `saw` whose bits are still read.
    size_t waiting();

    // What has moved since the last call, up to the token that was seen last, or so many `unseen` ones later, at most
    // `delay`; and whether it is what `ahead` said last.
    std::pair<Moves, bool> moves(int64_t unseen);

    // What `moves` will give next where it is decided already and no call said so before; it does not wait.
    Moves ahead();

    SlowCounts counts();

private:
    struct Job {
        const uint8_t* bits;
        int64_t row_bytes, tokens, prompt;
    };
    struct Found {
        int64_t needed, hits, coming, going;
    };
    struct Part {
        int64_t due;  // when so many tokens have been seen
        Moves moves;
    };
    struct Candidates {
        int32_t residents_below, others_from;  // of these levels
    };

    void work() noexcept;
    void begin_anew();
    void pass(const Job& job);
    int64_t until_next_change() const;
    void count(const uint8_t* bits, int64_t row_bytes, int64_t tokens, bool decoded);
    template <class Work>
    void for_blocks(Work&& work);
    Moves decide();
    std::vector<Part> parts_of(const Moves& pairs) const;
    int64_t due_at(int64_t seen) const;
    void advance_scores();
    Candidates candidates() const;
    void apply(const Moves& moves, bool decoded);
    void raise();
    bool bit(const std::vector<uint64_t>& bits, int32_t neuron) const;
    void set(std::vector<uint64_t>& bits, int32_t neuron, bool value) const;

    SlowSettings s_;
    int64_t row_words_;
    int32_t planes_;
    std::vector<float> first_score_, score_;
    std::vector<int32_t> ties_;
    std::vector<uint64_t> first_resident_, resident_, untouched_;  // [blocks][row_words_], zero beyond the neurons
    std::vector<uint64_t> counted_;                                // [blocks][planes_][row_words_]
    std::vector<uint16_t> places_;                                 // of each neuron, where in levels_ it is counted
    std::vector<int32_t> levels_;    // how many neurons have scores of each level: those outside, the residents
    std::vector<int32_t> by_block_;  // the same of each block
    std::vector<uint8_t> bytes_;     // of a block, for each thread: counts, residents
    std::vector<Found> found_;       // of each block
    std::unique_ptr<Pool> pool_;
    bool together_ = false;     // the pool's threads share the blocks
    int64_t passed_ = 0;        // tokens of the text
    std::deque<Part> pending_;  // decided, not yet in force
    SlowCounts counts_;

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
