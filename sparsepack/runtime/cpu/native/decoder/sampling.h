// The next token from the logits: what runtime/generation/sampling.py chooses, without putting the whole vocabulary in
// order.
#pragma once
#include "threads/pool.h"

#include <stdint.h>

#include <vector>

namespace sparsepack {

// As in runtime/generation/sampling.py. `draw` in [0, 1) decides; greedy choice needs none.
struct Sampling {
    double temperature;  // 0: the likeliest, the lowest id of equals
    int64_t top_k;       // 0: all
    double top_p;        // 1: all
    double draw;
};

class Sampler {
public:
    // A token id; -1 where the largest logit (`best`) is no finite number. logits: [n].
    int64_t choose(const float* logits, int64_t n, const Sampling& how, Pool& pool, float* best);

private:
    struct Candidate {
        double z;  // (logit - best) / temperature
        int32_t id;
    };

    void list(const float* logits, int64_t n, float best, double temperature, double least);
    double total(const float* logits, int64_t n, float best, double temperature, Pool& pool);

    std::vector<Candidate> candidates_;
    std::vector<float> largest_;  // of each range
    std::vector<double> cumulative_, sums_;
};

}  // namespace sparsepack
