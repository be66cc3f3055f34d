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

#include "fp16_attention.h"
#include "int8_attention.h"
#include "fp16_products.h"
}  // namespace neon

const Kernels kNeon = {
    "neon",
    neon::W,
    true,
    neon::matmul_any,
    neon::quantise,
    neon::quantise_residual,
    neon::rms_norm,
    neon::layer_norm,
    neon::rope,
    neon::silu_mul,
    neon::gelu_tanh_mul,
    neon::gelu_mul,
    neon::clamped_swiglu,
    neon::soft_cap,
    neon::to_fp16,
    neon::unpack_row_any,
    {kQueries, prefill_scratch_floats, neon::attend_prefill},
    {kQueries, prefill_scratch_floats, neon::attend_prefill_of<float>},
    neon::attend_decode,
    {{kQueries, prefill_scratch_floats, neon::attend_prefill_of<int8_t>}, neon::attend_decode_of<int8_t>},
    neon::prefetch_keys,
    neon::argmax,
    neon::log_sum_exp,
    neon::draw,
    neon::dot_bytes,
    {},
    {neon::kMaxDim,
     {kQueries, neon::fp16_scratch_floats, neon::attend_prefill_fp16<uint16_t>},
     neon::attend_decode_fp16,
     {{kQueries, neon::fp16_scratch_floats, neon::attend_prefill_fp16<int8_t>}, neon::attend_decode_int8},
     neon::to_fp16_blocks,
     neon::multiply_fp16},
};
}  // namespace twostroke
