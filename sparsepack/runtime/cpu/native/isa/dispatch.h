// Which instruction sets this build has and this machine can run.
#pragma once
#include "kernels/kernels.h"
#include "quantise/balance.h"
#include "quantise/encode.h"
#include "quantise/q4_k.h"
#include "quantise/int8.h"
#include "quantise/q6_p.h"

#include <string>
#include <vector>

namespace sparsepack {

// Usable here, best first; "scalar", which runs everywhere, is the last.
std::vector<std::string> instruction_sets();

// The kernels of a usable instruction set; throws std::invalid_argument for any other name.
const Kernels& kernels(const std::string& name);

// What packs a model or quantises inputs, of one instruction set.
struct Encoders {
    Encode q4_k, q6_k, q6_p;
    QuantiseBand feedback_q4_k;
    QuantiseGroup feedback_q6_p;
    Balance balance;
    Int8Kernels int8;
};

// The encoders of a usable instruction set, or of the nearest one that has its own; throws as `kernels`.
Encoders encoders(const std::string& name);

}  // namespace sparsepack
