// Decode attention over an int8 cache (Arm): int8 products, read directly from the cache.
// `kernels_neon.cpp` includes this file after `fp16_attention.h`. `attention_impl.h` defines the results.
//
//   scores   query · key, both in int8 with a scale per head
//   output   (128 · high + low) · value. A weight, multiplied by the scale of its value, has two bytes:
//            with one byte, a key of large weight would round all other weights to zero
//
// Sums have 32 bits; the sum of a tile's values is at most 64 · 127 · 127 · 129. The values of four
// tokens are transposed for the product over tokens: for each channel, one byte of each token.

constexpr float kTwoBytes = 127.0f * 128.0f;

// Split 16 integers of at most `kTwoBytes` into bytes: x = 128 · high + low.
static inline void split_bytes(const i32v* x, int8_t* high, int8_t* low) {
  const int16x8_t a = vcombine_s16(vmovn_s32((int32x4_t)x[0]), vmovn_s32((int32x4_t)x[1]));
  const int16x8_t b = vcombine_s16(vmovn_s32((int32x4_t)x[2]), vmovn_s32((int32x4_t)x[3]));
  const int16x8_t ha = vrshrq_n_s16(a, 7), hb = vrshrq_n_s16(b, 7);  // to nearest: |low| ≤ 64
  const int16x8_t la = vsubq_s16(a, vshlq_n_s16(ha, 7)), lb = vsubq_s16(b, vshlq_n_s16(hb, 7));
  vst1q_s8(high, vcombine_s8(vmovn_s16(ha), vmovn_s16(hb)));
  vst1q_s8(low, vcombine_s8(vmovn_s16(la), vmovn_s16(lb)));
}

static inline i32v to_integers(f32v x) { return (i32v)vcvtnq_s32_f32((float32x4_t)x); }

// Convert n floats (a multiple of 16) to int8. Return their scale.
static inline float to_bytes(const float* x, int n, int8_t* out) {
  f32v maximum = {};
  for (int i = 0; i < n; i += W) maximum = max_of(maximum, abs_of(load(x + i)));
  const float largest = max_lanes(maximum), up = 127.0f / (largest > 1e-30f ? largest : 1e-30f);
  for (int i = 0; i < n; i += 16) {
    int16x4_t whole[4];
    unrolled<4>([&](auto j) { whole[j] = vmovn_s32((int32x4_t)to_integers(load(x + i + 4 * j) * up)); });
    const int16x8_t a = vcombine_s16(whole[0], whole[1]), b = vcombine_s16(whole[2], whole[3]);
    vst1q_s8(out + i, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
  }
  return largest / 127.0f;
}

// Convert n floats (a multiple of 16) to two bytes each. Return their scale.
static inline float to_two_bytes(const float* x, int n, int8_t* high, int8_t* low) {
  f32v maximum = {};
  for (int i = 0; i < n; i += W) maximum = max_of(maximum, abs_of(load(x + i)));
  const float largest = max_lanes(maximum), up = kTwoBytes / (largest > 1e-30f ? largest : 1e-30f);
  for (int i = 0; i < n; i += 16) {
    i32v whole[4];
    unrolled<4>([&](auto j) { whole[j] = to_integers(load(x + i + 4 * j) * up); });
    split_bytes(whole, high + i, low + i);
  }
  return largest / kTwoBytes;
}

template <int I>
static inline __attribute__((always_inline)) int32x4_t dot_lane(int32x4_t acc, int8x16_t x,
                                                                int8x16_t lanes) {
  asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(acc) : "w"(x), "w"(lanes), "n"(I));
  return acc;
}

// Scores of four keys and G queries, as exponents of two.
template <int G>
static inline void score_int8(const int8_t* const* k, const int8_t* q, int dim, const float* factor,
                              f32v scales, float (*s)[kKeys + 16], int n) {
  int32x4_t x[G][4];
  unrolled<G>([&](auto g) {
    unrolled<4>([&](auto j) { x[g][j] = vdupq_n_s32(0); });
  });
  for (int d = 0; d < dim; d += 16) {
    int8x16_t key[4];
    unrolled<4>([&](auto j) { key[j] = vld1q_s8(k[j] + d); });
    unrolled<G>([&](auto g) {
      const int8x16_t query = vld1q_s8(q + g * dim + d);
      unrolled<4>([&](auto j) { x[g][j] = vdotq_s32(x[g][j], key[j], query); });
    });
  }
  unrolled<G>([&](auto g) {
    const int32x4_t two = vpaddq_s32(x[g][0], x[g][1]), more = vpaddq_s32(x[g][2], x[g][3]);
    store(s[g] + n, (f32v)vcvtq_f32_s32(vpaddq_s32(two, more)) * factor[g] * scales);
  });
}

// acc [G, dim] += weights · V for eight channels of `keys` tokens (a multiple of 16). `Half`: the lower
// or upper eight of the sixteen channels at d.
template <int G, int Half>
static inline void weigh_int8(const int8_t* const* v, int keys, int dim, int d,
                              const int8_t (*high)[kKeys + 16], const int8_t (*low)[kKeys + 16],
                              const float* back, float* acc) {
  int32x4_t h[G][2], l[G][2];
  unrolled<G>([&](auto g) {
    unrolled<2>([&](auto j) { h[g][j] = l[g][j] = vdupq_n_s32(0); });
  });
  for (int n = 0; n < keys; n += 16) {
    int8x16_t wh[G], wl[G];
    unrolled<G>([&](auto g) { wh[g] = vld1q_s8(high[g] + n), wl[g] = vld1q_s8(low[g] + n); });
    unrolled<4>([&](auto i) {
      const int8_t* const* of = v + n + 4 * i;
      const int8x16_t a = vld1q_s8(of[0] + d), b = vld1q_s8(of[1] + d);
      const int8x16_t c = vld1q_s8(of[2] + d), e = vld1q_s8(of[3] + d);
      const int8x16_t ac = Half == 0 ? vzip1q_s8(a, c) : vzip2q_s8(a, c);
      const int8x16_t be = Half == 0 ? vzip1q_s8(b, e) : vzip2q_s8(b, e);
      const int8x16_t first = vzip1q_s8(ac, be), second = vzip2q_s8(ac, be);
      unrolled<G>([&](auto g) {
        h[g][0] = dot_lane<i>(h[g][0], first, wh[g]), h[g][1] = dot_lane<i>(h[g][1], second, wh[g]);
        l[g][0] = dot_lane<i>(l[g][0], first, wl[g]), l[g][1] = dot_lane<i>(l[g][1], second, wl[g]);
      });
    });
  }
  unrolled<G>([&](auto g) {
    unrolled<2>([&](auto j) {
      float* to = acc + g * dim + d + 8 * Half + 4 * j;
      const int32x4_t both = vaddq_s32(vshlq_n_s32(h[g][j], 7), l[g][j]);
      store(to, mul_add((f32v)vcvtq_f32_s32(both), splat(back[g]), load(to)));
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
  const int8_t* p[kKeys + 16];
  float s[G][kKeys + 16], scales[kKeys + 16], factor[G], back[G];
  int8_t high[G][kKeys + 16], low[G][kKeys + 16], queries[G * kMaxDim];
  for (int g = 0; g < G; g++) {
    factor[g] = to_bytes(q + g * dim, dim, queries + g * dim) * params.scale * kLog2e;
    largest[g] = -1e30f, sum[g] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * G * dim);
  for (int key = from; key < to; key += kKeys) {
    const int keys = to - key < kKeys ? to - key : kKeys, padded = (keys + 15) / 16 * 16;
    auto find = [&](const Reader<int8_t>& side) {
      side.each_scaled(key, keys, [&](int n, const int8_t* at, float scale) { p[n] = at, scales[n] = scale; });
      for (int n = keys; n < padded; n++) p[n] = p[keys - 1], scales[n] = 0;
    };
    find(keys_at);
    for (int n = 0; n < keys; n += 4) score_int8<G>(p + n, queries, dim, factor, load(scales + n), s, n);
    find(values_at);
    for (int g = 0; g < G; g++) {
      if (params.softcap > 0) soft_cap(s[g], keys, 1, params.softcap * kLog2e);
      for (int n = keys; n < padded; n++) s[g][n] = -__builtin_inff();
      f32v maximum = splat(largest[g]), total = {};
      for (int n = 0; n < padded; n += 4) maximum = max_of(maximum, load(s[g] + n));
      const float now = max_lanes(maximum), less = exp2_of(splat(largest[g] - now))[0];
      for (int n = 0; n < padded; n += 4) {
        const f32v e = exp2_of(load(s[g] + n) - now);
        total += e;
        store(s[g] + n, e * load(scales + n));
      }
      sum[g] = sum[g] * less + sum_lanes(total);
      largest[g] = now;
      back[g] = to_two_bytes(s[g], padded, high[g], low[g]);
      if (key > from && less != 1.0f)
        for (int d = 0; d < dim; d++) acc[g * dim + d] *= less;
    }
    for (int d = 0; d < dim; d += 16) {
      weigh_int8<G, 0>(p, padded, dim, d, high, low, back, acc);
      weigh_int8<G, 1>(p, padded, dim, d, high, low, back, acc);
    }
  }
  for (int g = 0; g < G; g++) largest[g] *= kLn2;
}

static void attend_decode_int8(const Cache& cache, const int32_t* table, const float* q, int from,
                               int to, int kv, int group, const AttentionParams& params, float* acc,
                               float* largest, float* sum) {
  const int dim = cache.dim;
  if (dim % 16 != 0)
    return attend_decode_of<int8_t>(cache, table, q, from, to, kv, group, params, acc, largest, sum);
  const float* first = q + static_cast<size_t>(kv) * group * dim;
  each_four(group, [&](auto count, int g) {
    decode_heads_int8<decltype(count)::value>(cache, table, first + g * dim, from, to, kv, params,
                                              acc + g * dim, largest + g, sum + g);
  });
}
