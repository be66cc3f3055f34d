// The instruction sets that both the CPU and the operating system support.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace twostroke {

std::vector<std::string> available_isas();       // fastest first
const Kernels& find_kernels(const std::string& name);  // "auto", or a name of `available_isas`

}  // namespace twostroke
