// Sampling: chooses tokens from logits. The torch sampler of the Python package defines the results, and
// `exec/logits.py` applies the rare options.
#pragma once

#include "kernels.h"

namespace twostroke {

struct SamplingParams {  // of one request
  float temperature, top_k, top_p, min_p, repetition, frequency, presence;
};

struct History {  // the tokens of one request
  const int32_t* tokens;
  int num_prompt, length;
};

struct RandomKey {  // from `exec/rng.py`, for one position
  uint32_t key0, key1;
};

// Choose one token from `logits` [vocab], which are overwritten. Return −1 if the logits are NaN or
// infinite.
int choose(const Kernels& kernels, float* logits, int vocab, const SamplingParams& params,
           const History& history, RandomKey key);

// Write the log-probability of `token`, then the `count` best in order (equal ones by token id). `ids` and
// `values` have room for 1 + count. `rank` is the rank of `token`.
void top_logprobs(const Kernels& kernels, const float* logits, int vocab, int token, int count,
                  int32_t* ids, float* values, int32_t* rank);

}  // namespace twostroke
