#include "decoder/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparsepack {
namespace {

constexpr int64_t RANGE = 4096;   // logits that are summed, or compared, at once
constexpr int SHARED_RANGES = 8;  // fewer take less time than waking the threads
constexpr double FIRST_DEPTH = 8;

// The largest, NaN if there is one.
float largest(const float* x, int64_t n) {
    constexpr int LANES = 16;
    float most[LANES];
    bool wrong = false;
    std::fill(most, most + LANES, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        bool here = false;
        for (int lane = 0; lane < LANES; ++lane) {
            float value = x[i + lane];
            most[lane] = value > most[lane] ? value : most[lane];
            here |= value != value;
        }
        wrong |= here;
    }
    for (; i < n; ++i) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        wrong |= x[i] != x[i];
    }
    return wrong ? std::numeric_limits<float>::quiet_NaN() : *std::max_element(most, most + LANES);
}

}  // namespace

int64_t Sampler::choose(const float* logits, int64_t n, const Sampling& how, Pool& pool, float* best) {
    // Of each range its largest; of many ranges by the threads that wrote the logits, and have them in their caches.
    largest_.resize((n + RANGE - 1) / RANGE);
    auto of_range = [&](int range, int) {
        int64_t first = range * RANGE;
        largest_[range] = largest(logits + first, std::min(RANGE, n - first));
    };
    const int ranges = int(largest_.size());
    if (ranges >= SHARED_RANGES)
        pool.run([&](int) { pool.share(ranges, of_range); });
    else
        for (int range = 0; range < ranges; ++range) of_range(range, 0);
    *best = largest(largest_.data(), ranges);
    if (!std::isfinite(*best)) return -1;
    if (how.temperature == 0) {
        int64_t first = (std::find(largest_.begin(), largest_.end(), *best) - largest_.begin()) * RANGE;
        return std::find(logits + first, logits + n, *best) - logits;
    }
    int64_t kept = how.top_k ? std::min(how.top_k, n) : n;
    double all = kept == n ? total(logits, n, *best, how.temperature, pool) : 0;
    // The likeliest tokens in order, as many as the choice needs: a deeper list if it is not among these.
    for (double depth = FIRST_DEPTH;; depth *= 2) {
        bool everything = depth > 1e4;
        list(logits, n, *best, how.temperature, everything ? -std::numeric_limits<double>::infinity() : -depth);
        int64_t listed = int64_t(candidates_.size());
        if (kept < n && listed < kept && !everything) continue;
        auto end = candidates_.begin() + std::min(kept, listed);
        std::partial_sort(candidates_.begin(), end, candidates_.end(),
                          [](const Candidate& a, const Candidate& b) { return a.z != b.z ? a.z > b.z : a.id < b.id; });
        cumulative_.clear();
        double sum = 0;
        for (auto at = candidates_.begin(); at != end; ++at) cumulative_.push_back(sum += std::exp(at->z));
        double whole = kept < n || everything ? sum : all, reach = whole;
        auto find = [&](double value) {
            return std::lower_bound(cumulative_.begin(), cumulative_.end(), value) - cumulative_.begin();
        };
        int64_t count = int64_t(cumulative_.size());
        bool complete = kept < n || everything;
        if (how.top_p < 1) {
            int64_t last = find(how.top_p * whole);
            if (last == count && !complete) continue;
            reach = cumulative_[std::min(last, count - 1)];
        }
        int64_t chosen = find(how.draw * reach);
        if (chosen == count && !complete) continue;
        return candidates_[std::min(chosen, count - 1)].id;
    }
}

// Tokens with z >= least.
void Sampler::list(const float* logits, int64_t n, float best, double temperature, double least) {
    candidates_.clear();
    // A little below the logit that has this z: cheap to compare, exact afterwards.
    double bound = double(best) + least * temperature * (1 + 1e-9);
    float limit = std::nextafter(float(bound), -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < n; ++i) {
        if (logits[i] < limit) continue;
        double z = (double(logits[i]) - double(best)) / temperature;
        if (z >= least) candidates_.push_back({z, int32_t(i)});
    }
}

// Sum of exp(z) over the vocabulary: ranges by any thread, added in order.
double Sampler::total(const float* logits, int64_t n, float best, double temperature, Pool& pool) {
    sums_.resize((n + RANGE - 1) / RANGE);
    pool.run([&](int) {
        pool.share(int(sums_.size()), [&](int range, int) {
            double sum = 0;
            for (int64_t i = range * RANGE; i < std::min(n, (range + 1) * RANGE); ++i)
                sum += std::exp((double(logits[i]) - double(best)) / temperature);
            sums_[range] = sum;
        });
    });
    double sum = 0;
    for (double part : sums_) sum += part;
    return sum;
}

}  // namespace sparsepack
