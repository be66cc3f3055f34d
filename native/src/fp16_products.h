// Matmuls with F16 matrices in fp16 arithmetic (Arm). `kernels_neon.cpp` includes this file after
// `fp16_attention.h`.
//
// A block of 32 activations is scaled by a power of two to values below 2^-5, like queries, so that the
// sum of its products with any fp16 numbers stays finite. The sums of blocks are added in fp32. Every
// path below gives a token the same bits.

constexpr int kF16Lanes = 8;

// Eight adjacent rows of weights times 8 · V tokens; `total` [8, 8 · V].
template <int V>
static inline void multiply_tile(const uint16_t* w, const Activations& a, int t, float* total) {
  const uint16_t* x[V];
  const float* scale[V];
  unrolled<V>([&](auto v) {
    const size_t tile = static_cast<size_t>(t / kTile + v) * a.blocks * kTile;
    x[v] = a.fp16 + tile * kBlock;
    scale[v] = a.fp16_scale + tile;
  });
  __builtin_memset(total, 0, sizeof(float) * kF16Lanes * V * kTile);
  for (int b = 0; b < a.blocks; b++) {
    float16x8_t sum[8][V];
    unrolled<8>([&](auto i) { unrolled<V>([&](auto v) { sum[i][v] = vdupq_n_f16(0); }); });
    for (int k = 0; k < kBlock; k++) {
      const float16x8_t weights = load_fp16x8(w);
      unrolled<V>([&](auto v) {
        const float16x8_t tokens = load_fp16x8(x[v]);
        unrolled<8>([&](auto i) { sum[i][v] = add_lane<i>(sum[i][v], tokens, weights); });
        x[v] += kTile;
      });
      w += kF16Lanes;
    }
    unrolled<V>([&](auto v) {
      const f32v s0 = load(scale[v]), s1 = load(scale[v] + 4);
      scale[v] += kTile;
      unrolled<8>([&](auto i) {
        float* to = total + (i * V + v) * kTile;
        store(to, mul_add(low(sum[i][v]), s0, load(to)));
        store(to + 4, mul_add(high(sum[i][v]), s1, load(to + 4)));
      });
    });
  }
}

// G times eight rows times M tokens, the lanes of one tile; `total` [G, M, 8].
template <int G, int M>
static inline void multiply_few(const uint16_t* const* rows, const Activations& a, int t,
                                f32v (*total)[M][2]) {
  const size_t tile = static_cast<size_t>(t / kTile) * a.blocks * kTile;
  const uint16_t* x = a.fp16 + tile * kBlock;
  const float* scale = a.fp16_scale + tile;
  const uint16_t* w[G];
  unrolled<G>([&](auto g) {
    w[g] = rows[g];
    unrolled<M>([&](auto m) { total[g][m][0] = total[g][m][1] = f32v{}; });
  });
  for (int b = 0; b < a.blocks; b++) {
    float16x8_t sum[G][M];
    unrolled<G>([&](auto g) { unrolled<M>([&](auto m) { sum[g][m] = vdupq_n_f16(0); }); });
    unrolled<G>([&](auto g) {
      prefetch<kBlock * kF16Lanes * 2>(reinterpret_cast<const uint8_t*>(w[g]));
    });
    for (int k = 0; k < kBlock; k++) {
      const float16x8_t tokens = load_fp16x8(x);
      unrolled<G>([&](auto g) {
        const float16x8_t weights = load_fp16x8(w[g] + k * kF16Lanes);
        unrolled<M>([&](auto m) { sum[g][m] = add_lane<m>(sum[g][m], weights, tokens); });
      });
      x += kTile;
    }
    unrolled<G>([&](auto g) {
      w[g] += kBlock * kF16Lanes;
      unrolled<M>([&](auto m) {
        const f32v s = splat(scale[m]);
        total[g][m][0] = mul_add(low(sum[g][m]), s, total[g][m][0]);
        total[g][m][1] = mul_add(high(sum[g][m]), s, total[g][m][1]);
      });
    });
    scale += kTile;
  }
}

// The exact products of eight rows and M tokens; `total` [M, 8].
template <int M>
static inline void multiply_exact(const Packed& w, const Activations& a, int g, int t,
                                  float* total) {
  auto* p = reinterpret_cast<const uint16_t*>(w.group(g));
  const float* x = a.values + static_cast<size_t>(t) * a.stride;
  f32v sum[M][2];
  unrolled<M>([&](auto m) { sum[m][0] = sum[m][1] = f32v{}; });
  for (int k = 0; k < w.cols; k++) {
    const float16x8_t weights = load_fp16x8(p + k * kF16Lanes);
    const f32v first = low(weights), last = high(weights);
    unrolled<M>([&](auto m) {
      const f32v token = splat(x[static_cast<size_t>(m) * a.stride + k]);
      sum[m][0] = mul_add(first, token, sum[m][0]);
      sum[m][1] = mul_add(last, token, sum[m][1]);
    });
  }
  unrolled<M>([&](auto m) {
    store(total + m * kF16Lanes, sum[m][0]), store(total + m * kF16Lanes + 4, sum[m][1]);
  });
}

// The products of one token with the rows of a group, `step` apart in `total`.
static inline void finish_rows(const Packed& w, int g, const float* total, int step, float* out,
                               bool add) {
  const int first = g * kF16Lanes, left = w.rows - first;
  for (int i = 0; i < kF16Lanes && i < left; i++) {
    float value = total[i * step] * kF16Unit + (w.bias == nullptr ? 0.0f : w.bias[first + i]);
    out[i] = add ? out[i] + value : value;
  }
}

template <int V>
static void multiply_tokens(const Packed& w, const Activations& a, int g, int t, int count,
                            float* out, int stride, bool add) {
  float total[kF16Lanes * V * kTile];
  multiply_tile<V>(reinterpret_cast<const uint16_t*>(w.group(g)), a, t, total);
  for (int m = 0; m < count; m++)
    finish_rows(w, g, total + m, V * kTile, out + static_cast<size_t>(m) * stride, add);
}

template <int M>
static void multiply_rows(const Packed& w, const Activations& a, int t, int g0, int g1, float* out,
                          int stride, bool add) {
  constexpr int G = 4;
  for (int g = g0; g < g1; g += G, out += G * kF16Lanes) {
    const uint16_t* rows[G];
    for (int n = 0; n < G; n++)  // past the last row of tiles: the last again
      rows[n] = reinterpret_cast<const uint16_t*>(w.group(g + n < g1 ? g + n : g1 - 1));
    f32v total[G][M][2];
    multiply_few<G, M>(rows, a, t, total);
    for (int n = 0; n < G && g + n < g1; n++)
      for (int m = 0; m < M; m++) {
        float line[kF16Lanes];
        store(line, total[n][m][0]), store(line + 4, total[n][m][1]);
        finish_rows(w, g + n, line, 1, out + static_cast<size_t>(m) * stride + n * kF16Lanes, add);
      }
  }
}

static void matmul_f16(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                       float* out, int stride, bool add) {
  auto at = [&](int t, int g) {
    return out + static_cast<size_t>(t - t0) * stride + (g - g0) * kF16Lanes;
  };
  if (a.fp16 == nullptr) {
    for (int g = g0; g < g1; g++)
      for (int t = t0, count; t < t1; t += count) {
        float total[kTile * kF16Lanes];
        count = t1 - t < kTile ? 1 : kTile;
        (count == 1 ? multiply_exact<1> : multiply_exact<kTile>)(w, a, g, t, total);
        for (int m = 0; m < count; m++)
          finish_rows(w, g, total + m * kF16Lanes, 1, at(t + m, g), add);
      }
    return;
  }
  switch (t1 - t0) {
    case 1: return multiply_rows<1>(w, a, t0, g0, g1, out, stride, add);
    case 2: return multiply_rows<2>(w, a, t0, g0, g1, out, stride, add);
    case 3: return multiply_rows<3>(w, a, t0, g0, g1, out, stride, add);
    case 4: return multiply_rows<4>(w, a, t0, g0, g1, out, stride, add);
    default: break;
  }
  // A panel of tokens stays in the L2 cache while all groups pass over the panel.
  const int panel = 131072 / (a.blocks * kBlock) / (2 * kTile) * (2 * kTile);
  const int step = panel < 2 * kTile ? 2 * kTile : panel;
  for (int from = t0; from < t1; from += step) {
    const int to = from + step < t1 ? from + step : t1;
    for (int g = g0; g < g1; g++)
      for (int t = from; t < to; t += 2 * kTile) {
        const int count = to - t < 2 * kTile ? to - t : 2 * kTile;
        if (count > kTile) {
          multiply_tokens<2>(w, a, g, t, count, at(t, g), stride, add);
        } else {
          multiply_tokens<1>(w, a, g, t, count, at(t, g), stride, add);
        }
      }
  }
}

static void unpack_row_f16(const Packed& w, int row, float* out) {
  auto* p = reinterpret_cast<const uint16_t*>(w.group(row / kF16Lanes)) + row % kF16Lanes;
  for (int k = 0; k < w.cols; k++) out[k] = fp16_to_float(p[k * kF16Lanes]) * kF16Unit;
}

// The two paths of all formats.
static void matmul_any(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                       float* out, int stride, bool add) {
  (w.format == Format::kF16 ? matmul_f16 : matmul)(w, a, t0, t1, g0, g1, out, stride, add);
}
static void unpack_row_any(const Packed& w, int row, float* out) {
  (w.format == Format::kF16 ? unpack_row_f16 : unpack_row)(w, row, out);
}

// The equivalent of `dot_bytes` for fp16.
static double multiply_fp16(int rounds) {
  constexpr int kChains = 12;
  const float16x8_t a = vdupq_n_f16(0.5f), b = vdupq_n_f16(0.25f);
  float16x8_t sum[kChains];
  unrolled<kChains>([&](auto i) { sum[i] = vdupq_n_f16(0); });
  for (int n = 0; n < rounds; n++)
    unrolled<kChains>([&](auto i) { sum[i] = add_lane<i % 8>(sum[i], a, b); });
  return 2.0 * 8 * kChains * rounds;
}

static void to_fp16_blocks(const float* x, int n, int t, int first, int blocks, uint16_t* fp16,
                      float* scale) {
  const size_t tile = (static_cast<size_t>(t / kTile) * blocks + first) * kTile;
  fp16 += tile * kBlock + t % kTile;
  scale += tile + t % kTile;
  for (int at = 0; at < n; at += kBlock, fp16 += kTile * kBlock, scale += kTile) {
    float padded[kBlock] = {};
    const float* p = x + at;
    if (at + kBlock > n) {
      __builtin_memcpy(padded, p, sizeof(float) * (n - at));
      p = padded;
    }
    const float up = to_small(p, kBlock, scale);
    uint16_t line[kBlock];
    for (int i = 0; i < kBlock; i += 8) store_fp16x8(line + i, load(p + i) * up, load(p + i + 4) * up);
    for (int i = 0; i < kBlock; i++) fp16[i * kTile] = line[i];
  }
}
