// Matmuls of one and of eight tokens with Q4 for several prefetch distances. `kernels_speed` uses them to
// find the best `kPrefetchBytes` of a machine.
#pragma once

#include "../src/kernels.h"

struct Ahead {
  int bytes;  // prefetch distance; 0: none
  decltype(twostroke::Kernels::matmul) matmul;
};

extern const Ahead kAheadOnAvx512[6];
