// Attention over the paged cache, compiled once per instruction set. Each `kernels_*.cpp` includes this
// file inside its own namespace, after `simd.h`. `twostroke/kernels/reference.py` defines the results.

// The places of the keys (or values) of one head, for consecutive cache indices.
template <typename T>
struct Reader {
  const T* base;
  const int32_t* table;
  int block_size, dim;
  size_t block_stride;

  Reader(const T* data, const Cache& c, const int32_t* table, int kv)
      : base(data + static_cast<size_t>(kv) * c.block_size * (c.dim + (sizeof(T) == 1 ? kScaleBytes : 0))),
        table(table),
        block_size(c.block_size),
        dim(c.dim),
        block_stride(c.block_stride) {}

  // Call f(n, pointer) for n = 0 … count − 1, that is for the indices first, first + 1, …
  template <typename F>
  inline __attribute__((always_inline)) void each(int first, int count, F&& f) const {
    int block = first / block_size, offset = first % block_size;
    for (int n = 0; n < count; block++, offset = 0) {
      const T* p = base + table[block] * block_stride + static_cast<size_t>(offset) * dim;
      for (; offset < block_size && n < count; offset++, n++, p += dim) f(n, p);
    }
  }

  // The same for int8: f(n, pointer, scale).
  template <typename F>
  inline __attribute__((always_inline)) void each_scaled(int first, int count, F&& f) const {
    int block = first / block_size, offset = first % block_size;
    for (int n = 0; n < count; block++, offset = 0) {
      const T* start = base + table[block] * block_stride;
      const T* p = start + static_cast<size_t>(offset) * dim;
      const T* scales = start + static_cast<size_t>(block_size) * dim;
      for (; offset < block_size && n < count; offset++, n++, p += dim) {
        float scale;
        __builtin_memcpy(&scale, scales + offset * kScaleBytes, kScaleBytes);
        f(n, p, scale);
      }
    }
  }
};

static inline Reader<int8_t> int8_reader(const uint16_t* data, const Cache& c, const int32_t* table, int kv) {
  return Reader(reinterpret_cast<const int8_t*>(data), c, table, kv);
}

// Prefetch indices [from, to) of one KV head. The hardware prefetcher cannot follow the block table.
static void prefetch_keys(const Cache& cache, const int32_t* table, int from, int to, int kv) {
  if (cache.is_int8) {
    for (const uint16_t* data : {cache.keys, cache.values})
      int8_reader(data, cache, table, kv).each(from, to - from, [&](int, const int8_t* p) {
        for (int d = 0; d < cache.dim; d += 64) __builtin_prefetch(p + d, 0, 2);
      });
    return;
  }
  for (const uint16_t* data : {cache.keys, cache.values})
    Reader(data, cache, table, kv).each(from, to - from, [&](int, const uint16_t* p) {
      for (int d = 0; d < cache.dim; d += 32) __builtin_prefetch(p + d, 0, 2);
    });
}

static inline void widen(const uint16_t* p, int dim, float* out) {
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, load_fp16(p + d));
  for (; d < dim; d++) out[d] = fp16_to_float(p[d]);
}

static inline void widen(const int8_t* p, int dim, float scale, float* out) {
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, load_int8(p + d) * scale);
  for (; d < dim; d++) out[d] = static_cast<float>(p[d]) * scale;
}

static inline f32v load_wide(const uint16_t* p) { return load_fp16(p); }
static inline f32v load_wide(const int8_t* p) { return load_int8(p); }
static inline float to_float(uint16_t x) { return fp16_to_float(x); }
static inline float to_float(int8_t x) { return static_cast<float>(x); }

static inline void widen(const float* p, int dim, float* out) {
  __builtin_memcpy(out, p, sizeof(float) * dim);
}

// Scores of `keys` keys [keys, dim] and `rows` queries, stored as columns [dim, rows].
static inline void score(const float* k, int keys, const float* q, int rows, int dim, float* s) {
  for (int r = 0; r < rows; r += 4 * W) {
    const int vectors = (rows - r) / W < 4 ? (rows - r) / W : 4;
    for (int n = 0; n < keys; n += 4) {  // rows past the last key hold values of an earlier tile
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
            a[0][v] = mul_add(x, splat(k0[d]), a[0][v]), a[1][v] = mul_add(x, splat(k1[d]), a[1][v]);
            a[2][v] = mul_add(x, splat(k2[d]), a[2][v]), a[3][v] = mul_add(x, splat(k3[d]), a[3][v]);
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

// acc [rows, dim] += weightsᵀ [rows, keys] · V [keys, dim], four rows at a time.
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

// T: the element type of the cache: fp16, int8 or fp32.
template <typename T>
static void attend_prefill_of(const Cache& cache, const int32_t* table, const float* q,
                              int q_stride, int first, int count, int kv, int group,
                              const AttentionParams& params, float* scratch, float* out,
                              int out_stride) {
  const int window = params.window;
  const int dim = cache.dim, rows = (count * group + W - 1) / W * W, end = first + count;
  float* k = scratch;           // [kKeys, dim]
  float* v = k + kKeys * dim;   // [kKeys, dim]
  float* s = v + kKeys * dim;   // [kKeys, rows]
  float* qt = s + kKeys * rows;  // [dim, rows]
  float* acc = qt + dim * rows;  // [rows, dim]
  float* largest = acc + rows * dim;
  float* sum = largest + rows;
  float* shrink = sum + rows;
  int32_t* index = reinterpret_cast<int32_t*>(shrink + rows);  // the cache index of a row's query
  for (int r = 0; r < rows; r++) {
    const int query = r / group < count ? r / group : count - 1;  // rows past the last repeat the last query
    const float* p = q + query * q_stride + (kv * group + r % group) * dim;
    for (int d = 0; d < dim; d++) qt[d * rows + r] = p[d] * params.scale;
    index[r] = first + query;
    largest[r] = -1e30f;
    sum[r] = 0;
  }
  __builtin_memset(acc, 0, sizeof(float) * rows * dim);
  const Reader keys_at(reinterpret_cast<const T*>(cache.keys), cache, table, kv);
  const Reader values_at(reinterpret_cast<const T*>(cache.values), cache, table, kv);
  int key = first_key(window, first, kKeys);
  for (; key < end; key += kKeys) {
    const int keys = end - key < kKeys ? end - key : kKeys;
    if constexpr (sizeof(T) == 1) {
      keys_at.each_scaled(key, keys, [&](int n, const T* p, float scale) { widen(p, dim, scale, k + n * dim); });
      values_at.each_scaled(key, keys, [&](int n, const T* p, float scale) { widen(p, dim, scale, v + n * dim); });
    } else {
      keys_at.each(key, keys, [&](int n, const T* p) { widen(p, dim, k + n * dim); });
      values_at.each(key, keys, [&](int n, const T* p) { widen(p, dim, v + n * dim); });
    }
    score(k, keys, qt, rows, dim, s);
    if (params.softcap > 0) soft_cap(s, keys * rows, 1, params.softcap);
    const bool edges = key + keys - 1 > first || window > 0;  // some query does not see all of these keys
    for (int r = 0; r < rows; r += W) {
      const i32v at = *reinterpret_cast<const i32u*>(index + r);
      f32v maximum = load(largest + r);
      const f32v before = maximum;
      for (int n = 0; n < keys; n++) {
        f32v x = load(s + n * rows + r);
        if (edges) {
          i32v seen = at >= key + n;
          if (window > 0) seen &= at - window < key + n;
          x = (f32v)(((i32v)x & seen) | ((i32v)splat(-__builtin_inff()) & ~seen));
          store(s + n * rows + r, x);
        }
        maximum = max_of(maximum, x);
      }
      f32v total = load(sum + r) * exp_of(before - maximum);
      store(shrink + r, exp_of(before - maximum));
      for (int n = 0; n < keys; n++) {
        f32v e = exp_of(load(s + n * rows + r) - maximum);
        store(s + n * rows + r, e);
        total += e;
      }
      store(largest + r, maximum);
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
    const float sink = params.sink_weight(kv * group + r % group, largest[r]);
    const float inverse = 1.0f / (sum[r] + sink);
    for (int d = 0; d < dim; d++) to[d] = acc[r * dim + d] * inverse;
  }
}

static constexpr auto attend_prefill = attend_prefill_of<uint16_t>;

// Decode attention of G heads that share a KV head, over indices [from, to).
template <int G, typename T>
static void decode_heads(const Cache& cache, const int32_t* table, const float* q, int from, int to,
                         int kv, const AttentionParams& params, float* acc, float* largest,
                         float* sum) {
  const int dim = cache.dim;
  constexpr bool kScaled = sizeof(T) == 1;
  const Reader keys_at(reinterpret_cast<const T*>(cache.keys), cache, table, kv);
  const Reader values_at(reinterpret_cast<const T*>(cache.values), cache, table, kv);
  const T* p[kKeys + 4];
  float s[G][kKeys + 4];
  [[maybe_unused]] float scales[kKeys];
  for (int g = 0; g < G; g++) largest[g] = -1e30f, sum[g] = 0;
  __builtin_memset(acc, 0, sizeof(float) * G * dim);
  for (int key = from; key < to; key += kKeys) {
    const int keys = to - key < kKeys ? to - key : kKeys;
    if constexpr (kScaled)
      keys_at.each_scaled(key, keys, [&](int n, const T* at, float scale) { p[n] = at, scales[n] = scale; });
    else
      keys_at.each(key, keys, [&](int n, const T* at) { p[n] = at; });
    for (int n = keys; n < keys + 4; n++) p[n] = p[keys - 1];
    for (int n = 0; n < keys; n += 4) {
      f32v x[G][4];
      unrolled<G>([&](auto g) { x[g][0] = x[g][1] = x[g][2] = x[g][3] = f32v{}; });
      int d = 0;
      for (; d + W <= dim; d += W) {
        f32v k[4];
        unrolled<4>([&](auto j) { k[j] = load_wide(p[n + j] + d); });
        unrolled<G>([&](auto g) {
          f32v query = load(q + g * dim + d);
          unrolled<4>([&](auto j) { x[g][j] = mul_add(k[j], query, x[g][j]); });
        });
      }
      unrolled<G>([&](auto g) { sum_four(x[g][0], x[g][1], x[g][2], x[g][3], s[g] + n); });
      for (; d < dim; d++)
        for (int g = 0; g < G; g++)
          for (int j = 0; j < 4; j++) s[g][n + j] += to_float(p[n + j][d]) * q[g * dim + d];
    }
    if constexpr (kScaled)
      for (int g = 0; g < G; g++)
        for (int n = 0; n < keys; n++) s[g][n] *= scales[n];
    for (int g = 0; g < G; g++) {
      f32v maximum = splat(largest[g]);
      float scale = params.scale;
      if (params.softcap > 0) {
        soft_cap(s[g], keys, scale, params.softcap);
        scale = 1;
      }
      for (int n = keys; n < keys + 4 && n % 4 != 0; n++) s[g][n] = -__builtin_inff();
      const int padded = (keys + W - 1) / W * W;
      for (int n = (keys + 3) / 4 * 4; n < padded; n++) s[g][n] = -__builtin_inff();
      for (int n = 0; n < padded; n += W) {
        f32v x = load(s[g] + n) * scale;
        store(s[g] + n, x);
        maximum = max_of(maximum, x);
      }
      const float now = max_lanes(maximum), shrink = __builtin_expf(largest[g] - now);
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
    if constexpr (kScaled) {
      values_at.each_scaled(key, keys, [&](int n, const T* at, float scale) { p[n] = at, scales[n] = scale; });
      for (int g = 0; g < G; g++)
        for (int n = 0; n < keys; n++) s[g][n] *= scales[n];
    } else {
      values_at.each(key, keys, [&](int n, const T* at) { p[n] = at; });
    }
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
          unrolled<4>([&](auto j) { v[j] = load_wide(p[n + i] + d + j * W); });
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
        for (int n = 0; n < keys; n++) acc[g * dim + d] += to_float(p[n][d]) * s[g][n];
  }
}

// Call f(count, first) for up to four heads of a group at a time.
template <typename F>
static inline __attribute__((always_inline)) void each_four(int group, F&& f) {
  for (int g = 0; g < group; g += 4) {
    switch (group - g) {
      case 1: f(std::integral_constant<int, 1>{}, g); break;
      case 2: f(std::integral_constant<int, 2>{}, g); break;
      case 3: f(std::integral_constant<int, 3>{}, g); break;
      default: f(std::integral_constant<int, 4>{}, g); break;
    }
  }
}

template <typename T>
static void attend_decode_of(const Cache& cache, const int32_t* table, const float* q, int from,
                             int to, int kv, int group, const AttentionParams& params, float* acc,
                             float* largest, float* sum) {
  const int dim = cache.dim;
  q += static_cast<size_t>(kv) * group * dim;
  each_four(group, [&](auto count, int g) {
    decode_heads<decltype(count)::value, T>(cache, table, q + g * dim, from, to, kv, params,
                                            acc + g * dim, largest + g, sum + g);
  });
}

static constexpr auto attend_decode = attend_decode_of<uint16_t>;
