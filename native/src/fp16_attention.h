// Attention in fp16 arithmetic (Arm): twice the products per instruction, read directly from the cache.
// `kernels_neon.cpp` includes this file after `attention_impl.h`, which defines the results.
//
// Only short sums are in fp16: `kRun` channels of a score, `kKeys` keys of an output. Scores, exponents
// and the sums of the weights are in fp32. Queries are scaled by a power of two, so that no part of a
// score leaves the range of fp16. An output outside that range (values above 1,000) is recomputed in
// fp32.

constexpr int kRun = 32;
constexpr int kMaxDim = 1024;
constexpr int kKeysAhead = 16;  // keys
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

static inline float16x8_t load_fp16x8(const uint16_t* p) {
  return vreinterpretq_f16_u16(vld1q_u16(p));
}
static inline void store_fp16x8(uint16_t* p, f32v a, f32v b) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b)));
}
// (GCC removes a loop that consists of the intrinsic alone.)
static inline __attribute__((always_inline)) void prefetch(const uint16_t* p, int n) {
  for (int i = 0; i < n; i += 32) asm volatile("prfm pldl1keep, [%0]" : : "r"(p + i));
}
static inline f32v low(float16x8_t x) { return vcvt_f32_f16(vget_low_f16(x)); }
static inline f32v high(float16x8_t x) { return vcvt_high_f32_f16(x); }

// acc + x · lanes[I]. (With the intrinsic, GCC copies every lane to a register of its own and has no
// registers left for the sums.)
template <int I>
static inline __attribute__((always_inline)) float16x8_t add_lane(float16x8_t acc, float16x8_t x,
                                                                  float16x8_t lanes) {
  asm volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(acc) : "w"(x), "x"(lanes), "n"(I));
  return acc;
}

// 2^x for x ≤ 127, with an error of about 10^-4, below the last bit of fp16. Below −120 the result is
// 2^-120.
static inline f32v exp2_of(f32v x) {
  x = max_of(x, splat(-120.0f));
  const f32v y = x + kShift, r = x - (y - kShift);
  f32v p = mul_add(splat(5.500892807e-2f), r, splat(2.422109602e-1f));
  p = mul_add(p, r, splat(6.932829277e-1f));
  return (f32v)((i32v)mul_add(p, r, splat(1.0f)) + ((i32v)y << 23));
}

// 2^e, for |e| ≤ 126.
static inline float power_of_two(int e) {
  const int32_t bits = (127 + e) << 23;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The power of two that scales n floats below 2^-5, so that the sum of `kRun` products with any fp16
// number stays finite. `back` is the inverse.
static inline float to_small(const float* x, int n, float* back) {
  f32v maximum = {};
  for (int i = 0; i < n; i += W) maximum = max_of(maximum, abs_of(load(x + i)));
  const float largest = max_lanes(maximum);
  int32_t bits;
  __builtin_memcpy(&bits, &largest, 4);
  int e = (bits >> 23) - 126;  // 2^e is greater than every |x|
  e = e < -100 ? -100 : e > 100 ? 100 : e;
  *back = power_of_two(e + 5);
  return power_of_two(-e - 5);
}

// n is a multiple of 8.
static inline bool all_finite(const float* x, int n) {
  f32v max0 = {}, max1 = {};
  for (int i = 0; i < n; i += 8) {
    max0 = max_of(max0, abs_of(load(x + i)));  // NaN stays NaN
    max1 = max_of(max1, abs_of(load(x + i + 4)));
  }
  return max_lanes(max_of(max0, max1)) <= 3.4e38f;
}

// Scores of four keys and 8 · V queries, stored as columns.
template <int V>
static inline void score_tile(const uint16_t* const* k, const uint16_t* q, int rows, int dim,
                              const float* factor, float* s) {
  for (int run = 0; run < dim; run += kRun) {
    float16x8_t a[4][V];
    unrolled<4>([&](auto j) { unrolled<V>([&](auto v) { a[j][v] = vdupq_n_f16(0); }); });
    const int end = run + kRun < dim ? run + kRun : dim;
    const uint16_t* column = q + run * rows;
    for (int d = run; d < end; d += 8) {
      const float16x8_t k0 = load_fp16x8(k[0] + d), k1 = load_fp16x8(k[1] + d);
      const float16x8_t k2 = load_fp16x8(k[2] + d), k3 = load_fp16x8(k[3] + d);
      unrolled<8>([&](auto i) {
        unrolled<V>([&](auto v) {
          const float16x8_t x = load_fp16x8(column + 8 * v);
          a[0][v] = add_lane<i>(a[0][v], x, k0);
          a[1][v] = add_lane<i>(a[1][v], x, k1);
          a[2][v] = add_lane<i>(a[2][v], x, k2);
          a[3][v] = add_lane<i>(a[3][v], x, k3);
        });
        column += rows;
      });
    }
    unrolled<V>([&](auto v) {
      const f32v f0 = load(factor + 8 * v), f1 = load(factor + 8 * v + 4);
      float* to = s + 8 * v;
      unrolled<4>([&](auto j) {
        f32v x0 = low(a[j][v]) * f0, x1 = high(a[j][v]) * f1;
        if (run > 0) x0 += load(to), x1 += load(to + 4);
        store(to, x0), store(to + 4, x1);
        to += rows;
      });
    });
  }
}

// Scores of `keys` keys and `rows` queries [dim, rows], as exponents of two.
static void score_fp16(const uint16_t* const* k, int keys, const uint16_t* q, int rows, int dim,
                         const float* factor, float* s) {
  for (int r = 0; r < rows; r += 32)
    for (int n = 0; n < keys; n += 4) {  // scores past the last key are not used
      float* to = s + n * rows + r;
      switch ((rows - r) / 8) {
        case 1: score_tile<1>(k + n, q + r, rows, dim, factor + r, to); break;
        case 2: score_tile<2>(k + n, q + r, rows, dim, factor + r, to); break;
        case 3: score_tile<3>(k + n, q + r, rows, dim, factor + r, to); break;
        default: score_tile<4>(k + n, q + r, rows, dim, factor + r, to); break;
      }
    }
}

// acc [rows, dim] = acc · shrink [rows] + weightsᵀ [rows, keys] · V, eight rows at a time.
static inline void weigh_fp16(const uint16_t* w, const uint16_t* const* v, int keys, int rows,
                                int dim, const float* shrink, float* acc) {
  for (int r = 0; r < rows; r += 8) {
    auto tile = [&](int d, auto count) {
      constexpr int V = decltype(count)::value;
      float16x8_t a[8][V];
      unrolled<8>([&](auto i) {
        unrolled<V>([&](auto j) { a[i][j] = vdupq_n_f16(0); });
      });
      for (int n = 0; n < keys; n++) {
        const float16x8_t weights = load_fp16x8(w + n * rows + r);
        unrolled<V>([&](auto j) {
          const float16x8_t value = load_fp16x8(v[n] + d + 8 * j);
          unrolled<8>([&](auto i) { a[i][j] = add_lane<i>(a[i][j], value, weights); });
        });
      }
      unrolled<8>([&](auto i) {
        const f32v less = splat(shrink[r + i]);
        unrolled<V>([&](auto j) {
          float* to = acc + (r + i) * dim + d + 8 * j;
          store(to, mul_add(load(to), less, low(a[i][j])));
          store(to + 4, mul_add(load(to + 4), less, high(a[i][j])));
        });
      });
    };
    int d = 0;
    for (; d + 16 <= dim; d += 16) tile(d, std::integral_constant<int, 2>{});
    if (d < dim) tile(d, std::integral_constant<int, 1>{});
  }
}

static void mask(float* s, int key, int keys, const int32_t* index, int window, int rows) {
  for (int n = 0; n < keys; n++)
    for (int r = 0; r < rows; r += W) {
      const i32v at = *reinterpret_cast<const i32u*>(index + r);
      i32v seen = at >= key + n;
      if (window > 0) seen &= at - window < key + n;
      i32u* x = reinterpret_cast<i32u*>(s + n * rows + r);
      *x = (*x & seen) | ((i32v)splat(-__builtin_inff()) & ~seen);
    }
}

// The weights of the keys from their scores, and the factors by which the earlier weights shrink.
static void weigh_scores(const float* s, int keys, int rows, float* largest, float* sum,
                         float* shrink, uint16_t* weights) {
  for (int r = 0; r < rows; r += 8) {
    const f32v before0 = load(largest + r), before1 = load(largest + r + 4);
    f32v max0 = before0, max1 = before1;
    const float* x = s + r;
    for (int n = 0; n < keys; n++, x += rows)
      max0 = max_of(max0, load(x)), max1 = max_of(max1, load(x + 4));
    const f32v less0 = exp2_of(before0 - max0), less1 = exp2_of(before1 - max1);
    f32v total0 = load(sum + r) * less0, total1 = load(sum + r + 4) * less1;
    store(shrink + r, less0), store(shrink + r + 4, less1);
    uint16_t* to = weights + r;
    x = s + r;
    for (int n = 0; n < keys; n++, x += rows, to += rows) {
      const f32v e0 = exp2_of(load(x) - max0), e1 = exp2_of(load(x + 4) - max1);
      store_fp16x8(to, e0, e1);
      total0 += e0, total1 += e1;
    }
    store(largest + r, max0), store(largest + r + 4, max1);
    store(sum + r, total0), store(sum + r + 4, total1);
  }
}

// The same for the scores of one head, up to a multiple of 8. Returns the factor for earlier weights.
static inline float weigh_head(float* s, int keys, int padded, float* largest, float* sum,
                               uint16_t* weights) {
  for (int n = keys; n < padded; n++) s[n] = -__builtin_inff();
  f32v maximum = splat(*largest), total = {};
  for (int n = 0; n < padded; n += 8) maximum = max_of(maximum, max_of(load(s + n), load(s + n + 4)));
  const float now = max_lanes(maximum), less = exp2_of(splat(*largest - now))[0];
  for (int n = 0; n < padded; n += 8) {
    const f32v e0 = exp2_of(load(s + n) - now), e1 = exp2_of(load(s + n + 4) - now);
    store_fp16x8(weights + n, e0, e1);
    total += e0 + e1;
  }
  *sum = *sum * less + sum_lanes(total);
  *largest = now;
  return less;
}

static size_t fp16_scratch_floats(int group, int dim) {
  const size_t rows = (static_cast<size_t>(kQueries) * group + 7) / 8 * 8;
  const size_t converted = static_cast<size_t>(kKeys) * dim / 2;  // used for int8
  const size_t own = rows * (kKeys + kKeys / 2 + dim / 2 + dim + 5) + converted;
  const size_t exact = prefill_scratch_floats(group, dim);  // for outputs that are recomputed
  return own > exact ? own : exact;
}

// Convert 8 · n int8 elements with one scale to fp16.
static inline void int8_to_fp16(const int8_t* p, int dim, float scale, uint16_t* out) {
  for (int d = 0; d < dim; d += 8) {
    const int16x8_t x = vmovl_s8(vld1_s8(p + d));
    const f32v a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), b = vcvtq_f32_s32(vmovl_high_s16(x));
    store_fp16x8(out + d, a * scale, b * scale);
  }
}

// T: the element type of the cache, fp16 or int8.
template <typename T>
static void attend_prefill_fp16(const Cache& cache, const int32_t* table, const float* q,
                                int q_stride, int first, int count, int kv, int group,
                                const AttentionParams& params, float* scratch, float* out,
                                int out_stride) {
  const int window = params.window;
  const int dim = cache.dim, rows = (count * group + 7) / 8 * 8, end = first + count;
  float* s = scratch;             // [kKeys, rows]
  float* acc = s + kKeys * rows;  // [rows, dim]
  float* factor = acc + rows * dim;
  float* largest = factor + rows;
  float* sum = largest + rows;
  float* shrink = sum + rows;
  int32_t* index = reinterpret_cast<int32_t*>(shrink + rows);  // the cache index of a row's query
  uint16_t* weights = reinterpret_cast<uint16_t*>(index + rows);  // [kKeys, rows]
  uint16_t* qt = weights + kKeys * rows;                             // [dim, rows]
  uint16_t* converted = qt + dim * rows;                             // [kKeys, dim], used for int8
  for (int r = 0; r < rows; r++) {
    const int query = r / group < count ? r / group : count - 1;  // rows past the last repeat the last query
    const float* p = q + query * q_stride + (kv * group + r % group) * dim;
    const float up = to_small(p, dim, factor + r);
    factor[r] *= params.scale * kLog2e;  // scores are exponents of two
    for (int d = 0; d < dim; d += W) {
      uint16_t fp16[W];
      store_fp16(fp16, load(p + d) * up);
      for (int i = 0; i < W; i++) qt[(d + i) * rows + r] = fp16[i];
    }
    index[r] = first + query;
    largest[r] = -1e30f;
    sum[r] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * rows * dim);
  const Reader keys_at(reinterpret_cast<const T*>(cache.keys), cache, table, kv);
  const Reader values_at(reinterpret_cast<const T*>(cache.values), cache, table, kv);
  const uint16_t* at[kKeys + 4];
  auto find = [&](const Reader<T>& side, int first, int count) {
    if constexpr (sizeof(T) == 1)
      side.each_scaled(first, count, [&](int n, const T* p, float scale) {
        int8_to_fp16(p, dim, scale, converted + n * dim);
        at[n] = converted + n * dim;
      });
    else
      side.each(first, count, [&](int n, const T* p) { at[n] = p; });
  };
  int key = first_key(window, first, kKeys);
  for (; key < end; key += kKeys) {
    const int keys = end - key < kKeys ? end - key : kKeys;
    find(keys_at, key, keys);
    for (int n = keys; n < keys + 4; n++) at[n] = at[keys - 1];
    score_fp16(at, keys, qt, rows, dim, factor, s);
    if (params.softcap > 0) soft_cap(s, keys * rows, 1, params.softcap * kLog2e);
    // Some query does not see all of these keys.
    if (key + keys - 1 > first || window > 0) mask(s, key, keys, index, window, rows);
    weigh_scores(s, keys, rows, largest, sum, shrink, weights);
    find(values_at, key, keys);
    weigh_fp16(weights, at, keys, rows, dim, shrink, acc);
  }
  if (!all_finite(acc, rows * dim))
    return attend_prefill_of<T>(cache, table, q, q_stride, first, count, kv, group, params, scratch,
                                out, out_stride);
  for (int r = 0; r < count * group; r++) {
    float* to = out + (r / group) * out_stride + (kv * group + r % group) * dim;
    const float sink = params.sink_weight(kv * group + r % group, largest[r] * kLn2);
    const float inverse = 1.0f / (sum[r] + sink);
    for (int d = 0; d < dim; d++) to[d] = acc[r * dim + d] * inverse;
  }
}

// Decode attention of G heads that share a KV head, over indices [from, to). The hardware prefetcher
// cannot follow the block table: while keys are scored, the keys and values kKeysAhead later are
// prefetched.
template <int G>
static void decode_heads_fp16(const Cache& cache, const int32_t* table, const float* q, int from,
                              int to, int kv, const AttentionParams& params, float* acc,
                              float* largest, float* sum) {
  const int dim = cache.dim;
  const Reader keys_at(cache.keys, cache, table, kv);
  const ptrdiff_t to_values = cache.values - cache.keys;  // distance from a key to its value
  const uint16_t* p[kKeys + 8];
  float s[G][kKeys + 8], factor[G];
  uint16_t w[G][kKeys + 8], qh[G * kMaxDim];
  for (int g = 0; g < G; g++) {
    const float up = to_small(q + g * dim, dim, factor + g);
    factor[g] *= params.scale * kLog2e;
    for (int d = 0; d < dim; d += W) store_fp16(qh + g * dim + d, load(q + g * dim + d) * up);
    largest[g] = -1e30f, sum[g] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * G * dim);
  for (int key = from; key < to; key += kKeys) {
    const int keys = to - key < kKeys ? to - key : kKeys;
    keys_at.each(key, keys, [&](int n, const uint16_t* at) { p[n] = at; });
    const int padded = (keys + 7) / 8 * 8;
    for (int n = keys; n < keys + 8; n++) p[n] = p[keys - 1];
    for (int n = 0; n < keys; n += 4) {
      unrolled<4>([&](auto j) { prefetch(p[n + j] + to_values, dim); });
      if (n + kKeysAhead < keys) unrolled<4>([&](auto j) { prefetch(p[n + kKeysAhead + j], dim); });
      f32v total[G];
      unrolled<G>([&](auto g) { total[g] = f32v{}; });
      for (int run = 0; run < dim; run += 2 * kRun) {
        const int end = run + 2 * kRun < dim ? run + 2 * kRun : dim;
        float16x8_t x[G][4];
        unrolled<G>([&](auto g) {
          unrolled<4>([&](auto j) { x[g][j] = vdupq_n_f16(0); });
        });
#pragma GCC unroll 1  // unrolled, the loop has too few registers for the sums
        for (int d = run; d < end; d += 8) {
          float16x8_t k[4];
          unrolled<4>([&](auto j) { k[j] = load_fp16x8(p[n + j] + d); });
          unrolled<G>([&](auto g) {
            const float16x8_t query = load_fp16x8(qh + g * dim + d);
            unrolled<4>([&](auto j) { x[g][j] = vfmaq_f16(x[g][j], k[j], query); });
          });
        }
        unrolled<G>([&](auto g) {
          const float16x8_t two = vpaddq_f16(x[g][0], x[g][1]), more = vpaddq_f16(x[g][2], x[g][3]);
          const float16x8_t four = vpaddq_f16(two, more);
          total[g] += vpaddq_f32(low(four), high(four)) * factor[g];
        });
      }
      unrolled<G>([&](auto g) { store(s[g] + n, total[g]); });
    }
    for (int g = 0; g < G; g++) {
      if (params.softcap > 0) soft_cap(s[g], keys, 1, params.softcap * kLog2e);
      const float less = weigh_head(s[g], keys, padded, largest + g, sum + g, w[g]);
      if (key > from && less != 1.0f)
        for (int d = 0; d < dim; d++) acc[g * dim + d] *= less;
    }
    for (int n = 0; n < padded; n++) p[n] += to_values;
    auto tile = [&](int d, auto count) {
      constexpr int V = decltype(count)::value;
      float16x8_t a[G][V];
      unrolled<G>([&](auto g) {
        unrolled<V>([&](auto j) { a[g][j] = vdupq_n_f16(0); });
      });
      for (int n = 0; n < keys; n += 8) {  // past the last key the weights are 0
        float16x8_t weights[G];
        unrolled<G>([&](auto g) { weights[g] = load_fp16x8(w[g] + n); });
        unrolled<8>([&](auto i) {
          unrolled<V>([&](auto j) {
            const float16x8_t value = load_fp16x8(p[n + i] + d + 8 * j);
            unrolled<G>([&](auto g) { a[g][j] = add_lane<i>(a[g][j], value, weights[g]); });
          });
        });
      }
      unrolled<G>([&](auto g) {
        unrolled<V>([&](auto j) {
          float* sums = acc + g * dim + d + 8 * j;
          store(sums, load(sums) + low(a[g][j]));
          store(sums + 4, load(sums + 4) + high(a[g][j]));
        });
      });
    };
    int d = 0;
    for (; d + 32 <= dim; d += 32) tile(d, std::integral_constant<int, 4>{});
    for (; d < dim; d += 8) tile(d, std::integral_constant<int, 1>{});
  }
  for (int g = 0; g < G; g++) largest[g] *= kLn2;
}

static void attend_decode_fp16(const Cache& cache, const int32_t* table, const float* q, int from,
                               int to, int kv, int group, const AttentionParams& params, float* acc,
                               float* largest, float* sum) {
  const int dim = cache.dim;
  const float* first = q + static_cast<size_t>(kv) * group * dim;
  each_four(group, [&](auto count, int g) {
    decode_heads_fp16<decltype(count)::value>(cache, table, first + g * dim, from, to, kv, params,
                                              acc + g * dim, largest + g, sum + g);
  });
  if (!all_finite(acc, group * dim))
    attend_decode(cache, table, q, from, to, kv, group, params, acc, largest, sum);
}
