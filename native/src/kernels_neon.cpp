#define TS_NEON
#include <arm_neon.h>

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace twostroke {
namespace neon {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"

#include "half_attention.h"
#include "half_products.h"
}  // namespace neon

const Kernels kNeon = {
    "neon",
    neon::W,
    true,
    neon::matmul_any,
    neon::quantise,
    neon::quantise_rest,
    neon::rms_norm,
    neon::rope,
    neon::silu_mul,
    neon::to_half,
    neon::unpack_row_any,
    {kQueries, prefill_scratch_floats, neon::attend_prefill},
    neon::attend_decode,
    neon::prefetch_keys,
    neon::argmax,
    neon::log_sum_exp,
    neon::draw,
    neon::dot_bytes,
    {},
    {neon::kMostDim,
     {kQueries, neon::half_scratch_floats, neon::attend_prefill_halves},
     neon::attend_decode_halves,
     neon::to_halves,
     neon::multiply_halves},
};
}  // namespace twostroke
