#include "ahead.h"

#include <immintrin.h>

#include <type_traits>
#include <utility>

#define TS_AVX512

namespace twostroke {
namespace ahead_0 {
#define TS_AHEAD 0
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_0
namespace ahead_768 {
#define TS_AHEAD 768
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_768
namespace ahead_1024 {
#define TS_AHEAD 1024
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_1024
namespace ahead_2048 {
#define TS_AHEAD 2048
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_2048
namespace ahead_4096 {
#define TS_AHEAD 4096
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_4096
namespace ahead_8192 {
#define TS_AHEAD 8192
#include "../src/simd.h"

#include "../src/products_impl.h"
#undef TS_AHEAD
#include "ahead_impl.h"
}  // namespace ahead_8192
}  // namespace twostroke

const Ahead kAheadOnAvx512[6] = {
    {0, twostroke::ahead_0::multiply},
    {768, twostroke::ahead_768::multiply},
    {1024, twostroke::ahead_1024::multiply},
    {2048, twostroke::ahead_2048::multiply},
    {4096, twostroke::ahead_4096::multiply},
    {8192, twostroke::ahead_8192::multiply},
};
