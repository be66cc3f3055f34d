// AVX-512 with the matrix units (AMX, bfloat16 tiles) for steps of many tokens.
#define TS_AVX512
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace twostroke {
namespace amx {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"
#include "int8_attention_x86.h"

#include "amx_products.h"
#include "amx_attention.h"
}  // namespace amx

const Kernels kAmx = {
    "amx",
    amx::W,
    false,
    amx::amx_matmul,
    amx::quantise,
    amx::quantise_residual,
    amx::rms_norm,
    amx::layer_norm,
    amx::rope,
    amx::silu_mul,
    amx::gelu_tanh_mul,
    amx::gelu_mul,
    amx::clamped_swiglu,
    amx::soft_cap,
    amx::to_fp16,
    amx::unpack_row,
    {kQueries, prefill_scratch_floats, amx::attend_prefill},
    {kQueries, prefill_scratch_floats, amx::attend_prefill_of<float>},
    amx::attend_decode,
    {{kQueries, prefill_scratch_floats, amx::attend_prefill_of<int8_t>}, amx::attend_decode_int8},
    amx::prefetch_keys,
    amx::argmax,
    amx::log_sum_exp,
    amx::draw,
    amx::dot_bytes,
    {amx::kMinTokens,
     amx::to_bf16,
     {amx::kAmxQueries, amx::amx_scratch_floats, amx::amx_attend_prefill<uint16_t>},
     {amx::kAmxQueries, amx::amx_scratch_floats, amx::amx_attend_prefill<int8_t>}},
};
}  // namespace twostroke
