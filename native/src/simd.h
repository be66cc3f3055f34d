// A vector of W floats and the few operations that differ between instruction sets. Each `kernels_*.cpp`
// includes this file inside its own namespace and defines the instruction set.
//
// The `*_impl.h` files contain the code that all instruction sets share. They use the vector types of
// GCC and clang.

#if defined(TS_NEON)
constexpr int W = 4;
#elif defined(TS_AVX2)
constexpr int W = 8;
#elif defined(TS_AVX512)
constexpr int W = 16;
#if defined(__AVX512VNNI__)
#define TS_VNNI  // int8 products with sums in 32 bits
#endif
#else
constexpr int W = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * W)));
typedef int32_t i32v __attribute__((vector_size(4 * W)));
typedef uint32_t u32v __attribute__((vector_size(4 * W)));
typedef uint8_t u8v __attribute__((vector_size(4 * W)));
typedef int8_t i8v __attribute__((vector_size(4 * W)));  // four bytes in each of W lanes
typedef f32v f32u __attribute__((aligned(4), may_alias));
typedef i32v i32u __attribute__((aligned(1), may_alias));
typedef i8v i8u __attribute__((aligned(1), may_alias));

// Call f(0) … f(N − 1) with constant arguments, so that arrays become registers.
template <int N, typename F, int... I>
static inline __attribute__((always_inline)) void unrolled(F&& f,
                                                           std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, typename F>
static inline __attribute__((always_inline)) void unrolled(F&& f) {
  unrolled<N>(f, std::make_integer_sequence<int, N>{});
}

static inline f32v load(const float* p) { return *reinterpret_cast<const f32u*>(p); }
static inline void store(float* p, f32v v) { *reinterpret_cast<f32u*>(p) = v; }
static inline f32v splat(float x) {
#if defined(TS_AVX2)
  return (f32v)_mm256_set1_ps(x);
#elif defined(TS_AVX512)
  return (f32v)_mm512_set1_ps(x);
#else
  return f32v{} + x;
#endif
}
static inline i8v load_codes(const uint8_t* p) { return *reinterpret_cast<const i8u*>(p); }

// Sixteen bytes, repeated to fill a vector.
static inline i8v load_table(const int8_t* p) {
  i8v table;
  for (int n = 0; n < 4 * W; n += 16) __builtin_memcpy(reinterpret_cast<int8_t*>(&table) + n, p, 16);
  return table;
}

// Look up the byte of the table for each index 0 … 15.
static inline i8v look_up(i8v table, u8v index) {
#if defined(TS_NEON)
  return (i8v)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)index);
#elif defined(TS_AVX2)
  return (i8v)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(TS_AVX512)
  return (i8v)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#else
  i8v found;
  for (int i = 0; i < 4 * W; i++) found[i] = table[index[i]];
  return found;
#endif
}

// a · b + c, rounded once if the instruction set has FMA. The expression a * b + c is not enough:
// compilers turn only some of these into FMA (GCC 13 splits some chains of FMAs into multiplications
// and additions), and the last bit of the result depends on it.
static inline f32v mul_add(f32v a, f32v b, f32v c) {
#if defined(TS_NEON)
  return vfmaq_f32(c, a, b);
#elif defined(TS_AVX2)
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(TS_AVX512)
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// Convert W fp16 numbers to floats.
static inline f32v load_fp16(const uint16_t* p) {
#if defined(TS_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#elif defined(TS_AVX2)
  return (f32v)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(TS_AVX512)
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  f32v v;
  for (int i = 0; i < W; i++) v[i] = fp16_to_float(p[i]);
  return v;
#endif
}

// Convert W floats to fp16, rounded to nearest.
static inline void store_fp16(uint16_t* p, f32v v) {
#if defined(TS_NEON)
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#elif defined(TS_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
#elif defined(TS_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
#else
  for (int i = 0; i < W; i++) p[i] = float_to_fp16(v[i]);
#endif
}

// Convert W bfloat16 numbers to floats.
static inline f32v load_bf16(const uint16_t* p) {
#if defined(TS_NEON)
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
#elif defined(TS_AVX2)
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (f32v)_mm256_slli_epi32(wide, 16);
#elif defined(TS_AVX512)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (f32v)_mm512_slli_epi32(wide, 16);
#else
  u32v v;
  for (int i = 0; i < W; i++) v[i] = static_cast<uint32_t>(p[i]) << 16;
  return (f32v)v;
#endif
}

// Convert W int8 numbers to floats. (GCC 12 converts one byte at a time with __builtin_convertvector.)
static inline f32v load_int8(const int8_t* p) {
#if defined(TS_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (f32v)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#elif defined(TS_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  bytes x;
  __builtin_memcpy(&x, p, W);
  return __builtin_convertvector(x, f32v);
#endif
}

// The dot products of W rows with a block or half a block of activations: N (8 or 4) vectors of codes,
// each with four codes of W rows, times 4 · N activations, which all rows share. Lane i is the sum of
// row i, an integer as a float. `Signed` codes are −128 … 127, other codes 0 … 15. VNNI multiplies
// unsigned by signed bytes: `signed_bias` is added to signed codes, and the caller subtracts
// `signed_bias` times the sum of the activations.
#if defined(TS_VNNI)
constexpr float signed_bias = 128;
#else
constexpr float signed_bias = 0;
#endif

template <bool Signed, int N = 8>
static inline f32v dot_block(const i8v* w, const int8_t* a) {
#if defined(TS_NEON)
  // Sums accumulate in the significand of 1.5 · 2^23, which saves the slow conversion. The sum of a
  // block is below 2^22.
  const float32x4_t shift = vdupq_n_f32(12582912.0f);
  int8x16_t lo = vld1q_s8(a);
  int32x4_t x = vreinterpretq_s32_f32(shift);
  x = vdotq_laneq_s32(x, (int8x16_t)w[0], lo, 0);
  x = vdotq_laneq_s32(x, (int8x16_t)w[1], lo, 1);
  x = vdotq_laneq_s32(x, (int8x16_t)w[2], lo, 2);
  x = vdotq_laneq_s32(x, (int8x16_t)w[3], lo, 3);
  if constexpr (N == 8) {
    int8x16_t hi = vld1q_s8(a + 16);
    x = vdotq_laneq_s32(x, (int8x16_t)w[4], hi, 0);
    x = vdotq_laneq_s32(x, (int8x16_t)w[5], hi, 1);
    x = vdotq_laneq_s32(x, (int8x16_t)w[6], hi, 2);
    x = vdotq_laneq_s32(x, (int8x16_t)w[7], hi, 3);
  }
  return vsubq_f32(vreinterpretq_f32_s32(x), shift);
#elif defined(TS_AVX2)
  __m256i ones = _mm256_set1_epi16(1), sum = _mm256_setzero_si256();
  for (int j = 0; j < N; j++) {
    int32_t four;
    __builtin_memcpy(&four, a + 4 * j, 4);
    __m256i x = _mm256_set1_epi32(four), c = (__m256i)w[j];
    if constexpr (Signed) {  // |codes| · (activations with the signs of the codes): every sum fits 16 bits
      __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pair, ones));
    } else {  // 8 · 2 · 15 · 127 still fits 16 bits
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(c, x));
    }
  }
  return __builtin_convertvector((i32v)(Signed ? sum : _mm256_madd_epi16(sum, ones)), f32v);
#elif defined(TS_AVX512) && !defined(TS_VNNI)
  const __m512i ones = _mm512_set1_epi16(1);
  __m512i sum = _mm512_setzero_si512();
  for (int j = 0; j < N; j++) {
    int32_t four;
    __builtin_memcpy(&four, a + 4 * j, 4);
    __m512i x = _mm512_set1_epi32(four), c = (__m512i)w[j];
    if constexpr (Signed) {  // as with AVX2
      x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(c), _mm512_setzero_si512(), x);
      const __m512i pair = _mm512_maddubs_epi16(_mm512_abs_epi8(c), x);
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pair, ones));
    } else {
      sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(c, x));
    }
  }
  return __builtin_convertvector((i32v)(Signed ? sum : _mm512_madd_epi16(sum, ones)), f32v);
#elif defined(TS_AVX512)
  __m512i sum = _mm512_setzero_si512();
  for (int j = 0; j < N; j++) {
    int32_t four;
    __builtin_memcpy(&four, a + 4 * j, 4);
    __m512i c = (__m512i)w[j];
    if constexpr (Signed) c = _mm512_xor_si512(c, _mm512_set1_epi8(static_cast<char>(0x80)));
    sum = _mm512_dpbusd_epi32(sum, c, _mm512_set1_epi32(four));
  }
  return __builtin_convertvector((i32v)sum, f32v);
#else
  i32v sum = {};
  for (int j = 0; j < N; j++)
    for (int i = 0; i < W; i++)
      for (int n = 0; n < 4; n++) sum[i] += w[j][4 * i + n] * a[4 * j + n];
  return __builtin_convertvector(sum, f32v);
#endif
}

#if defined(TS_AVX2) || defined(TS_AVX512)
// Add the upper half of 16 lanes to the lower half. A vector of AVX2 has eight lanes already.
static inline __m256 sum_halves(f32v v) {
#if defined(TS_AVX512)
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  return (__m256)v;
#endif
}

// Interleave two vectors within each group of four lanes (a0 … a3 and b0 … b3):
//
//     low_pairs    a0 b0 a1 b1        low_halves    a0 a1 b0 b1
//     high_pairs   a2 b2 a3 b3        high_halves   a2 a3 b2 b3
#if defined(TS_AVX512)
static inline f32v low_pairs(f32v a, f32v b) { return (f32v)_mm512_unpacklo_ps((__m512)a, (__m512)b); }
static inline f32v high_pairs(f32v a, f32v b) { return (f32v)_mm512_unpackhi_ps((__m512)a, (__m512)b); }
static inline f32v low_halves(f32v a, f32v b) { return (f32v)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
static inline f32v high_halves(f32v a, f32v b) { return (f32v)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
#else
static inline f32v low_pairs(f32v a, f32v b) { return (f32v)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
static inline f32v high_pairs(f32v a, f32v b) { return (f32v)_mm256_unpackhi_ps((__m256)a, (__m256)b); }
static inline f32v low_halves(f32v a, f32v b) { return (f32v)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
static inline f32v high_halves(f32v a, f32v b) { return (f32v)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
#endif

static inline __m128 sum_quarters(__m256 v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
#endif

static inline float sum_lanes(f32v v) {
#if defined(TS_NEON)
  return vaddvq_f32(v);
#elif defined(TS_AVX2) || defined(TS_AVX512)
  __m128 x = sum_quarters(sum_halves(v));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

// Write the sum of the lanes of each of four vectors to out[0 … 3].
static inline void sum_four(f32v a, f32v b, f32v c, f32v d, float* out) {
#if defined(TS_NEON)
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#elif defined(TS_AVX2) || defined(TS_AVX512)
  const f32v ab = low_pairs(a, b) + high_pairs(a, b), cd = low_pairs(c, d) + high_pairs(c, d);
  _mm_storeu_ps(out, sum_quarters(sum_halves(low_halves(ab, cd) + high_halves(ab, cd))));
#else
  out[0] = sum_lanes(a), out[1] = sum_lanes(b), out[2] = sum_lanes(c), out[3] = sum_lanes(d);
#endif
}

static inline float max_lanes(f32v v) {
#if defined(TS_NEON)
  return vmaxvq_f32(v);
#elif defined(TS_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(TS_AVX2)
  __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
#else
  float s = v[0];
  for (int i = 1; i < W; i++) s = v[i] > s ? v[i] : s;
  return s;
#endif
}

static inline f32v max_of(f32v a, f32v b) {
#if defined(TS_NEON)
  return vmaxq_f32(a, b);
#elif defined(TS_AVX512)
  return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TS_AVX2)
  return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline f32v abs_of(f32v a) { return (f32v)((u32v)a & 0x7FFFFFFFu); }

#if !defined(TS_AVX512) && !defined(TS_AVX2)
// Added to a small number, this constant leaves the rounded number in the last bits of the sum.
constexpr float kShift = 12582912.0f;  // 1.5 · 2^23
constexpr int kShiftBits = 0x4B400000;
#endif

// Round x · inverse to integers of at most 127, stored as 16 bytes. Return the sum of the integers.
static inline int round_half_block(const float* x, float inverse, int8_t* codes) {
#if defined(TS_NEON)
  int32x4_t y[4];
  for (int i = 0; i < 4; i++) y[i] = vreinterpretq_s32_f32(load(x + 4 * i) * inverse + kShift);
  int16x8_t a = vuzp1q_s16(vreinterpretq_s16_s32(y[0]), vreinterpretq_s16_s32(y[1]));
  int16x8_t b = vuzp1q_s16(vreinterpretq_s16_s32(y[2]), vreinterpretq_s16_s32(y[3]));
  vst1q_s8(codes, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)));
  return vaddvq_s16(vaddq_s16(a, b));
#elif defined(TS_AVX512)
  const __m512i y = _mm512_cvtps_epi32((__m512)(load(x) * inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(y));
  return _mm512_reduce_add_epi32(y);
#elif defined(TS_AVX2)
  const __m256i low = _mm256_cvtps_epi32((__m256)(load(x) * inverse));
  const __m256i high = _mm256_cvtps_epi32((__m256)(load(x + 8) * inverse));
  // The pack instructions work within register halves: restore the order of the words.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
  const __m256i both = _mm256_add_epi32(low, high);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
#else
  int total = 0;
  for (int i = 0; i < kHalfBlock; i += W) {
    i32v y = (i32v)(load(x + i) * inverse + kShift) - kShiftBits;
    for (int j = 0; j < W; j++) {
      codes[i + j] = static_cast<int8_t>(y[j]);
      total += y[j];
    }
  }
  return total;
#endif
}

// Four scalars that multiply whole vectors: add_times<i>(acc, x, four) = acc + x · four[i].
struct Four {
#if defined(TS_NEON)
  float32x4_t v;
  explicit Four(const float* p) : v(vld1q_f32(p)) {}
#else
  const float* p;
  explicit Four(const float* p) : p(p) {}
#endif
};

template <int I>
static inline __attribute__((always_inline)) f32v add_times(f32v acc, f32v x, const Four& s) {
#if defined(TS_NEON)
  return vfmaq_laneq_f32(acc, x, s.v, I);
#else
  return mul_add(x, splat(s.p[I]), acc);
#endif
}
