// Logits → tokens: `twostroke/exec/sampling.py` defines it; `exec/logits.py` does what is rare.
#pragma once

#include "kernels.h"

namespace twostroke {

struct SamplingParams {  // of one request
  float temperature, top_k, top_p, min_p, repetition, frequency, presence;
};

// One token from `logits` [vocab], which are overwritten. `history` are the tokens so far, of which
// the first `num_prompt` are the prompt's; the keys are `exec/rng.py`'s for this position.
// −1 if the logits are NaN or infinite.
int choose(const Kernels& kernels, float* logits, int vocab, const SamplingParams& params,
           const int32_t* history, int num_prompt, int length, uint32_t key0, uint32_t key1);

// Log-probabilities by `logits` [vocab]: the token's own first, then the `count` best in order, of
// equals the lowest token first. `ids` and `values` have room for 1 + count; `rank` is the token's.
void top_logprobs(const Kernels& kernels, const float* logits, int vocab, int token, int count,
                  int32_t* ids, float* values, int32_t* rank);

}  // namespace twostroke
