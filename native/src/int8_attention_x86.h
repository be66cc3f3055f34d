// Decode attention over an int8 cache (AVX2, AVX-512): products of 16-bit integers, widened from the
// cache. `kernels_*.cpp` include this file after `attention_impl.h`, which defines the results.
//
//   scores   query · key, with the query in 16 bits and a scale per head
//   output   weight · value, two tokens at a time; a weight, multiplied by the scale of its value, has
//            16 bits
//
// Sums have 32 bits: at most kMaxInt8Dim · 127 · kMax16 for a score, kKeys · 127 · kMax16 for the values
// of a tile.

constexpr float kMax16 = 127.0f * 128.0f;
constexpr int kMaxInt8Dim = 1024;
constexpr int kInt8Step = 2 * W;  // channels that one vector of 16-bit integers holds

typedef int16_t i16v __attribute__((vector_size(4 * W)));  // two in each of W lanes

// The operations that differ between instruction sets.

// Widen 2 · W bytes to 16-bit integers.
static inline i16v widen_bytes(const int8_t* p) {
#if defined(TS_AVX512)
  return (i16v)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return (i16v)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

// Widen 2 · W channels of two tokens, and interleave the tokens. `in_order` restores the order of the
// sums.
static inline void widen_pairs(const int8_t* p, const int8_t* q, i16v& first, i16v& second) {
#if defined(TS_AVX512)
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  first = (i16v)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
  second = (i16v)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
#else
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  first = (i16v)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
  second = (i16v)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
#endif
}

static inline void in_order([[maybe_unused]] i32v& first, [[maybe_unused]] i32v& second) {
#if defined(TS_AVX512)  // groups of eight channels: 0 and 2 in `first`, 1 and 3 in `second`
  const __m512i a = (__m512i)first, b = (__m512i)second;
  first = (i32v)_mm512_shuffle_i64x2(a, b, 0x44);
  second = (i32v)_mm512_shuffle_i64x2(a, b, 0xEE);
#endif
}

// Add the products of 16-bit integers to `acc`, two products per lane.
static inline i32v dot_pairs(i32v acc, i16v a, i16v b) {
#if defined(TS_VNNI)
  return (i32v)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(TS_AVX512)
  return (i32v)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
  return (i32v)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#endif
}

// Return the sums over the lanes of four vectors, as floats.
static inline __m128 sum_four(i32v a, i32v b, i32v c, i32v d) {
  auto low = [](i32v x, i32v y) { return (i32v)low_pairs((f32v)x, (f32v)y); };
  auto high = [](i32v x, i32v y) { return (i32v)high_pairs((f32v)x, (f32v)y); };
  const i32v ab = low(a, b) + high(a, b), cd = low(c, d) + high(c, d);
  const i32v four = (i32v)low_halves((f32v)ab, (f32v)cd) + (i32v)high_halves((f32v)ab, (f32v)cd);
#if defined(TS_AVX512)
  const __m512i all = (__m512i)four;
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
  const __m256i half = (__m256i)four;
#endif
  return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

// Convert n floats (a multiple of W) to integers of at most `kMax16`. Return their scale.
static inline float to_int16(const float* x, int n, int16_t* out) {
  typedef int16_t shorts __attribute__((vector_size(2 * W)));
  const float shift = 12582912.0f;  // 1.5 · 2^23: the last bits of the sum are the integer
  f32v maximum = {};
  for (int i = 0; i < n; i += W) maximum = max_of(maximum, abs_of(load(x + i)));
  const float largest = max_lanes(maximum), up = kMax16 / (largest > 1e-30f ? largest : 1e-30f);
  for (int i = 0; i < n; i += W) {
    const i32v whole = (i32v)mul_add(load(x + i), splat(up), splat(shift)) - 0x4B400000;
    const shorts narrow = __builtin_convertvector(whole, shorts);
    __builtin_memcpy(out + i, &narrow, sizeof narrow);
  }
  return largest / kMax16;
}

// acc [G, dim] += weights · V for `kInt8Step` channels of `keys` tokens (an even number).
template <int G>
static inline void weigh_int8(const int8_t* const* v, int keys, int dim, int d,
                              const int16_t (*weights)[kKeys + W], const float* back, float* acc) {
  i32v sum[G][2];
  unrolled<G>([&](auto g) { sum[g][0] = sum[g][1] = i32v{}; });
  for (int n = 0; n < keys; n += 2) {
    i16v first, second;
    widen_pairs(v[n] + d, v[n + 1] + d, first, second);
    unrolled<G>([&](auto g) {
      int32_t two;
      __builtin_memcpy(&two, weights[g] + n, 4);
      const i16v pair = (i16v)(i32v{} + two);
      sum[g][0] = dot_pairs(sum[g][0], first, pair), sum[g][1] = dot_pairs(sum[g][1], second, pair);
    });
  }
  unrolled<G>([&](auto g) {
    in_order(sum[g][0], sum[g][1]);
    unrolled<2>([&](auto j) {
      float* to = acc + g * dim + d + j * W;
      store(to, mul_add(__builtin_convertvector(sum[g][j], f32v), splat(back[g]), load(to)));
    });
  });
}

// Decode attention of G heads that share a KV head, over indices [from, to).
template <int G>
static void decode_heads_int8(const Cache& cache, const int32_t* table, const float* q, int from,
                              int to, int kv, const AttentionParams& params, float* acc,
                              float* largest, float* sum) {
  const int dim = cache.dim;
  const Reader keys_at = int8_reader(cache.keys, cache, table, kv);
  const Reader values_at = int8_reader(cache.values, cache, table, kv);
  const int8_t* p[kKeys + W];
  float s[G][kKeys + W], scales[kKeys + W], factor[G], back[G];
  int16_t weights[G][kKeys + W], queries[G * kMaxInt8Dim];
  for (int g = 0; g < G; g++) {
    factor[g] = to_int16(q + g * dim, dim, queries + g * dim) * params.scale;
    largest[g] = -1e30f, sum[g] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * G * dim);
  for (int key = from; key < to; key += kKeys) {
    const int keys = to - key < kKeys ? to - key : kKeys, padded = (keys + W - 1) / W * W;
    auto find = [&](const Reader<int8_t>& side) {
      side.each_scaled(key, keys, [&](int n, const int8_t* at, float scale) { p[n] = at, scales[n] = scale; });
      for (int n = keys; n < padded; n++) p[n] = p[keys - 1], scales[n] = 0;
    };
    find(keys_at);
    for (int n = 0; n < keys; n += 4) {
      i32v x[G][4];
      unrolled<G>([&](auto g) { x[g][0] = x[g][1] = x[g][2] = x[g][3] = i32v{}; });
      for (int d = 0; d < dim; d += kInt8Step) {
        i16v k[4];
        unrolled<4>([&](auto j) { k[j] = widen_bytes(p[n + j] + d); });
        unrolled<G>([&](auto g) {
          const i16v query = (i16v)load_codes(reinterpret_cast<const uint8_t*>(queries + g * dim + d));
          unrolled<4>([&](auto j) { x[g][j] = dot_pairs(x[g][j], k[j], query); });
        });
      }
      const __m128 scale = _mm_loadu_ps(scales + n);
      unrolled<G>([&](auto g) {
        const __m128 four = sum_four(x[g][0], x[g][1], x[g][2], x[g][3]);
        _mm_storeu_ps(s[g] + n, _mm_mul_ps(_mm_mul_ps(four, _mm_set1_ps(factor[g])), scale));
      });
    }
    find(values_at);
    for (int g = 0; g < G; g++) {
      if (params.softcap > 0) soft_cap(s[g], keys, 1, params.softcap);
      for (int n = keys; n < padded; n++) s[g][n] = -__builtin_inff();
      f32v maximum = splat(largest[g]), total = {};
      for (int n = 0; n < padded; n += W) maximum = max_of(maximum, load(s[g] + n));
      const float now = max_lanes(maximum), less = __builtin_expf(largest[g] - now);
      for (int n = 0; n < padded; n += W) {
        const f32v e = exp_of(load(s[g] + n) - now);
        total += e;
        store(s[g] + n, e * load(scales + n));
      }
      sum[g] = sum[g] * less + sum_lanes(total);
      largest[g] = now;
      back[g] = to_int16(s[g], padded, weights[g]);
      if (key > from && less != 1.0f)
        for (int d = 0; d < dim; d += W) store(acc + g * dim + d, load(acc + g * dim + d) * less);
    }
    for (int d = 0; d < dim; d += kInt8Step)
      weigh_int8<G>(p, padded, dim, d, weights, back, acc);
  }
}

static void attend_decode_int8(const Cache& cache, const int32_t* table, const float* q, int from,
                               int to, int kv, int group, const AttentionParams& params, float* acc,
                               float* largest, float* sum) {
  const int dim = cache.dim;
  if (dim % kInt8Step != 0 || dim > kMaxInt8Dim)
    return attend_decode_of<int8_t>(cache, table, q, from, to, kv, group, params, acc, largest, sum);
  const float* first = q + static_cast<size_t>(kv) * group * dim;
  each_four(group, [&](auto count, int g) {
    decode_heads_int8<decltype(count)::value>(cache, table, first + g * dim, from, to, kv, params,
                                              acc + g * dim, largest + g, sum + g);
  });
}
