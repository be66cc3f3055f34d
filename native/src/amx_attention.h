// Prefill attention on the matrix units (AMX). `kernels_amx.cpp` includes this file.
//
// A row is one head of one query; a tile has 16 rows. For each 128 keys the kernel computes the scores
// S = Q · Kᵀ, the weights P = 2^(S − largest), and acc += P · V. Tiles B hold keys in pairs of channels
// and values in pairs of positions. Keys and values (fp16, or int8 with scales) are rounded to bfloat16
// once for all queries of a call.

constexpr int kAmxQueries = 64;  // maximum of a call
constexpr int kSpan = 128;        // keys processed together
constexpr int kSpanVectors = kSpan / 16;

static inline int padded_dim(int dim) { return (dim + 31) / 32 * 32; }

static size_t amx_scratch_floats(int group, int dim) {
  const size_t rows = (static_cast<size_t>(kAmxQueries) * group + 15) / 16 * 16;
  const size_t width = padded_dim(dim);
  return rows * width / 2 + kSpan * width + kSide * kSpan + kSide * kSpan / 2 + rows * width +
         rows * (16 + 1) + 16;
}

// Transpose 16 rows of 16 words.
static inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {  // r[i + 4 n]: word i of each lane's four, of rows 4 n … 4 n + 3
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Load the first n < 16 channels; the rest is zero.
static inline f32v load_first(const uint16_t* p, int n) {
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  return (f32v)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}
static inline f32v load_first(const int8_t* p, int n) {
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p)));
}

// The key or value of one token in the cache. Null stands for a missing token and reads as zeros.
template <typename T>
struct CacheRow {
  const T* data = nullptr;
  float scale = 1;  // used for int8 only

  // Channels [d, d + 16); channels past the last are zero.
  f32v channels(int d, int dim) const {
    const int left = dim - d;
    if (data == nullptr || left <= 0) return f32v{};
    const f32v x = left >= 16 ? load_wide(data + d) : load_first(data + d, left);
    return sizeof(T) == 1 ? x * scale : x;
  }
};

// The sides of a span: `count` tokens from index `first` on, then missing tokens.
template <typename T>
static inline void find_rows(const Reader<T>& side, int first, int count, CacheRow<T>* rows) {
  if constexpr (sizeof(T) == 1)
    side.each_scaled(first, count, [&](int n, const T* at, float scale) { rows[n] = {at, scale}; });
  else
    side.each(first, count, [&](int n, const T* at) { rows[n] = {at}; });
  for (int n = count; n < kSpan; n++) rows[n] = {};
}

// Convert the keys and values of a span to consecutive tiles: keys [16 keys, 32 channels] and values
// [32 keys, 16 channels], with the channels of a key or position in order.
template <typename T>
static void gather_tiles(const CacheRow<T>* k, const CacheRow<T>* v, int dim, uint16_t* key_tiles,
                         uint16_t* value_tiles) {
  const int width = padded_dim(dim);
  for (int n = 0; n < kSpan; n += kSide)
    for (int d = 0; d < width; d += 32, key_tiles += kTileElements) {
      __m512i r[16];
      for (int i = 0; i < 16; i++)
        r[i] = to_bf16_pair(k[n + i].channels(d, dim), k[n + i].channels(d + 16, dim));
      transpose(r);
      for (int i = 0; i < 16; i++) _mm512_store_si512(key_tiles + 32 * i, r[i]);
    }
  for (int n = 0; n < kSpan; n += 32)
    for (int d = 0; d < width; d += 16, value_tiles += kTileElements)
      for (int i = 0; i < 16; i++) {
        const f32v first = v[n + 2 * i].channels(d, dim), second = v[n + 2 * i + 1].channels(d, dim);
        _mm512_store_si512(value_tiles + 32 * i, in_pairs(to_bf16_pair(first, second)));
      }
}

// s [16, kSpan] = q (tiles) · the span's keys.
static inline void score_tiles(const uint16_t* q, const uint16_t* keys, int width, float* s) {
  const int steps = width / 32;
  for (int n = 0; n < kSpan / kSide; n += 4, keys += 4 * steps * kTileElements) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < steps; i++) {
      const uint16_t* b = keys + i * kTileElements;
      _tile_loadd(4, q + i * kTileElements, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + steps * kTileElements, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, b + 2 * steps * kTileElements, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + 3 * steps * kTileElements, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, s + n * kSide, kSpan * 4);
    _tile_stored(1, s + (n + 1) * kSide, kSpan * 4);
    _tile_stored(2, s + (n + 2) * kSide, kSpan * 4);
    _tile_stored(3, s + (n + 3) * kSide, kSpan * 4);
  }
}

// acc [16, width] += p [16, kSpan] · the span's values, 32 channels at a time.
static inline void weigh_tiles(const uint16_t* p, const uint16_t* values, int width, float* acc) {
  const size_t line = static_cast<size_t>(width / 16) * kTileElements;  // of 32 positions
  int d = 0;
  for (; d + 64 <= width; d += 64, acc += 64, values += 4 * kTileElements) {
    _tile_loadd(0, acc, width * 4);
    _tile_loadd(1, acc + 16, width * 4);
    _tile_loadd(2, acc + 32, width * 4);
    _tile_loadd(3, acc + 48, width * 4);
    for (int n = 0; n < kSpan / 32; n++) {
      const uint16_t* b = values + n * line;
      _tile_loadd(4, p + 32 * n, kSpan * 2);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileElements, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, b + 2 * kTileElements, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + 3 * kTileElements, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, acc, width * 4);
    _tile_stored(1, acc + 16, width * 4);
    _tile_stored(2, acc + 32, width * 4);
    _tile_stored(3, acc + 48, width * 4);
  }
  if (d == width) return;
  _tile_loadd(0, acc, width * 4);
  _tile_loadd(1, acc + 16, width * 4);
  for (int n = 0; n < kSpan / 32; n++) {
    _tile_loadd(4, p + 32 * n, kSpan * 2);
    _tile_loadd(6, values + n * line, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + n * line + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, acc, width * 4);
  _tile_stored(1, acc + 16, width * 4);
}

// 2^x with an error of 3 · 10^-6, for x ≤ 0. Weights have a significand of 8 bits and need less. Below
// −125 the result is 2^-125, which changes no sum here; smaller numbers would be slow subnormals.
static inline f32v exp2_of(f32v value) {
  const __m512 x = _mm512_max_ps((__m512)value, _mm512_set1_ps(-125.0f));
  const __m512 n = _mm512_roundscale_ps(x, 0);
  const f32v r = (f32v)_mm512_sub_ps(x, n);
  f32v p = splat(0.0095700966f);
  p = mul_add(p, r, splat(0.0559178628f));
  p = mul_add(p, r, splat(0.2402474433f));
  p = mul_add(p, r, splat(0.6931217909f));
  p = mul_add(p, r, splat(0.9999992847f));
  return (f32v)_mm512_scalef_ps((__m512)p, n);
}

// Turn one row of scores into bfloat16 weights. Also compute the sum of the weights by lanes and the
// factor by which the earlier sums shrink.
static inline float weigh_row(const float* s, bool edges, int key, int index, int window, float cap,
                              float& largest, float* sum, uint16_t* p) {
  f32v x[kSpanVectors], maximum = splat(largest);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int n = 0; n < kSpanVectors; n++) {
    x[n] = load(s + 16 * n);
    if (cap > 0) x[n] = tanh_of(x[n] / cap) * cap;
    if (edges) {
      const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(key + 16 * n));
      __mmask16 seen = _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(index));
      if (window > 0)
        seen &= _mm512_cmpgt_epi32_mask(at, _mm512_set1_epi32(index - window));
      x[n] = (f32v)_mm512_mask_blend_ps(seen, (__m512)splat(-__builtin_inff()), (__m512)x[n]);
    }
    maximum = max_of(maximum, x[n]);
  }
  const float now = _mm512_reduce_max_ps((__m512)maximum);
  const float shrink = now == largest ? 1.0f : exp2_of(splat(largest - now))[0];
  f32v total = load(sum) * shrink;
  for (int n = 0; n < kSpanVectors; n += 2) {
    const f32v a = exp2_of(x[n] - now), b = exp2_of(x[n + 1] - now);
    total += a + b;
    _mm512_store_si512(p + 16 * n, to_bf16_pair(a, b));
  }
  store(sum, total);
  largest = now;
  return shrink;
}

// T: the element type of the cache, fp16 or int8.
template <typename T>
static void amx_attend_prefill(const Cache& cache, const int32_t* table, const float* q,
                               int q_stride, int first, int count, int kv, int group,
                               const AttentionParams& params, float* scratch, float* out,
                               int out_stride) {
  const int window = params.window;
  const int dim = cache.dim, width = padded_dim(dim), end = first + count;
  const int used = count * group, rows = (used + 15) / 16 * 16;
  auto* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~63ull);
  auto take = [&](size_t bytes) {
    uint8_t* here = base;
    base += bytes;
    return here;
  };
  auto* acc = reinterpret_cast<float*>(take(sizeof(float) * rows * width));
  auto* s = reinterpret_cast<float*>(take(sizeof(float) * kSide * kSpan));
  auto* sum = reinterpret_cast<float*>(take(sizeof(float) * rows * 16));
  auto* p = reinterpret_cast<uint16_t*>(take(sizeof(uint16_t) * kSide * kSpan));
  auto* key_tiles = reinterpret_cast<uint16_t*>(take(sizeof(uint16_t) * kSpan * width));
  auto* value_tiles = reinterpret_cast<uint16_t*>(take(sizeof(uint16_t) * kSpan * width));
  auto* queries = reinterpret_cast<uint16_t*>(take(sizeof(uint16_t) * rows * width));
  auto* largest = reinterpret_cast<float*>(take(sizeof(float) * rows));
  __builtin_memset(acc, 0, sizeof(float) * rows * width);
  __builtin_memset(sum, 0, sizeof(float) * rows * 16);
  __builtin_memset(queries, 0, sizeof(uint16_t) * rows * width);
  const float log2e = 1.44269504f, factor = params.scale * log2e;  // weights are powers of two
  const float cap = params.softcap * log2e;
  for (int r = 0; r < rows; r++) largest[r] = -1e30f;
  for (int r = 0; r < used; r++) {
    const float* from = q + (r / group) * q_stride + (kv * group + r % group) * dim;
    uint16_t* to = queries + static_cast<size_t>(r / 16 * 16) * width + r % 16 * kBlock;
    for (int d = 0; d < dim; d += kBlock, to += kTileElements) {
      float scaled[kBlock] = {};
      for (int i = 0; i < kBlock && d + i < dim; i++) scaled[i] = from[d + i] * factor;
      to_bf16(scaled, kBlock, to);
    }
  }
  const Reader keys_at(reinterpret_cast<const T*>(cache.keys), cache, table, kv);
  const Reader values_at(reinterpret_cast<const T*>(cache.values), cache, table, kv);
  CacheRow<T> k[kSpan], v[kSpan];
  int key = first_key(window, first, kSpan);
  const Tiles hold;
  for (; key < end; key += kSpan) {
    const int keys = end - key < kSpan ? end - key : kSpan;
    find_rows(keys_at, key, keys, k);
    find_rows(values_at, key, keys, v);
    gather_tiles(k, v, dim, key_tiles, value_tiles);
    for (int r = 0; r < rows; r += kSide) {
      const int low = first + r / group, top = first + (r + kSide - 1) / group;
      if (top < key || (window > 0 && low - window >= key + keys - 1)) continue;  // the row sees none of the keys
      const bool edges = key + kSpan - 1 > low || window > 0;
      score_tiles(queries + static_cast<size_t>(r) * width, key_tiles, width, s);
      for (int i = 0; i < kSide; i++) {
        const int row = r + i, index = first + (row < used ? row : used - 1) / group;
        const float shrink = weigh_row(s + i * kSpan, edges, key, index, window, cap, largest[row],
                                       sum + row * 16, p + i * kSpan);
        if (shrink == 1.0f) continue;
        float* line = acc + static_cast<size_t>(row) * width;
        for (int d = 0; d < width; d += 16) store(line + d, load(line + d) * shrink);
      }
      weigh_tiles(p, value_tiles, width, acc + static_cast<size_t>(r) * width);
    }
  }
  for (int r = 0; r < used; r++) {
    float* to = out + (r / group) * out_stride + (kv * group + r % group) * dim;
    const float sink = params.sink_weight(kv * group + r % group, largest[r] / log2e);
    const float inverse = 1.0f / (_mm512_reduce_add_ps((__m512)load(sum + r * 16)) + sink);
    for (int d = 0; d < dim; d++) to[d] = acc[static_cast<size_t>(r) * width + d] * inverse;
  }
}
