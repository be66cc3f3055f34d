// AVX-512 with VNNI. `kernels_avx512bw.cpp` builds the same source without VNNI.
#define TS_AVX512
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "kernels.h"

#if defined(__AVX512VNNI__)
#define TS_SET avx512
#define TS_TABLE kAvx512
#define TS_NAME "avx512"
#else
#define TS_SET avx512bw
#define TS_TABLE kAvx512bw
#define TS_NAME "avx512bw"
#endif

namespace twostroke {
namespace TS_SET {
#include "simd.h"

#include "products_impl.h"
#include "small_impl.h"
#include "attention_impl.h"
#include "int8_attention_x86.h"
}  // namespace TS_SET

const Kernels TS_TABLE = {
    TS_NAME,
    TS_SET::W,
    false,
    TS_SET::matmul,
    TS_SET::quantise,
    TS_SET::quantise_residual,
    TS_SET::rms_norm,
    TS_SET::layer_norm,
    TS_SET::rope,
    TS_SET::silu_mul,
    TS_SET::gelu_tanh_mul,
    TS_SET::gelu_mul,
    TS_SET::clamped_swiglu,
    TS_SET::soft_cap,
    TS_SET::to_fp16,
    TS_SET::unpack_row,
    {kQueries, prefill_scratch_floats, TS_SET::attend_prefill},
    {kQueries, prefill_scratch_floats, TS_SET::attend_prefill_of<float>},
    TS_SET::attend_decode,
    {{kQueries, prefill_scratch_floats, TS_SET::attend_prefill_of<int8_t>}, TS_SET::attend_decode_int8},
    TS_SET::prefetch_keys,
    TS_SET::argmax,
    TS_SET::log_sum_exp,
    TS_SET::draw,
    TS_SET::dot_bytes,
};
}  // namespace twostroke
