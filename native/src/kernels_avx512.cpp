#define TS_AVX512
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace twostroke {
namespace avx512 {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"
#include "int8_attention_x86.h"
}  // namespace avx512

const Kernels kAvx512 = {
    "avx512",
    avx512::W,
    false,
    avx512::matmul,
    avx512::quantise,
    avx512::quantise_residual,
    avx512::rms_norm,
    avx512::layer_norm,
    avx512::rope,
    avx512::silu_mul,
    avx512::gelu_tanh_mul,
    avx512::gelu_mul,
    avx512::clamped_swiglu,
    avx512::soft_cap,
    avx512::to_fp16,
    avx512::unpack_row,
    {kQueries, prefill_scratch_floats, avx512::attend_prefill},
    {kQueries, prefill_scratch_floats, avx512::attend_prefill_of<float>},
    avx512::attend_decode,
    {{kQueries, prefill_scratch_floats, avx512::attend_prefill_of<int8_t>}, avx512::attend_decode_int8},
    avx512::prefetch_keys,
    avx512::argmax,
    avx512::log_sum_exp,
    avx512::draw,
    avx512::dot_bytes,
};
}  // namespace twostroke
