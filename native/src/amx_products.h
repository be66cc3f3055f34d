// Matmuls of many tokens on the matrix units (AMX). `kernels_amx.cpp` includes this file.
//
// A tile is 16 rows of 64 bytes. `_tile_dpbf16ps` adds the product of A [16 tokens, 32 columns] and
// B [32 columns, 16 weight rows] to C [16 tokens, 16 weight rows] in fp32. B is stored in pairs: row k
// of the tile holds columns 2k and 2k + 1 of each weight row side by side. Activations are bfloat16.
// The blocks (32 columns) of a group (16 weight rows) are unpacked to bfloat16 tiles once for up to 512
// tokens.

constexpr int kMinTokens = 24;             // with fewer tokens AVX-512 is as fast
constexpr int kSide = 16;                 // rows of a tile, and columns of C
constexpr int kTileBytes = 1024;
constexpr int kTileElements = kSide * 32;   // bfloat16 numbers of a tile

struct Tiles {  // configures all eight tiles while a kernel runs
  // A constant: GCC 12 does not see that the instruction reads the memory, and would drop stores to it.
  alignas(64) static constexpr uint8_t config[64] = {
      1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,   // palette 1
      64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  // bytes a row
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
      16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};  // rows

  Tiles() { _tile_loadconfig(config); }
  ~Tiles() { _tile_release(); }
};

// Interleave two vectors of 16 columns into one tile row of pairs.
static inline __m512i in_pairs(__m512i both) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both);
}

static inline __m512i to_bf16_pair(f32v first, f32v second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Convert n floats of one token to its row in the consecutive A tiles of its 16 tokens. The rest of the
// row in the last tile is zero.
static void to_bf16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i += kBlock, out += kTileElements) {
    const int low = n - i < 16 ? n - i : 16, high = n - i < 32 ? n - i - low : 16;
    const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << low) - 1), x + i);
    const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << high) - 1), x + i + low);
    _mm512_storeu_si512(out, to_bf16_pair((f32v)a, (f32v)b));
  }
}

// Unpack a block of a group (16 rows of 32 columns) to a B tile.
template <Format F>
static inline void unpack_tile(const uint8_t* p, i8v table, uint16_t* tile) {
  i8v codes[8];
  f32v scales[num_scales<F>], minima[num_scales<F>];
  unpack_codes<F>(p, table, codes);
  load_scales<F>(p, scales, minima);
  // A code is placed in the significand of a float. The float is 128 + code for an unsigned code, and
  // 256 + (code + 128) for a signed code; `offset` subtracts the 128 or the 384 again.
  constexpr bool is_signed = has_signed_codes(F);
  constexpr int shift = is_signed ? 15 : 16;
  const __m512i mask = _mm512_set1_epi32(0xFF << shift);
  const __m512i base = _mm512_set1_epi32(is_signed ? 0x43800000 : 0x43000000);
  for (int j = 0; j < 8; j++) {
    const int part = has_half_block_scales(F) ? j / 4 : 0;
    const f32v scale = scales[part];
    const f32v offset = minima[part] - scale * (is_signed ? 384.0f : 128.0f);
    __m512i c = (__m512i)codes[j];
    if constexpr (is_signed) c = _mm512_xor_si512(c, _mm512_set1_epi8(static_cast<char>(0x80)));
    auto value = [&](__m512i moved) {
      const __m512i bits = _mm512_ternarylogic_epi32(moved, mask, base, 0xEA);  // (a & b) | c
      return (f32v)_mm512_fmadd_ps((__m512)scale, (__m512)bits, (__m512)offset);
    };
    const f32v c0 = value(_mm512_slli_epi32(c, shift)), c1 = value(_mm512_slli_epi32(c, shift - 8));
    const f32v c2 = value(shift == 16 ? c : _mm512_srli_epi32(c, 1));
    const f32v c3 = value(_mm512_srli_epi32(c, 24 - shift));
    _mm512_store_si512(tile + 64 * j, in_pairs(to_bf16_pair(c0, c1)));
    _mm512_store_si512(tile + 64 * j + 32, in_pairs(to_bf16_pair(c2, c3)));
  }
}

template <>
inline void unpack_tile<Format::kBF16>(const uint8_t* p, i8v, uint16_t* tile) {
  for (int row = 0; row < kSide; row++)
    _mm512_store_si512(tile + 32 * row, in_pairs(_mm512_loadu_si512(p + 64 * row)));
}

// Unpack blocks [from, to) of a group to tiles. Prefetch the blocks of the group after next, which is
// read when the products of this pair are done.
template <Format F>
static void unpack_group(const Packed& w, int g, int from, int to, uint16_t* tiles) {
  const uint8_t* group = w.group(g);
  const i8v table = table_of<F>(w);
  for (int b = from; b < to; b++, tiles += kTileElements) {
    if constexpr (F == Format::kBF16) {
      const int left = w.cols - b * kBlock;
      const uint8_t* p = group + static_cast<size_t>(b) * kTileBytes;
      prefetch_to_l2<kTileBytes>(p + 2 * w.group_bytes);
      alignas(64) uint8_t padded[kTileBytes] = {};
      if (left < kBlock) {
        __builtin_memcpy(padded, p, left * 2 * kSide);
        p = padded;
      }
      unpack_tile<F>(p, table, tiles);
    } else {
      const uint8_t* p = group + b * block_bytes(F, W);
      prefetch_to_l2<block_bytes(F, W)>(p + 2 * w.group_bytes);
      unpack_tile<F>(p, table, tiles);
    }
  }
}

// Multiply 32 tokens (16 tokens unless `Both`) by the 32 weight rows of two groups, over `blocks` blocks.
// The tiles of the first and of the second 16 tokens begin at a and a + `below`, the tiles of the two
// groups at b and b + `next_group`. With `add` the product is added to `out`, else it replaces `out`.
template <bool Both>
static inline void tile_product(const uint16_t* a, size_t below, const uint16_t* b, size_t next_group,
                                int blocks, float* out, size_t stride, bool add) {
  const size_t line = stride * 4;
  float* next = out + kSide * stride;
  if (add) {
    _tile_loadd(0, out, line);
    _tile_loadd(1, out + kSide, line);
    if constexpr (Both) {
      _tile_loadd(2, next, line);
      _tile_loadd(3, next + kSide, line);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Both) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int n = 0; n < blocks; n++, a += kTileElements, b += kTileElements) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + next_group, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Both) {
      _tile_loadd(5, a + below, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, line);
  _tile_stored(1, out + kSide, line);
  if constexpr (Both) {
    _tile_stored(2, next, line);
    _tile_stored(3, next + kSide, line);
  }
}

constexpr int kPanelBlocks = 18;   // the tiles of two groups stay in the L1 cache: 36 KiB
constexpr int kPanelTokens = 512;  // the tokens' tiles of a panel stay in the L2 cache

template <Format F>
static void amx_matmul_of(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                           float* out, int stride, bool add) {
  alignas(64) uint16_t tiles[2 * kPanelBlocks * kTileElements];
  alignas(64) float edge[2 * kSide * 2 * kSide];
  constexpr size_t next_group = kPanelBlocks * kTileElements;
  const size_t below = static_cast<size_t>(a.blocks) * kTileElements;
  const Tiles hold;
  const int panels = (a.blocks + kPanelBlocks - 1) / kPanelBlocks;
  for (int from = t0; from < t1; from += kPanelTokens) {
    const int to = from + kPanelTokens < t1 ? from + kPanelTokens : t1;
    for (int panel = 0; panel < panels; panel++) {
      const int b0 = a.blocks * panel / panels, b1 = a.blocks * (panel + 1) / panels;
      const bool more = add || panel > 0;
      const float* bias = panel == 0 ? w.bias : nullptr;
      for (int g = g0; g < g1; g += 2) {
        const bool pair = g + 1 < g1;
        unpack_group<F>(w, g, b0, b1, tiles);
        if (pair) unpack_group<F>(w, g + 1, b0, b1, tiles + next_group);
        const int row = g * kSide, left = w.rows - row, maximum = pair ? 2 * kSide : kSide;
        const int rows = left < maximum ? left : maximum;
        for (int t = from; t < to; t += 2 * kSide) {
          const int tokens = to - t < 2 * kSide ? to - t : 2 * kSide;
          const uint16_t* x = a.bf16_tiles + bf16_tile_at(t, b0, a.blocks);
          float* at = out + static_cast<size_t>(t - t0) * stride + (g - g0) * kSide;
          if (rows == 2 * kSide && tokens == 2 * kSide && bias == nullptr) {
            tile_product<true>(x, below, tiles, next_group, b1 - b0, at, stride, more);
            continue;
          }
          const size_t other = pair ? next_group : 0;
          if (tokens > kSide)
            tile_product<true>(x, below, tiles, other, b1 - b0, edge, 2 * kSide, false);
          else
            tile_product<false>(x, below, tiles, other, b1 - b0, edge, 2 * kSide, false);
          for (int n = 0; n < tokens; n++, at += stride)
            for (int i = 0; i < rows; i++) {
              const float v = edge[n * 2 * kSide + i] + (bias == nullptr ? 0.0f : bias[row + i]);
              at[i] = more ? at[i] + v : v;
            }
        }
      }
    }
  }
}

static void amx_matmul(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1,
                   float* out, int stride, bool add) {
  if (a.bf16_tiles != nullptr) {
    switch (w.format) {
      case Format::kQ4: return amx_matmul_of<Format::kQ4>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ4T: return amx_matmul_of<Format::kQ4T>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ4TS: return amx_matmul_of<Format::kQ4TS>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ4F: return amx_matmul_of<Format::kQ4F>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ8: return amx_matmul_of<Format::kQ8>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ8F: return amx_matmul_of<Format::kQ8F>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ8S: return amx_matmul_of<Format::kQ8S>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kQ8M: return amx_matmul_of<Format::kQ8M>(w, a, t0, t1, g0, g1, out, stride, add);
      case Format::kBF16: return amx_matmul_of<Format::kBF16>(w, a, t0, t1, g0, g1, out, stride, add);
      default: break;
    }
  }
  matmul(w, a, t0, t1, g0, g1, out, stride, add);
}
