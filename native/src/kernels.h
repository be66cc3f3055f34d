// The data that kernels work on, and the table of kernels that each instruction set fills.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twostroke {

constexpr int kBlock = 32;  // weights and activations that share a scale
constexpr int kHalfBlock = kBlock / 2;
constexpr int kTile = 8;    // tokens that one pass over a block of weights serves

// Formats with codes come first, in the order of their size.
enum class Format : int { kQ4, kQ4T, kQ4F, kQ4TS, kQ8, kQ8F, kQ8S, kQ8M, kBF16, kF16, kF32 };

constexpr bool has_table(Format f) { return f == Format::kQ4T || f == Format::kQ4TS; }
constexpr bool is_q4(Format f) { return f <= Format::kQ4TS; }
constexpr bool has_signed_codes(Format f) { return has_table(f) || !is_q4(f); }
constexpr bool has_half_block_scales(Format f) {
  return f == Format::kQ4TS || f == Format::kQ8S || f == Format::kQ8M;
}
constexpr bool has_codes(Format f) { return f < Format::kBF16; }
constexpr bool has_minima(Format f) {
  return f == Format::kQ4 || f == Format::kQ4F || f == Format::kQ8F || f == Format::kQ8M;
}
constexpr bool has_float_scales(Format f) { return f != Format::kQ4 && f != Format::kQ8; }

// A matrix [rows, cols], packed for few and for many tokens alike. A group interleaves `lanes` rows, so
// that a vector holds one column of each row:
//
//   Q4, Q8      a group is a sequence of blocks. A block has codes, then `lanes` scales, then (Q4)
//               `lanes` minima, in fp16. Codes are 8 vectors of four columns of each row; of 4-bit
//               codes, vector j has the low and vector j + 4 the high nibbles.
//   Q4F, Q8F    scales and minima in fp32: for scales that fp16 cannot hold, and (Q4F) for machines
//               that load fp16 slowly.
//   Q4T, Q4TS   4-bit codes are indices in the matrix's table of 16 signed bytes. One fp32 scale for
//               32 columns (Q4T) or for each 16 (Q4TS), and no minima.
//   Q8S, Q8M    one fp32 scale for each 16 columns: `lanes` scales of the first 16, then of the last
//               16; then (Q8M) the minima in the same order.
//   BF16, F32   a group is a sequence of columns.
//   F16         the same with twice as many rows, for machines that multiply fp16. The unit is 2^-8, so
//               that small weights are normal numbers.
//
// A value is scale · code + minimum. Rows past the last are zero.
constexpr float kF16Unit = 1.0f / 256;

struct Packed {
  Format format;
  int rows, cols, lanes;
  int blocks;          // of `kBlock` columns; the last is padded with zeros
  size_t group_bytes;
  const uint8_t* data;
  const float* bias;   // or null
  const int8_t* table = nullptr;  // 16 entries, or null

  int groups() const { return (rows + lanes - 1) / lanes; }
  const uint8_t* group(int n) const { return data + n * group_bytes; }
};

constexpr size_t code_bytes(Format f, int lanes) {
  return static_cast<size_t>(is_q4(f) ? kBlock / 2 : kBlock) * lanes;
}
constexpr size_t block_bytes(Format f, int lanes) {
  const size_t numbers = (has_half_block_scales(f) ? 2 : 1) * (has_minima(f) ? 2 : 1);
  return code_bytes(f, lanes) + numbers * (has_float_scales(f) ? 4 : 2) * lanes;
}

// Activations of T tokens: in fp32, and as blocks of int8 codes, with `kTile` tokens interleaved.
// value ≈ scale · code. `sum` is scale times the sum of a block's codes; `half_sums` are the sums of the
// first 16 codes and of the last 16.
struct Activations {
  const float* values;  // [T, stride]
  int stride;
  const int8_t* codes;  // [T / kTile, places, kTile, kBlock]; null: compute exact products
  const float* scale;   // [T / kTile, places, kTile]
  const float* sum;     // [T / kTile, places, kTile]
  int blocks;
  const float* half_sums;  // [T / kTile, places, 2, kTile]
  const uint16_t* bf16_tiles = nullptr;  // bfloat16 instead of codes, see `bf16_tile_at`
  // [T]: the number of the block whose residual (value − scale · code) is appended as one more block;
  // null: no residuals.
  const int32_t* residual_block = nullptr;
  // For F16 matrices: fp16 values [T / kTile, blocks, kBlock, kTile], to be multiplied by `fp16_scale`
  // [T / kTile, blocks, kTile]; null: compute exact products.
  const uint16_t* fp16 = nullptr;
  const float* fp16_scale = nullptr;

  int places() const { return residual_block == nullptr ? blocks : blocks + 1; }
};

// The offset of block `b` of token `t` in bfloat16 activations. A tile is 16 tokens by one block; the
// tiles of 16 tokens are consecutive. Columns past the last are zero. The number of tokens is padded to
// a multiple of `kTileTokens`.
constexpr int kTileTokens = 32;
constexpr size_t bf16_tile_at(int t, int b, int blocks) {
  return (static_cast<size_t>(t / 16) * blocks + b) * 16 * kBlock + t % 16 * kBlock;
}

constexpr int kScaleBytes = 4;

// One layer of the pool of a KV group, in fp16 or int8. A block holds the keys and values of all layers
// of the group. The keys of one layer are [heads, block_size, dim], so that the data of one head is
// contiguous. Blocks are `block_stride` elements apart. In int8, the elements of a head are followed by
// the scales, one float per token.
struct Cache {
  uint16_t* keys;  // points to int8 elements if `is_int8`
  uint16_t* values;
  int block_size, heads, dim;
  size_t block_stride;
  bool is_int8 = false;

  // The offset of a token. `index` counts the tokens of the row's block table.
  size_t offset(const int32_t* table, int index, int head) const {
    return table[index / block_size] * block_stride +
           (static_cast<size_t>(head) * block_size + index % block_size) * dim;
  }

  // Store one head of a token in int8: x ≈ element · scale, and the largest |element| is 127.
  void store_int8(uint16_t* side, const int32_t* table, int index, int head, const float* x) const {
    int8_t* of_head = reinterpret_cast<int8_t*>(side) + table[index / block_size] * block_stride +
                      static_cast<size_t>(head) * block_size * (dim + kScaleBytes);
    const int slot = index % block_size;
    int8_t* out = of_head + static_cast<size_t>(slot) * dim;
    // The bits of floats without sign are ordered like the floats; their maximum vectorises.
    int32_t bits = 0;
    for (int d = 0; d < dim; d++) {
      int32_t one;
      __builtin_memcpy(&one, x + d, 4);
      one &= 0x7FFFFFFF;
      bits = one > bits ? one : bits;
    }
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    const float inverse = 127.0f / (largest > 1e-30f ? largest : 1e-30f), scale = largest / 127.0f;
    for (int d = 0; d < dim; d++)  // floats above 1.5 · 2^23 have no fraction: the sum is rounded to even
      out[d] = static_cast<int8_t>(static_cast<int32_t>(x[d] * inverse + 12582912.0f - 12582912.0f));
    __builtin_memcpy(of_head + static_cast<size_t>(block_size) * dim + slot * kScaleBytes, &scale, kScaleBytes);
  }
};

// score = softcap · tanh(scale · q k / softcap), or scale · q k if softcap is 0. A query at cache index i
// sees keys [0, i], or with a window keys [i − window + 1, i].
struct AttentionParams {
  float scale, softcap = 0;
  int window = 0;  // 0: no window
  // One score per query head that joins the softmax and has no value; or null.
  const float* sinks = nullptr;

  // The term that the sink of a head adds to the sum of e^(score − largest).
  float sink_weight(int head, float largest) const {
    return sinks == nullptr ? 0.0f : __builtin_expf(sinks[head] - largest);
  }
};

// Prefill attention of up to `queries` queries at cache indices [first, first + count) of one sequence,
// for all query heads of KV head `kv`. Row 0 of q and out is the query at `first`.
struct PrefillAttention {
  int queries = 0;
  size_t (*scratch_floats)(int group, int dim) = nullptr;
  void (*attend)(const Cache& cache, const int32_t* table, const float* q, int q_stride, int first,
                 int count, int kv, int group, const AttentionParams& params, float* scratch,
                 float* out, int out_stride) = nullptr;
};

// Decode attention of one query over cache indices [from, to), all inside its window, for all query heads
// of KV head `kv`. The result is not normalised: `acc` [group, dim], and the largest score and the sum of
// each head. `Model::merge` combines the results and adds the sinks.
using DecodeAttention = void (*)(const Cache& cache, const int32_t* table, const float* q, int from,
                                 int to, int kv, int group, const AttentionParams& params,
                                 float* acc, float* largest, float* sum);

struct Int8Attention {  // over an int8 cache
  PrefillAttention prefill = {};
  DecodeAttention decode = nullptr;
};

// The kernels of matrix units, for steps of at least `min_tokens` tokens. 0: the machine has none.
struct MatrixUnits {
  int min_tokens = 0;
  // Convert n floats of a token. Consecutive blocks are 16 blocks apart in `out`, see `bf16_tile_at`.
  void (*to_bf16)(const float* x, int n, uint16_t* out) = nullptr;
  PrefillAttention prefill = {};  // with bfloat16 precision
  PrefillAttention int8_prefill = {};  // the same over an int8 cache
};

// The kernels in fp16 arithmetic. `max_dim` 0: the machine has none.
struct Fp16Kernels {
  int max_dim = 0;  // largest head dimension of fp16 attention, a multiple of 8
  PrefillAttention prefill = {};
  DecodeAttention decode = nullptr;
  Int8Attention int8 = {};
  // Convert n floats to fp16 blocks of token `t` of `Activations`, from block `first` on.
  void (*to_fp16_blocks)(const float* x, int n, int t, int first, int blocks, uint16_t* fp16,
                    float* scale) = nullptr;
  double (*multiply)(int rounds) = nullptr;  // the fp16 equivalent of `Kernels::dot_bytes`

  bool supports(int dim) const { return dim % 8 == 0 && dim <= max_dim; }
};

struct Kernels {
  const char* name;
  int lanes;
  bool slow_fp16_loads;  // Q4F is faster than Q4

  // out[t, row] = Σ a[t, :] · w[row, :] (+ bias) (+ out[t, row], if `add`), for tokens [t0, t1) and
  // groups [g0, g1). `out` points to the element of t0 and g0. t0 is a multiple of kTileTokens.
  void (*matmul)(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1, float* out,
                 int stride, bool add);
  // Convert n floats to int8 blocks of token `t` of `Activations`, from block `first` on.
  void (*quantise)(const float* x, int n, int t, int first, int places, int8_t* codes,
                   float* scale, float* sum, float* half_sums);
  // Append the residual of the token's coarsest block as one more block. Return the block's number.
  int (*quantise_residual)(const float* x, int n, int t, int places, int8_t* codes, float* scale,
                       float* sum, float* half_sums);
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // The norm of x minus its mean. `bias` may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n,
                     float* out);
  // Rotate `heads` heads of `dim` channels by `half` cosines and sines.
  void (*rope)(float* x, int heads, int dim, const float* cos, const float* sin, int half);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*gelu_tanh_mul)(const float* gate, const float* up, int n, float* out);
  void (*gelu_mul)(const float* gate, const float* up, int n, float* out);  // exact, with erf
  // (up + 1) · gate · sigmoid(alpha · gate), with gate clamped to ≤ `limit` and up to ±`limit`.
  void (*clamped_swiglu)(const float* gate, const float* up, float alpha, float limit, int n,
                         float* out);
  // x = cap · tanh(scale · x / cap), in place.
  void (*soft_cap)(float* x, int n, float scale, float cap);
  void (*to_fp16)(const float* x, int n, uint16_t* out);
  // Unpack one row of a matrix to floats.
  void (*unpack_row)(const Packed& w, int row, float* out);

  PrefillAttention prefill;
  PrefillAttention prefill_floats;  // for a cache whose pointers point to floats
  DecodeAttention decode;
  Int8Attention int8;
  // Prefetch the keys that `decode` will read.
  void (*prefetch_keys)(const Cache& cache, const int32_t* table, int from, int to, int kv);
  // Index of the largest of n scores.
  int (*argmax)(const float* x, int n);
  // Logarithm of the sum of e^x.
  float (*log_sum_exp)(const float* x, int n);
  // Index of the largest of n scores with their Gumbel noise.
  int (*draw)(const float* x, int n, uint32_t key0, uint32_t key1);
  // Run rounds of the fastest int8 products. Return the number of operations.
  double (*dot_bytes)(int rounds);
  MatrixUnits matrix_units = {};
  Fp16Kernels fp16 = {};

  // Interleaved rows of a packed matrix; 0: this instruction set has no matmul for the format.
  int lanes_of(Format f) const {
    if (f == Format::kF16) return fp16.to_fp16_blocks == nullptr ? 0 : 2 * lanes;
    return lanes;
  }
};

// The size of a prefill attention tile. Each head of a query is one row of scores.
constexpr int kQueries = 16;
constexpr int kKeys = 64;

// The first cache index that a tile of prefill attention reads for queries from index `first` on. Keys
// are summed in blocks. Every block begins at a multiple of the block's size, so that chunk boundaries
// change no bit of a sum.
inline int first_key(int window, int first, int block) {
  const int seen = first - window + 1;
  return window > 0 && seen > 0 ? seen / block * block : 0;
}

inline size_t prefill_scratch_floats(int group, int dim) {
  const size_t rows = (static_cast<size_t>(kQueries) * group + 15) / 16 * 16;
  return 2 * static_cast<size_t>(kKeys) * dim + rows * (kKeys + 2 * dim + 4);
}

extern const Kernels kPortable;
#if defined(TS_HAVE_NEON)
extern const Kernels kNeon;
#endif
#if defined(TS_HAVE_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512bw;
#endif
#if defined(TS_HAVE_AMX)
extern const Kernels kAmx;
#endif

// Random bits and Gumbel noise of a token, equal to those of `exec/rng.py` and the sampler.
inline uint32_t scatter(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

inline float gumbel(int token, uint32_t key0, uint32_t key1) {
  const uint32_t bits = scatter(scatter(static_cast<uint32_t>(token) ^ key0) + key1);
  float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  const float max_uniform = 1.0f - 0x1p-24f;
  uniform = uniform < max_uniform ? uniform : max_uniform;
  return -__builtin_logf(-__builtin_log1pf(-uniform));
}

inline float fp16_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7FFFu;
  uint32_t bits;
  if (rest >= 0x7C00u) {
    bits = sign | 0x7F800000u | (rest & 0x3FFu) << 13;
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + 0x38000000u);
  } else {  // subnormal: the unit of the significand is 2^-24
    float f = static_cast<float>(rest) * 5.9604644775390625e-08f;
    __builtin_memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_fp16(float f) {  // to nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65,520 and above
  if (rest < 0x38800000u) {  // below 2^-14: the addition rounds to steps of 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    uint32_t shifted;
    __builtin_memcpy(&shifted, &magnitude, 4);
    return static_cast<uint16_t>(sign | (shifted - 0x3F000000u));
  }
  uint32_t rounded = rest + 0xFFFu + (rest >> 13 & 1u) - 0x38000000u;
  return static_cast<uint16_t>(sign | rounded >> 13);
}

}  // namespace twostroke
