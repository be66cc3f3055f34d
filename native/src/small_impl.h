// The elementwise operations, compiled once per instruction set. Each `kernels_*.cpp` includes this file
// inside its own namespace, after `simd.h`. `twostroke/kernels/reference.py` defines the results.

static void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  f32v squares = {};
  int i = 0;
  for (; i + W <= n; i += W) squares = mul_add(load(x + i), load(x + i), squares);
  float total = sum_lanes(squares);
  for (; i < n; i++) total += x[i] * x[i];
  float r = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + W <= n; i += W) store(out + i, load(weight + i) * (load(x + i) * r));
  for (; i < n; i++) out[i] = weight[i] * (x[i] * r);
}

static void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n,
                       float* out) {
  f32v sums = {};
  int i = 0;
  for (; i + W <= n; i += W) sums += load(x + i);
  float total = sum_lanes(sums);
  for (; i < n; i++) total += x[i];
  const float mean = total / static_cast<float>(n);
  f32v squares = {};
  for (i = 0; i + W <= n; i += W) {
    const f32v d = load(x + i) - mean;
    squares = mul_add(d, d, squares);
  }
  total = sum_lanes(squares);
  for (; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
  const float r = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + W <= n; i += W) {
    const f32v normed = load(weight + i) * ((load(x + i) - mean) * r);
    store(out + i, bias == nullptr ? normed : normed + load(bias + i));
  }
  for (; i < n; i++) out[i] = weight[i] * ((x[i] - mean) * r) + (bias == nullptr ? 0.0f : bias[i]);
}

static void rope(float* x, int heads, int dim, const float* cos, const float* sin, int half) {
  for (int h = 0; h < heads; h++, x += dim) {
    int i = 0;
    for (; i + W <= half; i += W) {
      f32v a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, a * c - b * s);
      store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
      float a = x[i], b = x[half + i];
      x[i] = a * cos[i] - b * sin[i];
      x[half + i] = b * cos[i] + a * sin[i];
    }
  }
}

// e^x for x ≤ 88, with an error of about 2 · 10^-7. Below −87 the result is e^-87, which changes no sum
// here.
static inline f32v exp_of(f32v x) {
  const float shift = 12582912.0f;  // 1.5 · 2^23: the last bits of the sum are the integer
  x = max_of(x, splat(-87.0f));
  f32v y = mul_add(x, splat(1.44269504f), splat(shift)), n = y - shift;
  f32v r = mul_add(n, splat(2.12194440e-4f), mul_add(n, splat(-0.693359375f), x));
  f32v p = splat(1.9875691500e-4f);
  p = mul_add(p, r, splat(1.3981999507e-3f));
  p = mul_add(p, r, splat(8.3334519073e-3f));
  p = mul_add(p, r, splat(4.1665795894e-2f));
  p = mul_add(p, r, splat(1.6666665459e-1f));
  p = mul_add(p, r, splat(5.0000001201e-1f));
  u32v power = ((u32v)y + 127u) << 23;
  return (mul_add(p * r, r, r) + 1.0f) * (f32v)power;
}

static void silu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) {
    f32v g = load(gate + i);
    // The exponent is bounded to keep e^-g finite: below −80, g · sigmoid(g) is 0 in fp32.
    f32v bounded = max_of(g, splat(-80.0f));
    store(out + i, g / (1.0f + exp_of(-bounded)) * load(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
}

// gate · ½ (1 + tanh(√(2/π) (gate + 0.044715 gate³))) · up, where ½ (1 + tanh(y)) = 1 / (1 + e^-2y).
static void gelu_tanh_mul(const float* gate, const float* up, int n, float* out) {
  constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 √(2/π), and 0.044715 · 2 √(2/π)
  int i = 0;
  for (; i + W <= n; i += W) {
    f32v g = load(gate + i), y = g * mul_add(g * g, splat(kCubic), splat(kLinear));
    f32v bounded = max_of(y, splat(-80.0f));  // as in `silu_mul`
    store(out + i, g / (1.0f + exp_of(-bounded)) * load(up + i));
  }
  for (; i < n; i++) {
    const float g = gate[i], y = g * (kLinear + kCubic * g * g);
    out[i] = g / (1.0f + __builtin_expf(-y)) * up[i];
  }
}

// gate · Φ(gate) · up with Φ(x) = ½ (1 + erf(x / √2)), with an error of 10^-7. The smaller of Φ and
// 1 − Φ is e^(−x²/2) times a polynomial (Abramowitz and Stegun 7.1.26), which keeps its relative
// precision.
static void gelu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) {
    const f32v g = load(gate + i), z = abs_of(g) * 0.707106781f;
    const f32v t = 1.0f / mul_add(z, splat(0.3275911f), splat(1.0f));
    f32v p = mul_add(t, splat(0.5307027145f), splat(-0.7265760135f));
    p = mul_add(p, t, splat(0.7107068705f));
    p = mul_add(p, t, splat(-0.142248368f));
    p = mul_add(p, t, splat(0.127414796f)) * t;
    const f32v tail = p * exp_of(-z * z);
    store(out + i, g * (g > 0.0f ? 1.0f - tail : tail) * load(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] * 0.5f * __builtin_erfcf(gate[i] * -0.707106781f) * up[i];
}

static void clamped_swiglu(const float* gate, const float* up, float alpha, float limit, int n,
                           float* out) {
  int i = 0;
  for (; i + W <= n; i += W) {
    f32v g = load(gate + i), u = load(up + i);
    g = g > limit ? splat(limit) : g;  // NaN stays NaN
    u = u > limit ? splat(limit) : u;
    u = u < -limit ? splat(-limit) : u;
    const f32v bounded = max_of(g * alpha, splat(-80.0f));  // as in `silu_mul`
    store(out + i, g / (1.0f + exp_of(-bounded)) * (u + 1.0f));
  }
  for (; i < n; i++) {
    const float g = gate[i] > limit ? limit : gate[i];
    const float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    out[i] = g / (1.0f + __builtin_expf(-alpha * g)) * (u + 1.0f);
  }
}

// tanh with an error of about 2 · 10^-7. NaN stays NaN.
static inline f32v tanh_of(f32v x) {
  const f32v bounded = -max_of(splat(-40.0f), -max_of(splat(-40.0f), x));
  const f32v e = exp_of(bounded * -2.0f);
  return (1.0f - e) / (1.0f + e) + (bounded - bounded);
}

static void soft_cap(float* x, int n, float scale, float cap) {
  const float inner = scale / cap;
  int i = 0;
  for (; i + W <= n; i += W) store(x + i, tanh_of(load(x + i) * inner) * cap);
  for (; i < n; i++) x[i] = __builtin_tanhf(x[i] * inner) * cap;
}

static void to_fp16(const float* x, int n, uint16_t* out) {
  int i = 0;
  for (; i + W <= n; i += W) store_fp16(out + i, load(x + i));
  for (; i < n; i++) out[i] = float_to_fp16(x[i]);
}

static int argmax(const float* x, int n) {
  f32v maximum = splat(-__builtin_inff());
  int i = 0;
  for (; i + W <= n; i += W) maximum = max_of(maximum, load(x + i));
  float best = max_lanes(maximum);
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  for (i = 0; i < n; i++)
    if (x[i] == best) return i;
  return 0;  // all scores are NaN
}

static float log_sum_exp(const float* x, int n) {
  constexpr int kRun = 256;  // vectors that are summed in fp32 before the sum is added to a double
  const float maximum = x[argmax(x, n)];
  double total = 0;
  int i = 0;
  while (i + W <= n) {
    f32v sum = {};
    for (const int end = i + kRun * W; i + W <= n && i < end; i += W)
      sum += exp_of(load(x + i) - maximum);
    total += sum_lanes(sum);
  }
  for (; i < n; i++) total += __builtin_expf(x[i] - maximum);
  return maximum + static_cast<float>(__builtin_log(total));
}

static int draw(const float* x, int n, uint32_t key0, uint32_t key1) {
  int best = argmax(x, n);
  float score = x[best] + gumbel(best, key0, key1);
  u32v token;
  for (int i = 0; i < W; i++) token[i] = i;
  int at = 0;
  for (; at + W <= n; at += W, token += W) {
    // Noise above s is as rare as a uniform number below e^-s, so few tokens can win. The noise is
    // computed for those tokens only.
    u32v bits = token ^ key0;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    bits = (bits ^ bits >> 16) + key1;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    bits ^= bits >> 16;
    f32v uniform = __builtin_convertvector(bits, f32v) * 0x1p-32f;
    f32v margin = load(x + at) - score;
    f32v chance = exp_of(margin > splat(80.0f) ? splat(80.0f) : margin) * 1.001f;
    i32v possible = uniform <= chance;
    bool any = false;
    for (int i = 0; i < W; i++) any |= possible[i] != 0;
    if (!any) continue;
    for (int i = 0; i < W; i++) {
      if (possible[i] == 0) continue;
      float now = x[at + i] + gumbel(at + i, key0, key1);
      if (now > score) score = now, best = at + i;
    }
  }
  for (; at < n; at++) {
    float now = x[at] + gumbel(at, key0, key1);
    if (now > score) score = now, best = at;
  }
  return best;
}

// Run rounds of the machine's int8 products on registers alone, an upper bound for every kernel. Return
// the number of multiplications and additions.
static double dot_bytes(int rounds) {
  [[maybe_unused]] constexpr int kChains = 12;  // enough to hide the latency of one product
#if defined(TS_NEON)
  int32x4_t sum[kChains], a = vdupq_n_s32(1), b = vdupq_n_s32(2);
  unrolled<kChains>([&](auto i) { sum[i] = vdupq_n_s32(i); });
  for (int n = 0; n < rounds; n++)
    unrolled<kChains>([&](auto i) {
      sum[i] = vdotq_s32(sum[i], vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
      asm volatile("" : "+w"(sum[i]));
    });
  return 2.0 * 16 * kChains * rounds;
#elif defined(TS_AVX512)
  __m512i sum[kChains], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  unrolled<kChains>([&](auto i) { sum[i] = _mm512_set1_epi32(i); });
  for (int n = 0; n < rounds; n++)
    unrolled<kChains>([&](auto i) {
#if defined(TS_VNNI)
      sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
#else
      sum[i] = _mm512_add_epi16(sum[i], _mm512_maddubs_epi16(a, b));
      asm volatile("" : "+v"(a));  // keeps the compiler from computing the product only once
#endif
      asm volatile("" : "+v"(sum[i]));
    });
  return 2.0 * 64 * kChains * rounds;
#elif defined(TS_AVX2)
  __m256i sum[kChains], a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
  unrolled<kChains>([&](auto i) { sum[i] = _mm256_set1_epi32(i); });
  for (int n = 0; n < rounds; n++)
    unrolled<kChains>([&](auto i) {
      sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(a, b));
      asm volatile("" : "+x"(a));  // keeps the compiler from computing the product only once
      asm volatile("" : "+x"(sum[i]));
    });
  return 2.0 * 32 * kChains * rounds;
#else
  (void)rounds;
  return 0;
#endif
}
