// Compiled without fused multiplications: scores have the bits of placement/policies.py, which is the oracle.
#include "placement/slow_scores.h"

#include <string.h>

#include <algorithm>
#include <numeric>

namespace sparsepack {
namespace {

constexpr int32_t WORD = 64, AT_ONCE = 8;  // bits; words
// Scores are shares of tokens; a level has those of so small a part of all that few can be swapped in vain.
constexpr int32_t LEVELS = 4096;

int64_t ones(uint64_t x) noexcept {  // no machine needs an instruction for it
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return int64_t(x * 0x0101010101010101u >> 56);
}

int32_t level(float score) noexcept { return std::clamp(int32_t(score * LEVELS), 0, LEVELS - 1); }

int32_t planes_for(int32_t most) {
    int32_t planes = 1;
    while (most >> planes) ++planes;
    return planes;
}

// Bits of a byte, each as a byte: bit i in byte i of the word.
struct Spread {
    uint64_t of[256];
    Spread() {
        for (int byte = 0; byte < 256; ++byte) {
            of[byte] = 0;
            for (int i = 0; i < 8; ++i) of[byte] |= uint64_t(byte >> i & 1) << 8 * i;
        }
    }
};

}  // namespace

SlowScores::SlowScores(const SlowSettings& settings, const float* score, const bool* resident, const int32_t* ties,
                       int threads)
    : s_(settings),
      row_words_((settings.neurons + WORD * AT_ONCE - 1) / (WORD * AT_ONCE) * AT_ONCE),
      planes_(planes_for(settings.every)) {
    int64_t all = int64_t(s_.blocks) * s_.neurons;
    first_score_.assign(score, score + all);
    ties_.assign(ties, ties + all);
    first_resident_.assign(s_.blocks * row_words_, 0);
    for (int32_t neuron = 0; neuron < all; ++neuron) set(first_resident_, neuron, resident[neuron]);
    if (threads > 1) pool_ = std::make_unique<Pool>(threads);
    bytes_.assign(2 * row_words_ * WORD * threads, 0);
    by_block_.assign(int64_t(2) * LEVELS * s_.blocks, 0);
    found_.assign(s_.blocks, {});
    begin_anew();
}

void SlowScores::begin_anew() {
    score_ = first_score_;
    resident_ = first_resident_;
    untouched_.assign(s_.blocks * row_words_, 0);
    counted_.assign(s_.blocks * planes_ * row_words_, 0);
    counts_ = {};
    levels_.assign(2 * LEVELS, 0);
    places_.assign(score_.size(), 0);
}

// Calls work(block, thread) for each block.
template <class Work>
void SlowScores::for_blocks(Work&& work) {
    if (!together_) {
        for (int32_t block = 0; block < s_.blocks; ++block) work(block, 0);
        return;
    }
    pool_->run([&](int thread) { pool_->share(s_.blocks, [&](int block, int) { work(block, thread); }); });
}

void SlowScores::count(const uint8_t* bits, int64_t row_bytes, int64_t tokens, bool decoded) {
    const int64_t bytes = (s_.neurons + 7) / 8;
    for_blocks([&](int32_t block, int) {
        uint64_t* planes = counted_.data() + block * planes_ * row_words_;
        const uint64_t* resident = resident_.data() + block * row_words_;
        uint64_t* untouched = untouched_.data() + block * row_words_;
        Found found = {};
        for (int64_t token = 0; token < tokens; ++token) {
            const uint8_t* row = bits + (token * s_.blocks + block) * row_bytes;
            for (int64_t first = 0; first < row_words_; first += AT_ONCE) {
                uint64_t active[AT_ONCE] = {}, carry[AT_ONCE];
                memcpy(active, row + 8 * first, std::min<int64_t>(sizeof active, bytes - 8 * first));
                memcpy(carry, active, sizeof active);
                for (int32_t plane = 0; plane < planes_; ++plane) {
                    uint64_t* sums = planes + plane * row_words_ + first;
                    for (int i = 0; i < AT_ONCE; ++i) {
                        uint64_t sum = sums[i];
                        sums[i] = sum ^ carry[i];
                        carry[i] &= sum;
                    }
                }
                if (!decoded) continue;
                for (int i = 0; i < AT_ONCE; ++i) {
                    untouched[first + i] &= ~active[i];
                    found.needed += ones(active[i]);
                    found.hits += ones(active[i] & resident[first + i]);
                }
            }
        }
        found_[block] = found;
    });
    if (!decoded) return;
    counts_.tokens += tokens;
    for (const Found& found : found_) {
        counts_.needed += found.needed;
        counts_.hits += found.hits;
    }
}

// S = decay S + gain counts, and the counts begin anew. The loops are plain so that compilers make vectors of them.
void SlowScores::advance_scores() {
    static const Spread spread;
    const float decay = s_.decay, gain = s_.gain;
    const int32_t n = s_.neurons;
    for_blocks([&](int32_t block, int thread) {
        uint64_t* planes = counted_.data() + block * planes_ * row_words_;
        const uint64_t* resident = resident_.data() + block * row_words_;
        uint8_t *counts = bytes_.data() + 2 * row_words_ * WORD * thread, *there = counts + row_words_ * WORD;
        for (int64_t byte = 0; byte < row_words_ * 8; ++byte) {
            auto eight = [&](uint64_t word) { return uint8_t(word >> byte % 8 * 8); };
            uint64_t sum = 0, is_there = spread.of[eight(resident[byte / 8])];
            for (int32_t plane = 0; plane < planes_; ++plane)
                sum |= spread.of[eight(planes[plane * row_words_ + byte / 8])] << plane;
            memcpy(counts + 8 * byte, &sum, 8);
            memcpy(there + 8 * byte, &is_there, 8);
        }
        float* score = score_.data() + int64_t(block) * n;
        uint16_t* places = places_.data() + int64_t(block) * n;
        int32_t* levels = by_block_.data() + int64_t(2) * LEVELS * block;
        std::fill(levels, levels + 2 * LEVELS, 0);
        for (int32_t i = 0; i < n; ++i) score[i] = score[i] * decay + gain * float(counts[i]);
        for (int32_t i = 0; i < n; ++i) places[i] = uint16_t(level(score[i]) + there[i] * LEVELS);
        for (int32_t i = 0; i < n; ++i) ++levels[places[i]];
        std::fill(planes, planes + planes_ * row_words_, 0);
    });
    std::fill(levels_.begin(), levels_.end(), 0);
    for (int32_t block = 0; block < s_.blocks; ++block)
        for (int32_t i = 0; i < 2 * LEVELS; ++i) levels_[i] += by_block_[int64_t(2) * LEVELS * block + i];
}

// Which neurons can be swapped at all, by their levels. In a pair the one outside is at most `less` levels below the
// level of the resident and the margin; and no resident of level l is in a pair where there are as many residents below
// l as others that could be in a pair with it; likewise the other way round.
SlowScores::Candidates SlowScores::candidates() const {
    constexpr int32_t less = 1;  // rounded down, both of them
    const int32_t margin = level(s_.margin);
    std::vector<int64_t> below(LEVELS + 1), above(LEVELS + 1);  // residents below a level, others from it on
    for (int32_t l = 0; l < LEVELS; ++l) below[l + 1] = below[l] + levels_[LEVELS + l];
    for (int32_t l = LEVELS - 1; l >= 0; --l) above[l] = above[l + 1] + levels_[l];
    Candidates found = {0, LEVELS - 1};
    auto others = [&](int32_t l) { return above[std::clamp(l + margin - less, 0, LEVELS - 1)]; };
    while (found.residents_below < LEVELS && below[found.residents_below] < others(found.residents_below))
        ++found.residents_below;
    auto residents = [&](int32_t l) { return below[std::clamp(l - margin + less, 0, int32_t(LEVELS))]; };
    while (found.others_from > 0 && above[found.others_from] < residents(found.others_from)) --found.others_from;
    return found;
}

// What `swaps` of placement/placement.py does: the best outside for the worst resident, while it is better by the margin.
Moves SlowScores::decide() {
    advance_scores();
    Candidates can = candidates();
    const int32_t first = can.others_from, last = LEVELS + can.residents_below, n = s_.neurons;
    Found all = {};
    for (int32_t block = 0; block < s_.blocks; ++block) {
        const int32_t* levels = by_block_.data() + int64_t(2) * LEVELS * block;
        found_[block] = all;  // where those of the block begin
        all.coming += std::accumulate(levels + first, levels + LEVELS, int64_t(0));
        all.going += std::accumulate(levels + LEVELS, levels + last, int64_t(0));
    }
    std::vector<int32_t> coming(all.coming), going(all.going);
    for_blocks([&](int32_t block, int) {
        const uint16_t* places = places_.data() + int64_t(block) * n;
        Found to = found_[block];
        for (int32_t begin = 0; begin < n; begin += WORD) {
            int32_t end = std::min(begin + WORD, n);
            uint16_t any = 0;
            for (int32_t i = begin; i < end; ++i) any |= uint16_t(places[i] - first) < uint16_t(last - first);
            for (int32_t i = begin; i < end && any; ++i) {
                if (places[i] >= first && places[i] < LEVELS) coming[to.coming++] = block * n + i;
                if (places[i] >= LEVELS && places[i] < last) going[to.going++] = block * n + i;
            }
        }
    });
    auto better = [&](int32_t a, int32_t b) {
        return score_[a] != score_[b] ? score_[a] > score_[b] : ties_[a] < ties_[b];
    };
    std::sort(coming.begin(), coming.end(), better);
    std::sort(going.begin(), going.end(), [&](int32_t a, int32_t b) { return better(b, a); });
    size_t most = std::min(coming.size(), going.size()), pairs = 0;
    while (pairs < most && score_[coming[pairs]] > score_[going[pairs]] + s_.margin) ++pairs;
    coming.resize(pairs);
    going.resize(pairs);
    return {std::move(coming), std::move(going)};
}

void SlowScores::apply(const Moves& moves, bool decoded) {
    for (int32_t neuron : moves.going) {
        set(resident_, neuron, false);
        if (!decoded) continue;
        counts_.unused += bit(untouched_, neuron);
        set(untouched_, neuron, false);
    }
    for (int32_t neuron : moves.coming) {
        set(resident_, neuron, true);
        if (decoded) set(untouched_, neuron, true);
    }
    if (decoded) counts_.moves += int64_t(moves.coming.size());
}

bool SlowScores::bit(const std::vector<uint64_t>& bits, int32_t neuron) const {
    int32_t place = neuron % s_.neurons;
    return bits[neuron / s_.neurons * row_words_ + place / WORD] >> place % WORD & 1;
}

void SlowScores::set(std::vector<uint64_t>& bits, int32_t neuron, bool value) const {
    int32_t place = neuron % s_.neurons;
    uint64_t &word = bits[neuron / s_.neurons * row_words_ + place / WORD], mask = uint64_t(1) << place % WORD;
    word = value ? word | mask : word & ~mask;
}

}  // namespace sparsepack
