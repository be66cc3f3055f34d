#define TS_PORTABLE

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace twostroke {
namespace portable {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"
}  // namespace portable

const Kernels kPortable = {
    "portable",
    portable::W,
    true,
    portable::matmul,
    portable::quantise,
    portable::quantise_residual,
    portable::rms_norm,
    portable::layer_norm,
    portable::rope,
    portable::silu_mul,
    portable::gelu_tanh_mul,
    portable::gelu_mul,
    portable::clamped_swiglu,
    portable::soft_cap,
    portable::to_fp16,
    portable::unpack_row,
    {kQueries, prefill_scratch_floats, portable::attend_prefill},
    {kQueries, prefill_scratch_floats, portable::attend_prefill_of<float>},
    portable::attend_decode,
    {{kQueries, prefill_scratch_floats, portable::attend_prefill_of<int8_t>}, portable::attend_decode_of<int8_t>},
    portable::prefetch_keys,
    portable::argmax,
    portable::log_sum_exp,
    portable::draw,
    portable::dot_bytes,
};
}  // namespace twostroke
