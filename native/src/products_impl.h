// Matmuls with packed matrices, compiled once per instruction set. Each `kernels_*.cpp` includes this
// file inside its own namespace, after `simd.h`. `twostroke/kernels/reference.py` defines the results.

// The table of a matrix in a register. Empty for a format without a table.
template <Format F>
static inline __attribute__((always_inline)) i8v table_of(const Packed& w) {
  if constexpr (has_table(F)) return load_table(w.table);
  return i8v{};
}

// Unpacks the codes of a block to 8 vectors in registers.
template <Format F>
static inline __attribute__((always_inline)) void unpack_codes(const uint8_t* p,
                                                               [[maybe_unused]] i8v table, i8v* w) {
  if constexpr (is_q4(F)) {
    unrolled<4>([&](auto j) {
      u8v both = (u8v)load_codes(p + j * 4 * W);
      w[j] = (i8v)(both & 15);
      w[j + 4] = (i8v)(both >> 4);
      if constexpr (has_table(F)) {
        w[j] = look_up(table, (u8v)w[j]);
        w[j + 4] = look_up(table, (u8v)w[j + 4]);
      }
    });
  } else {
    unrolled<8>([&](auto j) { w[j] = load_codes(p + j * 4 * W); });
  }
}

// Scales and minima of a block: one of each, or one per half block.
template <Format F>
constexpr int parts_of = has_half_block_scales(F) ? 2 : 1;

template <Format F>
static inline __attribute__((always_inline)) void load_scales(const uint8_t* block, f32v* scale,
                                                              f32v* minima) {
  const uint8_t* p = block + code_bytes(F, W);
  auto number = [&](int n) {
    if constexpr (has_float_scales(F)) return load(reinterpret_cast<const float*>(p) + n * W);
    return load_fp16(reinterpret_cast<const uint16_t*>(p) + n * W);
  };
  constexpr int parts = parts_of<F>;
  unrolled<parts>([&](auto n) {
    scale[n] = number(n);
    minima[n] = f32v{};
    if constexpr (has_minima(F)) minima[n] = number(parts + n);
  });
}

// Software prefetch: the hardware prefetcher stops at every page. On x86 the distance is beyond the
// instructions in flight (512 instructions are nine blocks of Q4), for any number of tokens.
#if defined(TS_AHEAD)  // `check/ahead_avx512.cpp` tries other distances
constexpr int kAhead = TS_AHEAD;
constexpr int kAheadTokens = kTile;
#elif defined(TS_AVX2) || defined(TS_AVX512)
constexpr int kAhead = 4096;  // bytes
constexpr int kAheadTokens = kTile;
#else
constexpr int kAhead = 768;
constexpr int kAheadTokens = 2;
#endif

template <int Bytes>
static inline void prefetch(const uint8_t* p) {
  if constexpr (kAhead == 0) return;
  for (int n = 0; n < Bytes; n += 64) __builtin_prefetch(p + kAhead + n);
}

// Prefetch of data that is read after the products of this group.
template <int Bytes>
static inline void prefetch_to_l2(const uint8_t* p) {
  for (int n = 0; n < Bytes; n += 64) __builtin_prefetch(p + n, 0, 2);
}

// A block unpacked once for many tiles of tokens. It stays in the L1 cache.
template <Format F>
struct Unpacked {
  i8v codes[8];
  f32v scale[parts_of<F>], minima[parts_of<F>];
};

template <Format F>
static inline __attribute__((always_inline)) void unpack_block(const uint8_t* p, i8v table,
                                                               Unpacked<F>& block) {
  unpack_codes<F>(p, table, block.codes);
  load_scales<F>(p, block.scale, block.minima);
  if constexpr (F == Format::kQ8 && signed_bias != 0) block.minima[0] = block.scale[0] * -signed_bias;
}

// The codes of one block of the tokens of a tile.
struct Place {
  const int8_t* codes;
  const float *scale, *sum, *half_sums;

  Place(const Activations& a, int t, int place) {
    const size_t at = (static_cast<size_t>(t / kTile) * a.places() + place) * kTile;
    codes = a.codes + at * kBlock;
    scale = a.scale + at, sum = a.sum + at, half_sums = a.half_sums + 2 * at;
  }
  void next() {
    codes += kTile * kBlock;
    scale += kTile;
    sum += kTile;
    half_sums += 2 * kTile;
  }
};

// Add the products of token m with a block to `acc`.
template <Format F>
static inline __attribute__((always_inline)) void add_block(const Unpacked<F>& here,
                                                            const Place& at, int m, f32v& acc) {
  constexpr bool has_least = has_minima(F) || (F == Format::kQ8 && signed_bias != 0);
  // Small codes would lose digits next to the bias, so the bias is subtracted from the integers.
  constexpr bool is_biased = has_float_scales(F) && has_signed_codes(F) && signed_bias != 0;
  const float *scale = at.scale, *half_sums = at.half_sums;
  if constexpr (has_half_block_scales(F)) {
    f32v one = dot_block<true, 4>(here.codes, at.codes + m * kBlock);
    f32v other = dot_block<true, 4>(here.codes + 4, at.codes + m * kBlock + kHalfBlock);
    if constexpr (is_biased) {
      one -= signed_bias * half_sums[m];
      other -= signed_bias * half_sums[kTile + m];
    }
    f32v both = mul_add(other, here.scale[1], one * here.scale[0]);
    if constexpr (has_least) {
      both = mul_add(here.minima[0], splat(half_sums[m]), both);
      both = mul_add(here.minima[1], splat(half_sums[kTile + m]), both);
    }
    acc = mul_add(both, splat(scale[m]), acc);
  } else {
    f32v dots = dot_block<has_signed_codes(F)>(here.codes, at.codes + m * kBlock);
    if constexpr (is_biased) dots -= signed_bias * (half_sums[m] + half_sums[kTile + m]);
    acc = mul_add(dots, here.scale[0] * scale[m], acc);
    if constexpr (has_least) acc = mul_add(here.minima[0], splat(at.sum[m]), acc);
  }
}

// A block of a group, either packed or already unpacked.
template <Format F, bool Ready>
static inline __attribute__((always_inline)) void load_block(const void* group, i8v table,
                                                             int b, Unpacked<F>& here) {
  if constexpr (Ready) {
    const Unpacked<F>& ready = static_cast<const Unpacked<F>*>(group)[b];
    unrolled<8>([&](auto j) { here.codes[j] = ready.codes[j]; });
    unrolled<parts_of<F>>([&](auto n) {
      here.scale[n] = ready.scale[n];
      here.minima[n] = ready.minima[n];
    });
  } else {
    unpack_block<F>(static_cast<const uint8_t*>(group) + b * block_bytes(F, W), table, here);
  }
}

// Add the products of the residuals of the tokens' coarsest blocks. Not inlined, because the loop below
// needs the registers.
template <Format F, int M, bool Ready>
static __attribute__((noinline)) void residual_tile(const Packed& w, const void* group,
                                                    const Activations& a, int t, f32v* acc) {
  const i8v table = table_of<F>(w);
  const Place at(a, t, a.blocks);
  const int32_t* residual = a.residual_block + t;
  Unpacked<F> here;
  load_block<F, Ready>(group, table, residual[0], here);
  for (int m = 0; m < M; m++) {
    // The block is mostly the same for all tokens, because outliers stay in one channel.
    if (m > 0 && residual[m] != residual[m - 1]) load_block<F, Ready>(group, table, residual[m], here);
    add_block<F>(here, at, m, acc[m]);
  }
}

// The products of M tokens with one group, block by block.
template <Format F, int M, bool Ready>
static inline __attribute__((always_inline)) void quantised_tile(const Packed& w,
                                                                 const void* group,
                                                                 const Activations& a, int t,
                                                                 f32v* acc) {
  const i8v table = table_of<F>(w);
  Place at(a, t, 0);
  f32v sums[M];
  unrolled<M>([&](auto m) { sums[m] = f32v{}; });
  for (int b = 0; b < a.blocks; b++) {
    if constexpr (M <= kAheadTokens && !Ready)
      prefetch<block_bytes(F, W)>(static_cast<const uint8_t*>(group) + b * block_bytes(F, W));
    Unpacked<F> here;
    load_block<F, Ready>(group, table, b, here);
    unrolled<M>([&](auto m) { add_block<F>(here, at, m, sums[m]); });
    at.next();
  }
  unrolled<M>([&](auto m) { acc[m] = sums[m]; });
  if (a.residual_block != nullptr) residual_tile<F, M, Ready>(w, group, a, t, acc);
}

// The exact product: codes unpacked to fp32, activations in fp32.
template <Format F, int M>
static inline __attribute__((always_inline)) void exact_tile(const Packed& packed, int g,
                                                             const Activations& a, int t,
                                                             f32v* acc) {
  const uint8_t* p = packed.group(g);
  const int cols = packed.cols;
  const size_t stride = a.stride;
  const float* x = a.values + t * stride;
  unrolled<M>([&](auto m) { acc[m] = f32v{}; });
  if constexpr (has_codes(F)) {
    const i8v table = table_of<F>(packed);
    for (int b = 0; b < a.blocks; b++, p += block_bytes(F, W)) {
      i8v w[8];
      f32v d[2], minima[2];
      unpack_codes<F>(p, table, w);
      load_scales<F>(p, d, minima);
      for (int j = 0; j < 8; j++) {
        const int part = has_half_block_scales(F) ? j / 4 : 0;
        for (int n = 0; n < 4; n++) {
          int k = b * kBlock + 4 * j + n;
          if (k >= cols) break;
          i32v code = (i32v)((u32v)w[j] << (24 - 8 * n)) >> 24;
          f32v value = mul_add(__builtin_convertvector(code, f32v), d[part], minima[part]);
          unrolled<M>([&](auto m) { acc[m] = mul_add(value, splat(x[m * stride + k]), acc[m]); });
        }
      }
    }
  } else {
    auto column = [&](int k) {
      return F == Format::kBF16 ? load_bf16(reinterpret_cast<const uint16_t*>(p) + k * W)
                                : load(reinterpret_cast<const float*>(p) + k * W);
    };
    int k = 0;
    for (; k + 4 <= cols; k += 4) {
      f32v value[4];
      unrolled<4>([&](auto i) { value[i] = column(k + i); });
      unrolled<M>([&](auto m) {
        const Four four(x + m * stride + k);
        unrolled<4>([&](auto i) { acc[m] = add_times<i>(acc[m], value[i], four); });
      });
    }
    for (; k < cols; k++) {
      const f32v value = column(k);
      unrolled<M>([&](auto m) { acc[m] = mul_add(value, splat(x[m * stride + k]), acc[m]); });
    }
  }
}

template <Format F, int M>
static inline __attribute__((always_inline)) void finish_tile(const Packed& w, int g, const f32v* acc,
                                                              float* out, int stride, bool add) {
  int row = g * W, rows = w.rows - row;
  f32v bias = {};
  if (w.bias != nullptr) bias = load(w.bias + row);  // padded to whole groups
  unrolled<M>([&](auto m) {
    float* to = out + static_cast<size_t>(m) * stride;
    f32v v = acc[m] + bias;
    if (rows >= W) {
      store(to, add ? load(to) + v : v);
    } else {
      for (int i = 0; i < rows; i++) to[i] = add ? to[i] + v[i] : v[i];
    }
  });
}

template <Format F, int M>
static void one_tile(const Packed& w, const Activations& a, int g, const Unpacked<F>* ready, int t,
                     float* out, int stride, bool add) {
  f32v acc[M];
  if constexpr (has_codes(F)) {
    if (ready != nullptr) {
      quantised_tile<F, M, true>(w, ready, a, t, acc);
    } else if (a.codes != nullptr) {
      quantised_tile<F, M, false>(w, w.group(g), a, t, acc);
    } else {
      exact_tile<F, M>(w, g, a, t, acc);
    }
  } else {
    exact_tile<F, M>(w, g, a, t, acc);
  }
  finish_tile<F, M>(w, g, acc, out, stride, add);
}

template <Format F>
static void matmul_of(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                      float* out, int stride, bool add) {
  constexpr int kMaxBlocks = 512;  // maximum of a group kept unpacked; each has 40 to 48 bytes per lane
  const bool unpack = has_codes(F) && a.codes != nullptr && t1 - t0 > 2 * kTile &&
                      w.blocks <= kMaxBlocks;
  // The codes of a panel of tokens stay in the L2 cache while all groups pass over the panel.
  const int panel = 262144 / (a.blocks * kBlock) / kTile * kTile;
  const int step = panel < kTile ? kTile : panel;
  Unpacked<F> ready[kMaxBlocks];
  for (int from = t0; from < t1; from += step) {
    const int to = from + step < t1 ? from + step : t1;
    for (int g = g0; g < g1; g++) {
      if constexpr (has_codes(F)) {
        if (unpack)
          for (int b = 0; b < w.blocks; b++) {
            const uint8_t* block = w.group(g) + b * block_bytes(F, W);
            if constexpr (kAheadTokens == kTile) prefetch_to_l2<block_bytes(F, W)>(block + w.group_bytes);
            unpack_block<F>(block, table_of<F>(w), ready[b]);
          }
      }
      const Unpacked<F>* group = unpack ? ready : nullptr;
      for (int t = from; t < to; t += kTile) {
        float* at = out + static_cast<size_t>(t - t0) * stride + (g - g0) * W;
        switch (to - t) {
          case 1: one_tile<F, 1>(w, a, g, group, t, at, stride, add); break;
          case 2: one_tile<F, 2>(w, a, g, group, t, at, stride, add); break;
          case 3: one_tile<F, 3>(w, a, g, group, t, at, stride, add); break;
          case 4: one_tile<F, 4>(w, a, g, group, t, at, stride, add); break;
          case 5: one_tile<F, 5>(w, a, g, group, t, at, stride, add); break;
          case 6: one_tile<F, 6>(w, a, g, group, t, at, stride, add); break;
          case 7: one_tile<F, 7>(w, a, g, group, t, at, stride, add); break;
          default: one_tile<F, 8>(w, a, g, group, t, at, stride, add); break;
        }
      }
    }
  }
}

static void matmul(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                   float* out, int stride, bool add) {
  switch (w.format) {
    case Format::kQ4: return matmul_of<Format::kQ4>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4T: return matmul_of<Format::kQ4T>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4TS: return matmul_of<Format::kQ4TS>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4F: return matmul_of<Format::kQ4F>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8: return matmul_of<Format::kQ8>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8F: return matmul_of<Format::kQ8F>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8S: return matmul_of<Format::kQ8S>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8M: return matmul_of<Format::kQ8M>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kBF16: return matmul_of<Format::kBF16>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kF32: return matmul_of<Format::kF32>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kF16: break;  // handled by `fp16_products.h` where the machine has fp16
  }
}

template <Format F>
static void unpack_row_of(const Packed& w, int row, float* out) {
  const uint8_t* p = w.group(row / W);
  int lane = row % W;
  if constexpr (has_codes(F)) {
    for (int b = 0; b < w.blocks; b++, p += block_bytes(F, W)) {
      i8v c[8];
      f32v d[2], minima[2];
      unpack_codes<F>(p, table_of<F>(w), c);
      load_scales<F>(p, d, minima);
      for (int k = b * kBlock, n = 0; n < kBlock && k < w.cols; n++, k++) {
        const int part = has_half_block_scales(F) ? n / kHalfBlock : 0;
        out[k] = d[part][lane] * c[n / 4][4 * lane + n % 4] + minima[part][lane];
      }
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
    case Format::kQ4T: return unpack_row_of<Format::kQ4T>(w, row, out);
    case Format::kQ4TS: return unpack_row_of<Format::kQ4TS>(w, row, out);
    case Format::kQ4F: return unpack_row_of<Format::kQ4F>(w, row, out);
    case Format::kQ8: return unpack_row_of<Format::kQ8>(w, row, out);
    case Format::kQ8F: return unpack_row_of<Format::kQ8F>(w, row, out);
    case Format::kQ8S: return unpack_row_of<Format::kQ8S>(w, row, out);
    case Format::kQ8M: return unpack_row_of<Format::kQ8M>(w, row, out);
    case Format::kBF16: return unpack_row_of<Format::kBF16>(w, row, out);
    case Format::kF32: return unpack_row_of<Format::kF32>(w, row, out);
    case Format::kF16: break;
  }
}

static void quantise(const float* x, int n, int t, int first, int places, int8_t* codes,
                     float* scale, float* sum, float* half_sums) {
  const size_t tile = (static_cast<size_t>(t / kTile) * places + first) * kTile;
  const size_t place = tile + t % kTile;
  codes += place * kBlock;
  scale += place;
  sum += place;
  half_sums += tile + place;
  for (int at = 0; at < n; at += kBlock) {
    float padded[kBlock] = {};
    const float* p = x + at;
    if (at + kBlock > n) {
      __builtin_memcpy(padded, p, sizeof(float) * (n - at));
      p = padded;
    }
    f32v maximum = {};
    for (int i = 0; i < kBlock; i += W) maximum = max_of(maximum, abs_of(load(p + i)));
    float d = max_lanes(maximum) / 127.0f;
    if (!(d > 1e-37f)) d = 0;  // zero, or so small that the inverse is infinite
    const float inverse = d > 0 ? 1.0f / d : 0.0f;
    const int one = round_half_block(p, inverse, codes);
    const int other = round_half_block(p + kHalfBlock, inverse, codes + kHalfBlock);
    *scale = d;
    *sum = d * static_cast<float>(one + other);
    half_sums[0] = static_cast<float>(one);
    half_sums[kTile] = static_cast<float>(other);
    codes += kTile * kBlock;
    scale += kTile;
    sum += kTile;
    half_sums += 2 * kTile;
  }
}

// One channel with large values makes the rounding steps of its whole block coarse, and the inputs of
// many layers have such a channel: that block causes more than half of the total rounding error.
static int quantise_residual(const float* x, int n, int t, int places, int8_t* codes, float* scale,
                         float* sum, float* half_sums) {
  const size_t first = static_cast<size_t>(t / kTile) * places * kTile + t % kTile;
  int coarsest = 0;
  for (int b = 1; b < places - 1; b++)
    if (scale[first + b * kTile] > scale[first + coarsest * kTile]) coarsest = b;
  const size_t place = first + coarsest * kTile;
  float rest[kBlock] = {};
  const double step = scale[place];  // in double, so that its products with codes are exact
  for (int i = 0; i < kBlock && coarsest * kBlock + i < n; i++)
    rest[i] = static_cast<float>(x[coarsest * kBlock + i] - step * codes[place * kBlock + i]);
  quantise(rest, kBlock, t, places - 1, places, codes, scale, sum, half_sums);
  return coarsest;
}
