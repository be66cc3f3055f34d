// The product of one and of eight tokens with Q4, with prefetches from as many bytes ahead as each
// says: what `kernels_speed` finds a machine's `kAhead` with.
#pragma once

#include "../src/kernels.h"

struct Ahead {
  int bytes;  // 0: no prefetches
  decltype(twostroke::Kernels::matmul) matmul;
};

extern const Ahead kAheadOnAvx512[6];
