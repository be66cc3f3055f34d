#define TS_AVX2
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace twostroke {
namespace avx2 {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"
#include "int8_attention_x86.h"
}  // namespace avx2

const Kernels kAvx2 = {
    "avx2",
    avx2::W,
    false,
    avx2::matmul,
    avx2::quantise,
    avx2::quantise_residual,
    avx2::rms_norm,
    avx2::layer_norm,
    avx2::rope,
    avx2::silu_mul,
    avx2::gelu_tanh_mul,
    avx2::gelu_mul,
    avx2::clamped_swiglu,
    avx2::soft_cap,
    avx2::to_fp16,
    avx2::unpack_row,
    {kQueries, prefill_scratch_floats, avx2::attend_prefill},
    {kQueries, prefill_scratch_floats, avx2::attend_prefill_of<float>},
    avx2::attend_decode,
    {{kQueries, prefill_scratch_floats, avx2::attend_prefill_of<int8_t>}, avx2::attend_decode_int8},
    avx2::prefetch_keys,
    avx2::argmax,
    avx2::log_sum_exp,
    avx2::draw,
    avx2::dot_bytes,
};
}  // namespace twostroke
