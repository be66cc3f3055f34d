// Which instruction sets this machine and its system really offer.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace twostroke {

std::vector<std::string> available_isas();       // the best first
const Kernels& find_kernels(const std::string& name);  // "auto", or one of them

}  // namespace twostroke
