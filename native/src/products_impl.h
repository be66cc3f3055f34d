// Matmuls with packed matrices, compiled once per instruction set. Each `kernels_*.cpp` includes this
// file inside its own namespace, after `simd.h`. `twostroke/kernels/reference.py` defines the results.

// Loads the table of a matrix into a register. The result is unused for a format without a table.
template <Format F>
static inline __attribute__((always_inline)) i8v table_of(const Packed& w) {
  if constexpr (has_table(F)) return load_table(w.table);
  return i8v{};
}

// Unpacks the codes of a block into the 8 vectors `codes`.
template <Format F>
static inline __attribute__((always_inline)) void unpack_codes(const uint8_t* p,
                                                               [[maybe_unused]] i8v table, i8v* codes) {
  if constexpr (is_q4(F)) {
    unrolled<4>([&](auto j) {
      u8v both = (u8v)load_codes(p + j * 4 * W);
      codes[j] = (i8v)(both & 15);
      codes[j + 4] = (i8v)(both >> 4);
      if constexpr (has_table(F)) {
        codes[j] = look_up(table, (u8v)codes[j]);
        codes[j + 4] = look_up(table, (u8v)codes[j + 4]);
      }
    });
  } else {
    unrolled<8>([&](auto j) { codes[j] = load_codes(p + j * 4 * W); });
  }
}

// The number of scales of a block, and of minima: one for the block, or one for each half block.
template <Format F>
constexpr int num_scales = has_half_block_scales(F) ? 2 : 1;

template <Format F>
static inline __attribute__((always_inline)) void load_scales(const uint8_t* block, f32v* scale,
                                                              f32v* minima) {
  const uint8_t* p = block + code_bytes(F, W);
  auto number = [&](int n) {
    if constexpr (has_float_scales(F)) return load(reinterpret_cast<const float*>(p) + n * W);
    return load_fp16(reinterpret_cast<const uint16_t*>(p) + n * W);
  };
  unrolled<num_scales<F>>([&](auto n) {
    scale[n] = number(n);
    minima[n] = f32v{};
    if constexpr (has_minima(F)) minima[n] = number(num_scales<F> + n);
  });
}

// Software prefetch of weights, because the hardware prefetcher stops at the end of each page.
// kPrefetchBytes is the distance. On x86 it is larger than the weights that the out-of-order window
// reaches: 512 instructions are nine blocks of Q4. Tiles of more than kMaxPrefetchTokens tokens do not
// prefetch.
#if defined(TS_AHEAD)  // `check/ahead_avx512.cpp` tries other distances
constexpr int kPrefetchBytes = TS_AHEAD;
constexpr int kMaxPrefetchTokens = kTile;
#elif defined(TS_AVX2) || defined(TS_AVX512)
constexpr int kPrefetchBytes = 4096;
constexpr int kMaxPrefetchTokens = kTile;
#else
constexpr int kPrefetchBytes = 768;
constexpr int kMaxPrefetchTokens = 2;
#endif

template <int Bytes>
static inline void prefetch(const uint8_t* p) {
  if constexpr (kPrefetchBytes == 0) return;
  for (int n = 0; n < Bytes; n += 64) __builtin_prefetch(p + kPrefetchBytes + n);
}

// Prefetches the weights of the next group into the L2 cache, while this group is multiplied.
template <int Bytes>
static inline void prefetch_to_l2(const uint8_t* p) {
  for (int n = 0; n < Bytes; n += 64) __builtin_prefetch(p + n, 0, 2);
}

// An unpacked block of weights.
template <Format F>
struct Unpacked {
  i8v codes[8];
  f32v scale[num_scales<F>], minima[num_scales<F>];
};

template <Format F>
static inline __attribute__((always_inline)) void unpack_block(const uint8_t* p, i8v table,
                                                               Unpacked<F>& block) {
  unpack_codes<F>(p, table, block.codes);
  load_scales<F>(p, block.scale, block.minima);
  if constexpr (F == Format::kQ8 && signed_bias != 0) block.minima[0] = block.scale[0] * -signed_bias;
}

// One block of the activations of a tile: kTile tokens, kBlock columns. See `Activations`.
struct ActivationBlock {
  const int8_t* codes;
  const float *scale, *sum, *half_sums;

  ActivationBlock(const Activations& a, int t, int block) {
    const size_t at = (static_cast<size_t>(t / kTile) * a.places() + block) * kTile;
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

// Adds the product of token m and one block of W rows to `acc`.
template <Format F>
static inline __attribute__((always_inline)) void add_block(const Unpacked<F>& weights,
                                                            const ActivationBlock& tokens, int m, f32v& acc) {
  constexpr bool has_minimum = has_minima(F) || (F == Format::kQ8 && signed_bias != 0);
  // The bias is subtracted from the integer sums. Subtracting it after the multiplication with the
  // scale would lose digits of small codes.
  constexpr bool is_biased = has_float_scales(F) && has_signed_codes(F) && signed_bias != 0;
  const float *scale = tokens.scale, *half_sums = tokens.half_sums;
  if constexpr (has_half_block_scales(F)) {
    f32v first = dot_block<true, 4>(weights.codes, tokens.codes + m * kBlock);
    f32v second = dot_block<true, 4>(weights.codes + 4, tokens.codes + m * kBlock + kHalfBlock);
    if constexpr (is_biased) {
      first -= signed_bias * half_sums[m];
      second -= signed_bias * half_sums[kTile + m];
    }
    f32v sum = mul_add(second, weights.scale[1], first * weights.scale[0]);
    if constexpr (has_minimum) {
      sum = mul_add(weights.minima[0], splat(half_sums[m]), sum);
      sum = mul_add(weights.minima[1], splat(half_sums[kTile + m]), sum);
    }
    acc = mul_add(sum, splat(scale[m]), acc);
  } else {
    f32v dots = dot_block<has_signed_codes(F)>(weights.codes, tokens.codes + m * kBlock);
    if constexpr (is_biased) dots -= signed_bias * (half_sums[m] + half_sums[kTile + m]);
    acc = mul_add(dots, weights.scale[0] * scale[m], acc);
    if constexpr (has_minimum) acc = mul_add(weights.minima[0], splat(tokens.sum[m]), acc);
  }
}

// Loads block b of a group. `group` has packed bytes, or with IsUnpacked an array of Unpacked<F>.
template <Format F, bool IsUnpacked>
static inline __attribute__((always_inline)) void load_block(const void* group, i8v table,
                                                             int b, Unpacked<F>& block) {
  if constexpr (IsUnpacked) {
    const Unpacked<F>& unpacked = static_cast<const Unpacked<F>*>(group)[b];
    unrolled<8>([&](auto j) { block.codes[j] = unpacked.codes[j]; });
    unrolled<num_scales<F>>([&](auto n) {
      block.scale[n] = unpacked.scale[n];
      block.minima[n] = unpacked.minima[n];
    });
  } else {
    unpack_block<F>(static_cast<const uint8_t*>(group) + b * block_bytes(F, W), table, block);
  }
}

// Adds the products of the residual blocks to `acc`. A residual block has the rounding errors of the
// block with the largest scale. Not inlined, because the loop of quantised_tile needs the registers.
template <Format F, int M, bool IsUnpacked>
static __attribute__((noinline)) void residual_tile(const Packed& w, const void* group,
                                                    const Activations& a, int t, f32v* acc) {
  const i8v table = table_of<F>(w);
  const ActivationBlock tokens(a, t, a.blocks);
  const int32_t* residual = a.residual_block + t;
  Unpacked<F> weights;
  load_block<F, IsUnpacked>(group, table, residual[0], weights);
  for (int m = 0; m < M; m++) {
    // Most tokens have the same residual block, because outliers are in the same channel.
    if (m > 0 && residual[m] != residual[m - 1])
      load_block<F, IsUnpacked>(group, table, residual[m], weights);
    add_block<F>(weights, tokens, m, acc[m]);
  }
}

// Computes the products of M tokens and one group of W rows, block by block.
template <Format F, int M, bool IsUnpacked>
static inline __attribute__((always_inline)) void quantised_tile(const Packed& w,
                                                                 const void* group,
                                                                 const Activations& a, int t,
                                                                 f32v* acc) {
  const i8v table = table_of<F>(w);
  ActivationBlock tokens(a, t, 0);
  f32v sums[M];
  unrolled<M>([&](auto m) { sums[m] = f32v{}; });
  for (int b = 0; b < a.blocks; b++) {
    if constexpr (M <= kMaxPrefetchTokens && !IsUnpacked)
      prefetch<block_bytes(F, W)>(static_cast<const uint8_t*>(group) + b * block_bytes(F, W));
    Unpacked<F> weights;
    load_block<F, IsUnpacked>(group, table, b, weights);
    unrolled<M>([&](auto m) { add_block<F>(weights, tokens, m, sums[m]); });
    tokens.next();
  }
  unrolled<M>([&](auto m) { acc[m] = sums[m]; });
  if (a.residual_block != nullptr) residual_tile<F, M, IsUnpacked>(w, group, a, t, acc);
}

// Computes the products of M tokens and one group in fp32: weights are dequantised, activations are not
// rounded.
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

// Adds the bias, and stores the tile or adds it to `out`.
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

// Computes the products of M tokens and group g. `unpacked` has the blocks of the group, or is null.
template <Format F, int M>
static void matmul_tile(const Packed& w, const Activations& a, int g, const Unpacked<F>* unpacked, int t,
                     float* out, int stride, bool add) {
  f32v acc[M];
  if constexpr (has_codes(F)) {
    if (unpacked != nullptr) {
      quantised_tile<F, M, true>(w, unpacked, a, t, acc);
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

// Computes a matmul, as kernels.h describes, with weights of one format.
template <Format F>
static void matmul_format(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                      float* out, int stride, bool add) {
  // A group of at most kMaxBlocks blocks is unpacked once for all tiles of a panel. An unpacked block has
  // 40 to 48 bytes for each of the W rows.
  constexpr int kMaxBlocks = 512;
  constexpr int kPanelBytes = 262144;  // codes of a panel of tokens, which stay in the L2 cache
  const bool unpack = has_codes(F) && a.codes != nullptr && t1 - t0 > 2 * kTile &&
                      w.blocks <= kMaxBlocks;
  const int panel = kPanelBytes / (a.blocks * kBlock) / kTile * kTile;
  const int step = panel < kTile ? kTile : panel;
  Unpacked<F> unpacked[kMaxBlocks];
  for (int from = t0; from < t1; from += step) {
    const int to = from + step < t1 ? from + step : t1;
    for (int g = g0; g < g1; g++) {
      if constexpr (has_codes(F)) {
        if (unpack)
          for (int b = 0; b < w.blocks; b++) {
            const uint8_t* block = w.group(g) + b * block_bytes(F, W);
            if constexpr (kMaxPrefetchTokens == kTile)
              prefetch_to_l2<block_bytes(F, W)>(block + w.group_bytes);
            unpack_block<F>(block, table_of<F>(w), unpacked[b]);
          }
      }
      const Unpacked<F>* group = unpack ? unpacked : nullptr;
      for (int t = from; t < to; t += kTile) {
        float* at = out + static_cast<size_t>(t - t0) * stride + (g - g0) * W;
        switch (to - t) {
          case 1: matmul_tile<F, 1>(w, a, g, group, t, at, stride, add); break;
          case 2: matmul_tile<F, 2>(w, a, g, group, t, at, stride, add); break;
          case 3: matmul_tile<F, 3>(w, a, g, group, t, at, stride, add); break;
          case 4: matmul_tile<F, 4>(w, a, g, group, t, at, stride, add); break;
          case 5: matmul_tile<F, 5>(w, a, g, group, t, at, stride, add); break;
          case 6: matmul_tile<F, 6>(w, a, g, group, t, at, stride, add); break;
          case 7: matmul_tile<F, 7>(w, a, g, group, t, at, stride, add); break;
          default: matmul_tile<F, 8>(w, a, g, group, t, at, stride, add); break;
        }
      }
    }
  }
}

static void matmul(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                   float* out, int stride, bool add) {
  switch (w.format) {
    case Format::kQ4: return matmul_format<Format::kQ4>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4T: return matmul_format<Format::kQ4T>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4TS: return matmul_format<Format::kQ4TS>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ4F: return matmul_format<Format::kQ4F>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8: return matmul_format<Format::kQ8>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8F: return matmul_format<Format::kQ8F>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8S: return matmul_format<Format::kQ8S>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kQ8M: return matmul_format<Format::kQ8M>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kBF16: return matmul_format<Format::kBF16>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kF32: return matmul_format<Format::kF32>(w, a, t0, t1, g0, g1, out, stride, add);
    case Format::kF16: break;  // handled by `fp16_products.h` where the machine has fp16
  }
}

// Dequantises one row of a matrix with weights of one format.
template <Format F>
static void unpack_row_format(const Packed& w, int row, float* out) {
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
    case Format::kQ4: return unpack_row_format<Format::kQ4>(w, row, out);
    case Format::kQ4T: return unpack_row_format<Format::kQ4T>(w, row, out);
    case Format::kQ4TS: return unpack_row_format<Format::kQ4TS>(w, row, out);
    case Format::kQ4F: return unpack_row_format<Format::kQ4F>(w, row, out);
    case Format::kQ8: return unpack_row_format<Format::kQ8>(w, row, out);
    case Format::kQ8F: return unpack_row_format<Format::kQ8F>(w, row, out);
    case Format::kQ8S: return unpack_row_format<Format::kQ8S>(w, row, out);
    case Format::kQ8M: return unpack_row_format<Format::kQ8M>(w, row, out);
    case Format::kBF16: return unpack_row_format<Format::kBF16>(w, row, out);
    case Format::kF32: return unpack_row_format<Format::kF32>(w, row, out);
    case Format::kF16: break;
  }
}

// Rounds n activations of token t to int8 blocks, from block `first` of its `places` blocks on. The other
// arguments are the fields of `Activations` for all tokens.
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
    const int first_sum = round_half_block(p, inverse, codes);
    const int second_sum = round_half_block(p + kHalfBlock, inverse, codes + kHalfBlock);
    *scale = d;
    *sum = d * static_cast<float>(first_sum + second_sum);
    half_sums[0] = static_cast<float>(first_sum);
    half_sums[kTile] = static_cast<float>(second_sum);
    codes += kTile * kBlock;
    scale += kTile;
    sum += kTile;
    half_sums += 2 * kTile;
  }
}

// Rounds the rounding errors (residuals) of the token's block with the largest scale to one more block,
// and returns the number of that block. The inputs of many layers have one channel with large values.
// The block of this channel has a large scale and causes more than half of the total rounding error.
static int quantise_residual(const float* x, int n, int t, int places, int8_t* codes, float* scale,
                         float* sum, float* half_sums) {
  const size_t first = static_cast<size_t>(t / kTile) * places * kTile + t % kTile;
  int coarsest = 0;
  for (int b = 1; b < places - 1; b++)
    if (scale[first + b * kTile] > scale[first + coarsest * kTile]) coarsest = b;
  const size_t place = first + coarsest * kTile;
  float residual[kBlock] = {};
  const double step = scale[place];  // in double, so that its products with codes are exact
  for (int i = 0; i < kBlock && coarsest * kBlock + i < n; i++)
    residual[i] = static_cast<float>(x[coarsest * kBlock + i] - step * codes[place * kBlock + i]);
  quantise(residual, kBlock, t, places - 1, places, codes, scale, sum, half_sums);
  return coarsest;
}
