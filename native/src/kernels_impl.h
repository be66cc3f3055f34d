// The kernels, once for every instruction set: `kernels_*.cpp` include this inside a namespace of
// their own, after `simd.h`. `twostroke/kernels/reference.py` defines what each must give.

// ── products ────────────────────────────────────────────────────────────────────────────────────

// How the codes of a block become 8 vectors, in registers.
template <Format F>
static inline __attribute__((always_inline)) void unpack_codes(const uint8_t* p, i8v* w) {
  if constexpr (is_q4(F)) {
    unrolled<4>([&](auto j) {
      u8v both = (u8v)load_codes(p + j * 4 * W);
      w[j] = (i8v)(both & 15);
      w[j + 4] = (i8v)(both >> 4);
    });
  } else {
    unrolled<8>([&](auto j) { w[j] = load_codes(p + j * 4 * W); });
  }
}

template <Format F>
static inline __attribute__((always_inline)) void load_scales(const uint8_t* block, f32v& scale,
                                                              f32v& least) {
  const uint8_t* p = block + code_bytes(F, W);
  if constexpr (F == Format::kQ4F) {
    scale = load(reinterpret_cast<const float*>(p));
    least = load(reinterpret_cast<const float*>(p) + W);
  } else {
    scale = load_half(reinterpret_cast<const uint16_t*>(p));
    least = f32v{};
    if constexpr (is_q4(F)) least = load_half(reinterpret_cast<const uint16_t*>(p) + W);
  }
}

// Ask for what comes a little later: the machine's own guesses end at every page.
constexpr int kAhead = 768;  // bytes

template <int Bytes>
static inline void prefetch(const uint8_t* p) {
  for (int n = 0; n < Bytes; n += 64) __builtin_prefetch(p + kAhead + n);
}

// A block as many tiles of tokens want it: unpacked once, kept in the first cache.
struct Unpacked {
  i8v codes[8];
  f32v scale, least;
};

template <Format F>
static inline __attribute__((always_inline)) void unpack_block(const uint8_t* p, Unpacked& block) {
  unpack_codes<F>(p, block.codes);
  load_scales<F>(p, block.scale, block.least);
  if constexpr (!is_q4(F) && signed_bias != 0) block.least = block.scale * -signed_bias;
}

// M tokens' products with one group, block by block: from its packed bytes, or unpacked already.
template <Format F, int M, bool Ready>
static inline __attribute__((always_inline)) void quantised_tile(const void* group,
                                                                 const Activations& a, int t,
                                                                 f32v* acc) {
  constexpr bool has_least = is_q4(F) || signed_bias != 0;
  const size_t at = static_cast<size_t>(t / kTile) * a.blocks * kTile;
  const int8_t* codes = a.codes + at * kBlock;
  const float *scale = a.scale + at, *sum = a.sum + at;
  auto* packed = static_cast<const uint8_t*>(group);
  auto* ready = static_cast<const Unpacked*>(group);
  unrolled<M>([&](auto m) { acc[m] = f32v{}; });
  for (int b = 0; b < a.blocks; b++) {
    Unpacked here;
    if constexpr (Ready) {
      unrolled<8>([&](auto j) { here.codes[j] = ready[b].codes[j]; });
      here.scale = ready[b].scale;
      here.least = ready[b].least;
    } else {
      if constexpr (M <= 2) prefetch<block_bytes(F, W)>(packed + b * block_bytes(F, W));
      unpack_block<F>(packed + b * block_bytes(F, W), here);
    }
    unrolled<M>([&](auto m) {
      f32v dots = dot_block<F == Format::kQ8>(here.codes, codes + m * kBlock);
      acc[m] += dots * (here.scale * scale[m]);
      if constexpr (has_least) acc[m] += here.least * sum[m];
    });
    codes += kTile * kBlock;
    scale += kTile;
    sum += kTile;
  }
}

// The exact product: codes unpacked to floats, activations as they are.
template <Format F, int M>
static inline __attribute__((always_inline)) void exact_tile(const uint8_t* p,
                                                             const Activations& a, int cols, int t,
                                                             f32v* acc) {
  const size_t stride = a.stride;
  const float* x = a.values + t * stride;
  unrolled<M>([&](auto m) { acc[m] = f32v{}; });
  if constexpr (has_codes(F)) {
    for (int b = 0; b < a.blocks; b++, p += block_bytes(F, W)) {
      i8v w[8];
      f32v d, least;
      unpack_codes<F>(p, w);
      load_scales<F>(p, d, least);
      for (int j = 0; j < 8; j++) {
        for (int n = 0; n < 4; n++) {
          int k = b * kBlock + 4 * j + n;
          if (k >= cols) break;
          i32v code = (i32v)((u32v)w[j] << (24 - 8 * n)) >> 24;
          f32v value = __builtin_convertvector(code, f32v) * d + least;
          unrolled<M>([&](auto m) { acc[m] += value * x[m * stride + k]; });
        }
      }
    }
  } else {
    for (int k = 0; k < cols; k++) {
      f32v value = F == Format::kBF16 ? load_bf16(reinterpret_cast<const uint16_t*>(p) + k * W)
                                      : load(reinterpret_cast<const float*>(p) + k * W);
      unrolled<M>([&](auto m) { acc[m] += value * x[m * stride + k]; });
    }
  }
}

template <Format F, int M>
static inline __attribute__((always_inline)) void finish_tile(const Packed& w, int g, int t, const f32v* acc, float* out,
                               int stride, bool add) {
  int row = g * W, rows = w.rows - row;
  f32v bias = {};
  if (w.bias != nullptr) bias = load(w.bias + row);  // padded to whole groups
  unrolled<M>([&](auto m) {
    float* to = out + static_cast<size_t>(t + m) * stride + row;
    f32v v = acc[m] + bias;
    if (rows >= W) {
      store(to, add ? load(to) + v : v);
    } else {
      for (int i = 0; i < rows; i++) to[i] = add ? to[i] + v[i] : v[i];
    }
  });
}

template <Format F, int M>
static void one_tile(const Packed& w, const Activations& a, int g, const Unpacked* ready, int t,
                     float* out, int stride, bool add) {
  f32v acc[M];
  if constexpr (has_codes(F)) {
    if (ready != nullptr) {
      quantised_tile<F, M, true>(ready, a, t, acc);
    } else if (a.codes != nullptr) {
      quantised_tile<F, M, false>(w.group(g), a, t, acc);
    } else {
      exact_tile<F, M>(w.group(g), a, w.cols, t, acc);
    }
  } else {
    exact_tile<F, M>(w.group(g), a, w.cols, t, acc);
  }
  finish_tile<F, M>(w, g, t, acc, out, stride, add);
}

template <Format F>
static void matmul_of(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                      float* out, int stride, bool add) {
  constexpr int kMostBlocks = 512;  // of a group that is kept unpacked: 80 bytes a lane each
  const bool unpack = has_codes(F) && a.codes != nullptr && t1 - t0 > 2 * kTile &&
                      w.blocks <= kMostBlocks;
  // Tokens in panels whose codes stay in the second cache while all groups pass over them.
  const int panel = 262144 / (a.blocks * kBlock) / kTile * kTile;
  const int step = panel < kTile ? kTile : panel;
  Unpacked ready[kMostBlocks];
  for (int from = t0; from < t1; from += step) {
    const int to = from + step < t1 ? from + step : t1;
    for (int g = g0; g < g1; g++) {
      if constexpr (has_codes(F)) {
        if (unpack)
          for (int b = 0; b < w.blocks; b++)
            unpack_block<F>(w.group(g) + b * block_bytes(F, W), ready[b]);
      }
      const Unpacked* group = unpack ? ready : nullptr;
      for (int t = from; t < to; t += kTile) {
        switch (to - t) {
          case 1: one_tile<F, 1>(w, a, g, group, t, out, stride, add); break;
          case 2: one_tile<F, 2>(w, a, g, group, t, out, stride, add); break;
          case 3: one_tile<F, 3>(w, a, g, group, t, out, stride, add); break;
          case 4: one_tile<F, 4>(w, a, g, group, t, out, stride, add); break;
          case 5: one_tile<F, 5>(w, a, g, group, t, out, stride, add); break;
          case 6: one_tile<F, 6>(w, a, g, group, t, out, stride, add); break;
          case 7: one_tile<F, 7>(w, a, g, group, t, out, stride, add); break;
          default: one_tile<F, 8>(w, a, g, group, t, out, stride, add); break;
        }
      }
    }
  }
}

static void matmul(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                   float* out, int stride, bool add) {
  switch (w.format) {
    case Format::kQ4: return matmul_of<Format::kQ4>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4F: return matmul_of<Format::kQ4F>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8: return matmul_of<Format::kQ8>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kBF16: return matmul_of<Format::kBF16>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kF32: return matmul_of<Format::kF32>(w, a, t0, t1, g0, g1, out, stride, add);
  }
}

template <Format F>
static void unpack_row_of(const Packed& w, int row, float* out) {
  const uint8_t* p = w.group(row / W);
  int lane = row % W;
  if constexpr (has_codes(F)) {
    for (int b = 0; b < w.blocks; b++, p += block_bytes(F, W)) {
      i8v c[8];
      f32v d, least;
      unpack_codes<F>(p, c);
      load_scales<F>(p, d, least);
      for (int k = b * kBlock, n = 0; n < kBlock && k < w.cols; n++, k++)
        out[k] = d[lane] * c[n / 4][4 * lane + n % 4] + least[lane];
    }
  } else if constexpr (F == Format::kBF16) {
    auto* q = reinterpret_cast<const uint16_t*>(p);
    for (int k = 0; k < w.cols; k++) {
      uint32_t bits = static_cast<uint32_t>(q[k * W + lane]) << 16;
      __builtin_memcpy(out + k, &bits, 4);
    }
  } else {
    auto* q = reinterpret_cast<const float*>(p);
    for (int k = 0; k < w.cols; k++) out[k] = q[k * W + lane];
  }
}

static void unpack_row(const Packed& w, int row, float* out) {
  switch (w.format) {
    case Format::kQ4: return unpack_row_of<Format::kQ4>(w, row, out);
    case Format::kQ4F: return unpack_row_of<Format::kQ4F>(w, row, out);
    case Format::kQ8: return unpack_row_of<Format::kQ8>(w, row, out);
    case Format::kBF16: return unpack_row_of<Format::kBF16>(w, row, out);
    case Format::kF32: return unpack_row_of<Format::kF32>(w, row, out);
  }
}

static void quantise(const float* x, int n, int t, int first, int blocks, int8_t* codes,
                     float* scale, float* sum) {
  const size_t place = (static_cast<size_t>(t / kTile) * blocks + first) * kTile + t % kTile;
  codes += place * kBlock;
  scale += place;
  sum += place;
  for (int at = 0; at < n; at += kBlock) {
    float padded[kBlock] = {};
    const float* p = x + at;
    if (at + kBlock > n) {
      __builtin_memcpy(padded, p, sizeof(float) * (n - at));
      p = padded;
    }
    f32v most = {};
    for (int i = 0; i < kBlock; i += W) most = max_of(most, abs_of(load(p + i)));
    float d = max_lanes(most) / 127.0f;
    if (!(d > 1e-37f)) d = 0;  // nothing, or so little that its inverse is no number
    const float inverse = d > 0 ? 1.0f / d : 0.0f;
    const int all = round_block(p, inverse, codes);
    *scale = d;
    *sum = d * static_cast<float>(all);
    codes += kTile * kBlock;
    scale += kTile;
    sum += kTile;
  }
}

// ── small operations ────────────────────────────────────────────────────────────────────────────

static void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  f32v squares = {};
  int i = 0;
  for (; i + W <= n; i += W) squares += load(x + i) * load(x + i);
  float total = sum_lanes(squares);
  for (; i < n; i++) total += x[i] * x[i];
  float r = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + W <= n; i += W) store(out + i, load(weight + i) * (load(x + i) * r));
  for (; i < n; i++) out[i] = weight[i] * (x[i] * r);
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

// e^x to about 2 · 10^-7, for x ≤ 88; below −87 it is e^-87, which no sum here notices.
static inline f32v exp_of(f32v x) {
  const float shift = 12582912.0f;  // 1.5 · 2^23: the sum's last bits are the whole number
  x = max_of(x, splat(-87.0f));
  f32v y = x * 1.44269504f + shift, n = y - shift;
  f32v r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32v p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  u32v power = ((u32v)y + 127u) << 23;
  return (p * r * r + r + 1.0f) * (f32v)power;
}

static void silu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) {
    f32v g = load(gate + i);
    // The exponent is kept where e^-g stays finite: below −80, g · sigmoid(g) is 0 to a float.
    f32v bounded = max_of(g, splat(-80.0f));
    store(out + i, g / (1.0f + exp_of(-bounded)) * load(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
}

static void to_half(const float* x, int n, uint16_t* out) {
  int i = 0;
  for (; i + W <= n; i += W) store_half(out + i, load(x + i));
  for (; i < n; i++) out[i] = float_to_half(x[i]);
}

static int argmax(const float* x, int n) {
  f32v most = splat(-__builtin_inff());
  int i = 0;
  for (; i + W <= n; i += W) most = max_of(most, load(x + i));
  float best = max_lanes(most);
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  for (i = 0; i < n; i++)
    if (x[i] == best) return i;
  return 0;  // nothing but NaN
}

static int draw(const float* x, int n, uint32_t key0, uint32_t key1) {
  int best = argmax(x, n);
  float score = x[best] + gumbel(best, key0, key1);
  u32v token;
  for (int i = 0; i < W; i++) token[i] = i;
  int at = 0;
  for (; at + W <= n; at += W, token += W) {
    // Noise above s is as rare as a uniform number below e^-s: few tokens can win, and only for
    // those the noise itself is worked out.
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

// ── attention ───────────────────────────────────────────────────────────────────────────────────

// Where the keys (or values) of one head are, for consecutive positions.
struct Reader {
  const uint16_t* base;
  const int32_t* table;
  int block_size, dim;
  size_t block_stride;

  Reader(const uint16_t* data, const Cache& c, const int32_t* table, int kv)
      : base(data + static_cast<size_t>(kv) * c.block_size * c.dim),
        table(table),
        block_size(c.block_size),
        dim(c.dim),
        block_stride(static_cast<size_t>(c.heads) * c.block_size * c.dim) {}

  // f(n, pointer) for n = 0 … count − 1, the positions first, first + 1, …
  template <typename F>
  inline __attribute__((always_inline)) void each(int first, int count, F&& f) const {
    int block = first / block_size, offset = first % block_size;
    for (int n = 0; n < count; block++, offset = 0) {
      const uint16_t* p = base + table[block] * block_stride + static_cast<size_t>(offset) * dim;
      for (; offset < block_size && n < count; offset++, n++, p += dim) f(n, p);
    }
  }

  inline __attribute__((always_inline)) void prefetch(int first, int count, int dim) const {
    each(first, count, [&](int, const uint16_t* p) {
      for (int d = 0; d < dim; d += 32) __builtin_prefetch(p + d);
    });
  }
};

static inline void widen(const uint16_t* p, int dim, float* out) {
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, load_half(p + d));
  for (; d < dim; d++) out[d] = half_to_float(p[d]);
}

// Scores of `keys` keys [keys, dim] with `rows` queries, which stand in columns [dim, rows].
static inline void score(const float* k, int keys, const float* q, int rows, int dim, float* s) {
  for (int r = 0; r < rows; r += 4 * W) {
    const int vectors = (rows - r) / W < 4 ? (rows - r) / W : 4;
    for (int n = 0; n < keys; n += 4) {  // past the last key: of what the tile held before
      const float *k0 = k + n * dim, *k1 = k0 + dim, *k2 = k1 + dim, *k3 = k2 + dim;
      auto tile = [&](auto count) {
        constexpr int V = decltype(count)::value;
        f32v a[4][V];
        unrolled<V>([&](auto v) { a[0][v] = a[1][v] = a[2][v] = a[3][v] = f32v{}; });
        int d = 0;
        for (; d + 4 <= dim; d += 4) {
          const Four f0(k0 + d), f1(k1 + d), f2(k2 + d), f3(k3 + d);
          unrolled<4>([&](auto i) {
            const float* column = q + (d + i) * rows + r;
            unrolled<V>([&](auto v) {
              f32v x = load(column + v * W);
              a[0][v] = add_times<i>(a[0][v], x, f0);
              a[1][v] = add_times<i>(a[1][v], x, f1);
              a[2][v] = add_times<i>(a[2][v], x, f2);
              a[3][v] = add_times<i>(a[3][v], x, f3);
            });
          });
        }
        for (; d < dim; d++)
          unrolled<V>([&](auto v) {
            f32v x = load(q + d * rows + r + v * W);
            a[0][v] += x * k0[d], a[1][v] += x * k1[d];
            a[2][v] += x * k2[d], a[3][v] += x * k3[d];
          });
        unrolled<4>([&](auto j) {
          unrolled<V>([&](auto v) { store(s + (n + j) * rows + r + v * W, a[j][v]); });
        });
      };
      switch (vectors) {
        case 1: tile(std::integral_constant<int, 1>{}); break;
        case 2: tile(std::integral_constant<int, 2>{}); break;
        case 3: tile(std::integral_constant<int, 3>{}); break;
        default: tile(std::integral_constant<int, 4>{}); break;
      }
    }
  }
}

// acc [rows, dim] += weights [keys, rows] · V [keys, dim], four rows at a time.
static inline void weigh(const float* s, const float* v, int keys, int rows, int dim, float* acc) {
  for (int r = 0; r < rows; r += 4) {
    int d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) {
      f32v a[4][4];
      unrolled<4>([&](auto i) {
        unrolled<4>([&](auto j) { a[i][j] = load(acc + (r + i) * dim + d + j * W); });
      });
      for (int n = 0; n < keys; n++) {
        const Four weights(s + n * rows + r);
        unrolled<4>([&](auto j) {
          f32v value = load(v + n * dim + d + j * W);
          unrolled<4>([&](auto i) { a[i][j] = add_times<i>(a[i][j], value, weights); });
        });
      }
      unrolled<4>([&](auto i) {
        unrolled<4>([&](auto j) { store(acc + (r + i) * dim + d + j * W, a[i][j]); });
      });
    }
    for (; d < dim; d++)
      for (int i = 0; i < 4; i++) {
        float total = acc[(r + i) * dim + d];
        for (int n = 0; n < keys; n++) total += s[n * rows + r + i] * v[n * dim + d];
        acc[(r + i) * dim + d] = total;
      }
  }
}

static void attend_prefill(const Cache& cache, const int32_t* table, const float* q, int q_stride,
                           int first, int count, int kv, int group, float scale, int window,
                           float* scratch, float* out, int out_stride) {
  const int dim = cache.dim, rows = (count * group + W - 1) / W * W, end = first + count;
  float* k = scratch;           // [kKeys, dim]
  float* v = k + kKeys * dim;   // [kKeys, dim]
  float* s = v + kKeys * dim;   // [kKeys, rows]
  float* qt = s + kKeys * rows;  // [dim, rows]
  float* acc = qt + dim * rows;  // [rows, dim]
  float* largest = acc + rows * dim;
  float* sum = largest + rows;
  float* shrink = sum + rows;
  int32_t* position = reinterpret_cast<int32_t*>(shrink + rows);
  for (int r = 0; r < rows; r++) {
    const int query = r / group < count ? r / group : count - 1;  // rows past the last: any
    const float* p = q + query * q_stride + (kv * group + r % group) * dim;
    for (int d = 0; d < dim; d++) qt[d * rows + r] = p[d] * scale;
    position[r] = first + query;
    largest[r] = -1e30f;
    sum[r] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * rows * dim);
  const Reader keys_at(cache.keys, cache, table, kv), values_at(cache.values, cache, table, kv);
  int key = 0;
  if (window > 0 && first - window + 1 > 0) key = first - window + 1;
  for (; key < end; key += kKeys) {
    const int keys = end - key < kKeys ? end - key : kKeys;
    keys_at.each(key, keys, [&](int n, const uint16_t* p) { widen(p, dim, k + n * dim); });
    values_at.each(key, keys, [&](int n, const uint16_t* p) { widen(p, dim, v + n * dim); });
    score(k, keys, qt, rows, dim, s);
    const bool edges = key + keys - 1 > first || window > 0;  // some query does not see them all
    for (int r = 0; r < rows; r += W) {
      const i32v at = *reinterpret_cast<const i32u*>(position + r);
      f32v most = load(largest + r);
      const f32v before = most;
      for (int n = 0; n < keys; n++) {
        f32v x = load(s + n * rows + r);
        if (edges) {
          i32v seen = at >= key + n;
          if (window > 0) seen &= at - window < key + n;
          x = (f32v)(((i32v)x & seen) | ((i32v)splat(-__builtin_inff()) & ~seen));
          store(s + n * rows + r, x);
        }
        most = max_of(most, x);
      }
      f32v total = load(sum + r) * exp_of(before - most);
      store(shrink + r, exp_of(before - most));
      for (int n = 0; n < keys; n++) {
        f32v e = exp_of(load(s + n * rows + r) - most);
        store(s + n * rows + r, e);
        total += e;
      }
      store(largest + r, most);
      store(sum + r, total);
    }
    for (int r = 0; r < rows; r++) {
      if (shrink[r] == 1.0f) continue;
      float* line = acc + r * dim;
      int d = 0;
      for (; d + W <= dim; d += W) store(line + d, load(line + d) * shrink[r]);
      for (; d < dim; d++) line[d] *= shrink[r];
    }
    weigh(s, v, keys, rows, dim, acc);
  }
  for (int r = 0; r < count * group; r++) {
    float* to = out + (r / group) * out_stride + (kv * group + r % group) * dim;
    const float inverse = 1.0f / sum[r];
    for (int d = 0; d < dim; d++) to[d] = acc[r * dim + d] * inverse;
  }
}

// The sums of four vectors' lanes.
static inline void sum_four(f32v a, f32v b, f32v c, f32v d, float* out) {
#if defined(TS_NEON)
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#else
  out[0] = sum_lanes(a), out[1] = sum_lanes(b), out[2] = sum_lanes(c), out[3] = sum_lanes(d);
#endif
}

// G heads that share a KV head, over positions [from, to).
template <int G>
static void decode_heads(const Cache& cache, const int32_t* table, const float* q, int from, int to,
                         int kv, float scale, float* acc, float* largest, float* sum) {
  const int dim = cache.dim;
  const Reader keys_at(cache.keys, cache, table, kv), values_at(cache.values, cache, table, kv);
  const uint16_t* p[kKeys + 4];
  float s[G][kKeys + 4];
  for (int g = 0; g < G; g++) largest[g] = -1e30f, sum[g] = 0;
  __builtin_memset(acc, 0, sizeof(float) * G * dim);
  keys_at.prefetch(from, to - from < kKeys ? to - from : kKeys, dim);
  values_at.prefetch(from, to - from < kKeys ? to - from : kKeys, dim);
  for (int key = from; key < to; key += kKeys) {
    const int keys = to - key < kKeys ? to - key : kKeys;
    // Positions lie apart, and the machine does not guess where: ask for the next tile now.
    const int next = key + kKeys, more = to - next < kKeys ? to - next : kKeys;
    keys_at.prefetch(next, more, dim);
    values_at.prefetch(next, more, dim);
    keys_at.each(key, keys, [&](int n, const uint16_t* at) { p[n] = at; });
    for (int n = keys; n < keys + 4; n++) p[n] = p[keys - 1];
    for (int n = 0; n < keys; n += 4) {
      f32v x[G][4];
      unrolled<G>([&](auto g) { x[g][0] = x[g][1] = x[g][2] = x[g][3] = f32v{}; });
      int d = 0;
      for (; d + W <= dim; d += W) {
        f32v k[4];
        unrolled<4>([&](auto j) { k[j] = load_half(p[n + j] + d); });
        unrolled<G>([&](auto g) {
          f32v query = load(q + g * dim + d);
          unrolled<4>([&](auto j) { x[g][j] += k[j] * query; });
        });
      }
      unrolled<G>([&](auto g) { sum_four(x[g][0], x[g][1], x[g][2], x[g][3], s[g] + n); });
      for (; d < dim; d++)
        for (int g = 0; g < G; g++)
          for (int j = 0; j < 4; j++) s[g][n + j] += half_to_float(p[n + j][d]) * q[g * dim + d];
    }
    for (int g = 0; g < G; g++) {
      f32v most = splat(largest[g]);
      for (int n = keys; n < keys + 4 && n % 4 != 0; n++) s[g][n] = -__builtin_inff();
      const int padded = (keys + W - 1) / W * W;
      for (int n = (keys + 3) / 4 * 4; n < padded; n++) s[g][n] = -__builtin_inff();
      for (int n = 0; n < padded; n += W) {
        f32v x = load(s[g] + n) * scale;
        store(s[g] + n, x);
        most = max_of(most, x);
      }
      const float now = max_lanes(most), shrink = __builtin_expf(largest[g] - now);
      f32v total = {};
      for (int n = 0; n < padded; n += W) {
        f32v e = exp_of(load(s[g] + n) - now);
        store(s[g] + n, e);
        total += e;
      }
      sum[g] = sum[g] * shrink + sum_lanes(total);
      largest[g] = now;
      if (shrink != 1.0f)
        for (int d = 0; d < dim; d++) acc[g * dim + d] *= shrink;
    }
    values_at.each(key, keys, [&](int n, const uint16_t* at) { p[n] = at; });
    for (int n = keys; n < keys + 4; n++) p[n] = p[keys - 1];
    int d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) {
      f32v a[G][4];
      unrolled<G>([&](auto g) {
        unrolled<4>([&](auto j) { a[g][j] = load(acc + g * dim + d + j * W); });
      });
      for (int n = 0; n < keys; n += 4) {  // past the last key the weights are 0
        unrolled<4>([&](auto i) {
          f32v v[4];
          unrolled<4>([&](auto j) { v[j] = load_half(p[n + i] + d + j * W); });
          unrolled<G>([&](auto g) {
            const Four weights(s[g] + n);
            unrolled<4>([&](auto j) { a[g][j] = add_times<i>(a[g][j], v[j], weights); });
          });
        });
      }
      unrolled<G>([&](auto g) {
        unrolled<4>([&](auto j) { store(acc + g * dim + d + j * W, a[g][j]); });
      });
    }
    for (; d < dim; d++)
      for (int g = 0; g < G; g++)
        for (int n = 0; n < keys; n++) acc[g * dim + d] += half_to_float(p[n][d]) * s[g][n];
  }
}

static void attend_decode(const Cache& cache, const int32_t* table, const float* q, int from,
                          int to, int kv, int group, float scale, float* acc, float* largest,
                          float* sum) {
  const int dim = cache.dim;
  q += static_cast<size_t>(kv) * group * dim;
  for (int g = 0; g < group;) {
    const float* p = q + g * dim;
    float *a = acc + g * dim, *l = largest + g, *t = sum + g;
    switch (group - g) {
      case 1: decode_heads<1>(cache, table, p, from, to, kv, scale, a, l, t), g += 1; break;
      case 2: decode_heads<2>(cache, table, p, from, to, kv, scale, a, l, t), g += 2; break;
      case 3: decode_heads<3>(cache, table, p, from, to, kv, scale, a, l, t), g += 3; break;
      default: decode_heads<4>(cache, table, p, from, to, kv, scale, a, l, t), g += 4; break;
    }
  }
}
