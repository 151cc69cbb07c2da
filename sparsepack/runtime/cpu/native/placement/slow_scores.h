// The scores of the slow policy (placement/policies.py), who is resident by them, and which neurons are to be swapped;
// and what the residents were worth to the tokens (placement/placement.py). No thread of its own: slow_policy.h has it.
//
// Bits are [blocks][neurons / 8], rounded up, bit i of byte b of neuron 8 b + i, and those beyond the neurons zero. They
// are counted in planes: bit k of the count of a neuron is in plane k, at the neuron's place.
#pragma once
#include "threads/pool.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace sparsepack {

struct SlowSettings {
    int32_t blocks, neurons;
    float decay, gain, margin;  // of a decision; a neuron that was active in a token gains this
    int32_t every, delay;       // tokens between two decisions, and from a decision until its first moves
    int32_t most;               // move after a token
};

struct SlowCounts {  // placement/placement.py, HitCounts
    int64_t tokens = 0, needed = 0, hits = 0, moves = 0, unused = 0;
};

// Neurons that get slots and that lose them: block * neurons + place in the block.
struct Moves {
    std::vector<int32_t> coming, going;
};

class SlowScores {
public:
    // score, resident, ties: [blocks][neurons], where a sequence begins; of two neurons with the same score the one with
    // the lower number in `ties` is the better one. threads: of a pool, of which share_among_threads tells.
    SlowScores(const SlowSettings& settings, const float* score, const bool* resident, const int32_t* ties,
               int threads);

    // A sequence begins.
    void begin_anew();

    // Whether the pool's threads share the blocks from here on, where there is a pool.
    void share_among_threads(bool together) { together_ = pool_ && together; }

    // Adds the bits of tokens, at most those of one decision, to the counts of all neurons, and, where they were
    // decoded, to those of hits: [tokens][blocks], rows of so many bytes.
    void count(const uint8_t* bits, int64_t row_bytes, int64_t tokens, bool decoded);

    // What `swaps` of placement/placement.py does, with the counts since the last decision: the best outside for the worst
    // resident, while it is better by the margin. The pairs, the best first; nobody has moved.
    Moves decide();

    // These have moved, before a token that is decoded or not.
    void apply(const Moves& moves, bool decoded);

    const SlowCounts& counts() const noexcept { return counts_; }

private:
    struct Found {
        int64_t needed, hits, coming, going;
    };
    struct Candidates {
        int32_t residents_below, others_from;  // of these levels
    };

    template <class Work>
    void for_blocks(Work&& work);
    void advance_scores();
    Candidates candidates() const;
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
    bool together_ = false;
    SlowCounts counts_;
};

}  // namespace sparsepack
