// Which instruction sets this build has and this machine can run.
#pragma once
#include "kernels/kernels.h"

#include <string>
#include <vector>

namespace sparsepack {

// Usable here, best first; "scalar", which runs everywhere, is the last.
std::vector<std::string> instruction_sets();

// The kernels of a usable instruction set; throws std::invalid_argument for any other name.
const Kernels& kernels(const std::string& name);

}  // namespace sparsepack
