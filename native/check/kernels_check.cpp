// Compares the kernels of every instruction set with the portable kernels, without Python, for emulated
// machines. `native/README.md` has the command.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "../src/isa.h"
#include "../src/pack.h"

using namespace twostroke;

namespace {

std::mt19937 random_bits(0);
int failures = 0;

std::vector<float> noise(size_t n, float size = 1.0f) {
  std::normal_distribution<float> normal(0, size);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random_bits);
  return x;
}

void expect_close(const char* what, const char* isa, const std::vector<float>& got,
                  const std::vector<float>& wanted, float bound) {
  float worst = 0, maximum = 1e-4f;
  for (size_t n = 0; n < wanted.size(); n++) {
    const float gap = std::fabs(got[n] - wanted[n]);
    worst = gap > worst || std::isnan(gap) ? gap : worst;
    maximum = std::max(maximum, std::fabs(wanted[n]));
  }
  if (!(worst <= bound * maximum)) {
    std::printf("%s %s: off by %g of %g\n", isa, what, worst, maximum);
    failures++;
  }
}

std::vector<int32_t> in_order(int rows) {
  std::vector<int32_t> place(rows);
  for (int n = 0; n < rows; n++) place[n] = n;
  return place;
}

std::vector<float> product(const Kernels& k, const Matrix& m, const std::vector<float>& x,
                           int tokens, bool exact, bool with_residual = false) {
  const int blocks = m.packed().blocks, rows = m.packed().rows, cols = m.packed().cols;
  const int places = with_residual ? blocks + 1 : blocks;
  const size_t padded = (tokens + kTile - 1) / kTile * static_cast<size_t>(kTile);
  std::vector<int8_t> codes(padded * places * kBlock);
  std::vector<float> scale(padded * places), sum(padded * places), half_sums(padded * places * 2);
  std::vector<int32_t> coarsest(padded);
  std::vector<float> out(size_t(tokens) * rows);
  for (int t = 0; t < tokens; t++) {
    const float* line = &x[size_t(t) * cols];
    k.quantise(line, cols, t, 0, places, codes.data(), scale.data(), sum.data(), half_sums.data());
    if (with_residual)
      coarsest[t] = k.quantise_residual(line, cols, t, places, codes.data(), scale.data(), sum.data(),
                                    half_sums.data());
  }
  const Activations a{x.data(),   cols,   exact ? nullptr : codes.data(), scale.data(),
                      sum.data(), blocks, half_sums.data(), nullptr,
                      with_residual ? coarsest.data() : nullptr};
  k.matmul(m.packed(), a, 0, tokens, 0, m.packed().groups(), out.data(), rows, false);
  return out;
}

void check_products(const Kernels& k) {
  const Kernels& plain = find_kernels("portable");
  for (int round = 0; round < 40; round++) {
    const int rows = 1 + random_bits() % 70, cols = 1 + random_bits() % 130;
    const int tokens = 1 + random_bits() % 40;
    const auto w = noise(size_t(rows) * cols), x = noise(size_t(tokens) * cols);
    const auto place = in_order(rows);
    for (Format f : {Format::kQ4, Format::kQ4F, Format::kQ8, Format::kBF16, Format::kF32}) {
      Matrix own(f, rows, cols, k.lanes), other(f, rows, cols, plain.lanes);
      own.put_floats(w.data(), rows, place.data());
      other.put_floats(w.data(), rows, place.data());
      for (bool exact : {false, true})
        expect_close("product", k.name, product(k, own, x, tokens, exact),
                     product(plain, other, x, tokens, exact), 2e-5f);
      expect_close("product, with residual", k.name, product(k, own, x, tokens, false, true),
                   product(plain, other, x, tokens, false, true), 2e-5f);
    }
  }
}

float to_bf16_and_back(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
  std::memcpy(&f, &bits, 4);
  return f;
}

// A matmul on the matrix units with x in bfloat16 equals the exact product with the weights rounded to
// bfloat16, with and without `add`.
void check_matrix_units(const Kernels& k, const char* what, Matrix& m, const std::vector<float>& x,
                int tokens, bool with_bias, bool add, float bound) {
  const Kernels& plain = find_kernels("portable");
  const int rows = m.packed().rows, cols = m.packed().cols, blocks = m.packed().blocks;
  const auto place = in_order(rows);
  std::vector<float> dense(size_t(rows) * cols);
  for (int n = 0; n < rows; n++) k.unpack_row(m.packed(), n, &dense[size_t(n) * cols]);
  if (m.packed().format != Format::kF32)
    for (float& v : dense) v = to_bf16_and_back(v);
  Matrix exact(Format::kF32, rows, cols, plain.lanes);
  exact.put_floats(dense.data(), rows, place.data());
  if (with_bias) {
    const auto bias = noise(rows);
    m.put_bias(bias.data(), rows, place.data());
    exact.put_bias(bias.data(), rows, place.data());
  }
  const size_t padded = (tokens + kTileTokens - 1) / kTileTokens * static_cast<size_t>(kTileTokens);
  std::vector<uint16_t> tiles(padded * blocks * kBlock, 0x7FC0);  // elements that are not set stay NaN
  for (int t = 0; t < tokens; t++)
    k.matrix_units.to_bf16(&x[size_t(t) * cols], cols, &tiles[bf16_tile_at(t, 0, blocks)]);
  auto a = noise(size_t(tokens) * rows), b = a;
  const Activations in{x.data(), cols, nullptr, nullptr, nullptr, blocks, nullptr, tiles.data()};
  const Activations plain_in{x.data(), cols, nullptr, nullptr, nullptr, blocks, nullptr};
  const int groups = m.packed().groups(), half = groups / 2;  // two tasks with some groups each
  k.matmul(m.packed(), in, 0, tokens, 0, half, a.data(), rows, add);
  k.matmul(m.packed(), in, 0, tokens, half, groups, &a[half * k.lanes], rows, add);
  plain.matmul(exact.packed(), plain_in, 0, tokens, 0, exact.packed().groups(), b.data(), rows,
               add);
  expect_close(what, k.name, a, b, bound);
}

void check_matrix_unit_products(const Kernels& k) {
  for (int round = 0; round < 60; round++) {
    const int rows = 1 + random_bits() % 150, cols = 1 + random_bits() % (round < 50 ? 130 : 2500);
    const int tokens = 1 + random_bits() % (round < 55 ? 100 : 1100);
    const auto w = noise(size_t(rows) * cols);
    auto x = noise(size_t(tokens) * cols);
    for (float& v : x) v = to_bf16_and_back(v);
    for (Format f : {Format::kQ4, Format::kQ4F, Format::kQ8, Format::kBF16, Format::kF32}) {
      Matrix m(f, rows, cols, k.lanes);
      m.put_floats(w.data(), rows, in_order(rows).data());
      check_matrix_units(k, "wide product", m, x, tokens, round % 3 == 0, round % 2 == 1, 1e-4f);
    }
  }
}

// Activations that equal their codes, so that all kernels round them alike.
std::vector<float> whole_numbers(size_t n) {
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(static_cast<int>(random_bits() % 255) - 127);
  for (size_t at = 0; at < n; at += kBlock) x[at] = 127;
  return x;
}

// Random codes, with finite scales at the places `scales_at`.
std::vector<uint8_t> blocks_of(const BlockType& type, size_t count, std::vector<int> scales_at) {
  std::vector<uint8_t> raw(count * type.bytes);
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random_bits());
  for (size_t n = 0; n < count; n++)
    for (int at : scales_at) {
      const uint16_t bits = float_to_fp16(noise(1, 0.05f)[0]);
      std::memcpy(&raw[n * type.bytes + at], &bits, 2);
    }
  if (scales_at.empty())  // the scale is an exponent
    for (size_t n = 0; n < count; n++) raw[n * type.bytes] = static_cast<uint8_t>(120 + random_bits() % 4);
  return raw;
}

void check_blocks(const Kernels& k) {
  const Kernels& plain = find_kernels("portable");
  const struct {
    const char* name;
    std::vector<int> scales_at;
  } types[] = {{"Q4_0", {0}},     {"Q4_1", {0, 2}}, {"Q5_0", {0}},    {"Q5_1", {0, 2}},
               {"Q8_0", {0}},     {"Q2_K", {80, 82}}, {"Q3_K", {108}}, {"Q4_K", {0, 2}},
               {"Q5_K", {0, 2}}, {"Q6_K", {208}},   {"IQ4_NL", {0}}, {"IQ4_XS", {0}},
               {"MXFP4", {}},    {"TQ1_0", {52}},   {"TQ2_0", {64}}, {"IQ2_XXS", {0}},
               {"IQ2_XS", {0}},  {"IQ2_S", {0}},    {"IQ3_XXS", {0}}, {"IQ3_S", {0}},
               {"IQ1_S", {0}}};
  for (const auto& [name, scales_at] : types) {
    const BlockType& type = find_block_type(name);
    // Random entries of the table without signs; files store the signs separately.
    std::vector<int8_t> grid(static_cast<size_t>(type.grid_entries) * type.grid_columns);
    for (int8_t& v : grid) v = type.table == find_block_type("IQ1_S").table
                                   ? static_cast<int8_t>(static_cast<int>(random_bits() % 3) - 1)
                                   : type.table[random_bits() % 3];
    for (Format f : {Format::kQ4, Format::kQ4T, Format::kQ4F, Format::kQ4TS, Format::kQ8,
                     Format::kQ8F, Format::kQ8S, Format::kQ8M}) {
      if (!holds(f, type)) continue;
      for (int tokens : {1, 2, 5, 8, 17, 40}) {
        const int rows = 1 + random_bits() % 70, cols = 256 * (1 + random_bits() % 3);
        const auto raw = blocks_of(type, size_t(rows) * cols / type.cols, scales_at);
        const auto x = whole_numbers(size_t(tokens) * cols);
        const auto place = in_order(rows);
        Matrix own(f, rows, cols, k.lanes), other(f, rows, cols, plain.lanes);
        own.put_blocks(name, raw.data(), raw.size() / rows, rows, place.data(), grid.data());
        other.put_blocks(name, raw.data(), raw.size() / rows, rows, place.data(), grid.data());
        std::vector<float> a(cols), b(cols);
        for (int row = 0; row < rows; row++) {
          k.unpack_row(own.packed(), row, a.data());
          plain.unpack_row(other.packed(), row, b.data());
          if (a != b) std::printf("%s %s: another row\n", k.name, name), failures++;
        }
        // Codes that start at zero have a correction term, which leaves a rounding error.
        const float bound = type.table != nullptr ? 2e-5f : 2e-6f;
        for (bool exact : {false, true})
          expect_close(name, k.name, product(k, own, x, tokens, exact),
                       product(plain, other, x, tokens, exact), bound);
        expect_close(name, k.name, product(k, own, x, tokens, false, true),
                     product(plain, other, x, tokens, false, true), bound);
        const auto all = product(k, own, x, tokens, false);
        const std::vector<float> last(x.end() - cols, x.end());
        if (product(k, own, last, 1, false) != std::vector<float>(all.end() - rows, all.end()))
          std::printf("%s %s: a token alone is another\n", k.name, name), failures++;
        // With fp32 scales a weight is sometimes rounded in the other direction.
        if (k.matrix_units.min_tokens > 0) check_matrix_units(k, name, own, x, tokens, false, false, 2e-3f);
      }
    }
  }
}

// −8 times this scale is above the largest fp16 number: Q4F holds it, Q4 must not turn it into infinity.
void check_large_scale() {
  std::vector<uint8_t> raw(18);
  const uint16_t bits = float_to_fp16(9000);
  std::memcpy(raw.data(), &bits, 2);
  const int32_t place = 0;
  Matrix(Format::kQ4F, 1, kBlock, 4).put_blocks("Q4_0", raw.data(), raw.size(), 1, &place);
  try {
    Matrix(Format::kQ4, 1, kBlock, 4).put_blocks("Q4_0", raw.data(), raw.size(), 1, &place);
    std::printf("a scale that fp16 cannot hold is accepted\n"), failures++;
  } catch (const std::overflow_error&) {
  }
}

void check_small(const Kernels& k) {
  const Kernels& plain = find_kernels("portable");
  for (int n : {1, 7, 16, 33, 64, 100}) {
    const auto x = noise(n, 3), y = noise(n), w = noise(n);
    std::vector<float> a(n), b(n);
    k.rms_norm(x.data(), w.data(), 1e-5f, n, a.data());
    plain.rms_norm(x.data(), w.data(), 1e-5f, n, b.data());
    expect_close("rms_norm", k.name, a, b, 1e-5f);
    for (const float* bias : {y.data(), static_cast<const float*>(nullptr)}) {
      k.layer_norm(x.data(), w.data(), bias, 1e-5f, n, a.data());
      plain.layer_norm(x.data(), w.data(), bias, 1e-5f, n, b.data());
      expect_close("layer_norm", k.name, a, b, 1e-4f);
    }
    k.silu_mul(x.data(), y.data(), n, a.data());
    plain.silu_mul(x.data(), y.data(), n, b.data());
    expect_close("silu_mul", k.name, a, b, 1e-5f);
    k.gelu_tanh_mul(x.data(), y.data(), n, a.data());
    for (int i = 0; i < n; i++) {
      // In double: 1 + tanh cancels in fp32.
      const double gate = x[i];
      const double inner = std::sqrt(2 / 3.14159265358979) * (gate + 0.044715 * gate * gate * gate);
      b[i] = static_cast<float>(0.5 * gate * (1 + std::tanh(inner)) * y[i]);
    }
    expect_close("gelu_tanh_mul", k.name, a, b, 1e-5f);
    k.gelu_mul(x.data(), y.data(), n, a.data());
    for (int i = 0; i < n; i++) b[i] = 0.5f * x[i] * std::erfc(-x[i] / std::sqrt(2.0f)) * y[i];
    expect_close("gelu_mul", k.name, a, b, 1e-6f);
    k.clamped_swiglu(x.data(), y.data(), 1.7f, 0.8f, n, a.data());
    for (int i = 0; i < n; i++) {
      const float gate = std::min(x[i], 0.8f), up = std::min(std::max(y[i], -0.8f), 0.8f);
      b[i] = (up + 1) * gate / (1 + std::exp(-1.7f * gate));
    }
    expect_close("clamped_swiglu", k.name, a, b, 1e-5f);
    a = x;
    k.soft_cap(a.data(), n, 3.0f, 5.0f);
    for (int i = 0; i < n; i++) b[i] = 5 * std::tanh(3 * x[i] / 5);
    expect_close("soft_cap", k.name, a, b, 1e-6f);
    std::vector<uint16_t> h(n), g(n);
    k.to_fp16(x.data(), n, h.data());
    plain.to_fp16(x.data(), n, g.data());
    if (h != g) std::printf("%s to_fp16\n", k.name), failures++;
    if (k.argmax(x.data(), n) != plain.argmax(x.data(), n))
      std::printf("%s argmax\n", k.name), failures++;
    if (k.draw(x.data(), n, 5, n) != plain.draw(x.data(), n, 5, n))
      std::printf("%s draw\n", k.name), failures++;
  }
}

// One tile of prefill attention, and the same in tiles of the portable kernels.
std::vector<float> attended(const PrefillAttention& tile, const Cache& cache,
                            const std::vector<int32_t>& table, const std::vector<float>& q,
                            int group, int length, int count, int kv, const AttentionParams& params) {
  const int width = cache.heads * group * cache.dim;
  std::vector<float> out(q.size()), scratch(tile.scratch_floats(group, cache.dim));
  for (int n = 0; n < count; n += tile.queries)
    tile.attend(cache, table.data(), &q[size_t(n) * width], width, length - count + n,
                std::min(tile.queries, count - n), kv, group, params, scratch.data(),
                &out[size_t(n) * width], width);
  return out;
}

// Attention in fp16 agrees with fp32, also with large queries or values.
void check_fp16(const Kernels& k, const Cache& cache, const std::vector<int32_t>& table,
              int group, int length, int kv, const AttentionParams& params) {
  const Kernels& plain = find_kernels("portable");
  const int dim = cache.dim, width = cache.heads * group * dim;
  std::vector<uint16_t> many(table.size() * cache.block_size * cache.heads * dim);
  const auto large_values = noise(many.size(), 9000);
  plain.to_fp16(large_values.data(), static_cast<int>(many.size()), many.data());
  for (const float size : {1e-12f, 1.0f, 30.0f}) {
    for (uint16_t* values : {cache.values, many.data()}) {
      const Cache used{cache.keys, values, cache.block_size, cache.heads, dim, cache.block_stride};
      const int count = std::min(length, 1 + static_cast<int>(random_bits() % k.fp16.prefill.queries));
      const auto q = noise(size_t(count) * width, size);
      const float bound = size > 1 ? 0.1f : 8e-3f;  // fp16 rounding of scores of 100, of 3
      expect_close("prefill in fp16", k.name,
                   attended(k.fp16.prefill, used, table, q, group, length, count, kv, params),
                   attended(plain.prefill, used, table, q, group, length, count, kv, params), bound);
      std::vector<float> a(group * (dim + 2)), b(a.size());
      k.fp16.decode(used, table.data(), q.data(), 0, length, kv, group, params, a.data(),
                      &a[group * dim], &a[group * (dim + 1)]);
      plain.decode(used, table.data(), q.data(), 0, length, kv, group, params, b.data(),
                   &b[group * dim], &b[group * (dim + 1)]);
      expect_close("decode in fp16", k.name, a, b, bound);
    }
  }
}

// The result of decode attention: the normalised output, and the logarithm of the sum of e^score.
std::vector<float> decoded(DecodeAttention attend, const Cache& cache, const std::vector<int32_t>& table,
                           const std::vector<float>& q, int from, int to, int kv, int group,
                           const AttentionParams& params) {
  const int dim = cache.dim;
  std::vector<float> acc(group * dim), largest(group), sum(group);
  attend(cache, table.data(), q.data(), from, to, kv, group, params, acc.data(), largest.data(), sum.data());
  for (int n = 0; n < group * dim; n++) acc[n] /= sum[n / dim];
  for (int g = 0; g < group; g++) acc.push_back(largest[g] + std::log(sum[g]));
  return acc;
}

// Attention over an int8 cache. Kernels that round queries have an error of the scores: with 16 bits up to
// 5e-4 at 576 channels, the largest here.
void check_int8(const Kernels& k, const std::vector<int32_t>& table, int size, int heads, int dim, int group,
                int length, int kv, const AttentionParams& params) {
  const Kernels& plain = find_kernels("portable");
  const size_t bytes = size_t(size) * heads * (dim + kScaleBytes);
  std::vector<uint16_t> keys(table.size() * bytes / 2 + 1), values(keys.size());
  const Cache cache{keys.data(), values.data(), size, heads, dim, bytes, true};
  for (int n = 0; n < length; n++)
    for (int head = 0; head < heads; head++) {
      cache.store_int8(cache.keys, table.data(), n, head, noise(dim).data());
      cache.store_int8(cache.values, table.data(), n, head, noise(dim, 0.1f).data());
    }
  const int maximum = std::max(kQueries, k.matrix_units.int8_prefill.queries);
  const int count = std::min(length, 1 + static_cast<int>(random_bits() % maximum));
  const auto q = noise(size_t(count) * heads * group * dim);
  const int from = random_bits() % length;
  auto decode = [&](DecodeAttention attend) {
    return decoded(attend, cache, table, q, from, length, kv, group, params);
  };
  auto prefill = [&](const PrefillAttention& tile) {
    return attended(tile, cache, table, q, group, length, count, kv, params);
  };
  expect_close("decode of int8", k.name, decode(k.int8.decode), decode(plain.int8.decode), 5e-4f);
  expect_close("prefill of int8", k.name, prefill(k.int8.prefill), prefill(plain.int8.prefill), 1e-5f);
  if (k.matrix_units.min_tokens > 0)
    expect_close("prefill of int8 by matrix units", k.name, prefill(k.matrix_units.int8_prefill),
                 prefill(plain.int8.prefill), 1e-2f);
  if (!k.fp16.supports(dim)) return;
  expect_close("decode of int8 in bytes", k.name, decode(k.fp16.int8.decode), decode(plain.int8.decode), 5e-2f);
  expect_close("prefill of int8 in fp16", k.name, prefill(k.fp16.int8.prefill), prefill(plain.int8.prefill), 8e-3f);
}

void check_attention(const Kernels& k) {
  const Kernels& plain = find_kernels("portable");
  for (int round = 0; round < 30; round++) {
    const int dims[] = {32, 40, 44, 64, 80, 96, 128, 192, 576}, dim = dims[random_bits() % 9];
    const int heads = 1 + random_bits() % 3, group = 1 + random_bits() % 5;
    const int size = 1 + random_bits() % 17, length = 1 + random_bits() % 400;
    const int blocks = (length + size - 1) / size + 1;
    const auto sinks = noise(heads * group, 3);
    const AttentionParams params{0.125f, random_bits() % 2 * 0.7f, static_cast<int>(random_bits() % 2 * 20),
                                 random_bits() % 2 ? sinks.data() : nullptr};
    std::vector<uint16_t> keys(size_t(blocks) * size * heads * dim), values(keys.size());
    const auto kf = noise(keys.size()), vf = noise(keys.size());
    plain.to_fp16(kf.data(), static_cast<int>(kf.size()), keys.data());
    plain.to_fp16(vf.data(), static_cast<int>(vf.size()), values.data());
    const Cache cache{keys.data(), values.data(), size, heads, dim, size_t(size) * heads * dim};
    std::vector<int32_t> table(blocks);
    for (int n = 0; n < blocks; n++) table[n] = blocks - 1 - n;
    const int count = std::min(length, 1 + static_cast<int>(random_bits() % kQueries));
    const int width = heads * group * dim, kv = random_bits() % heads;
    const auto q = noise(size_t(count) * width);
    auto both = [&](const PrefillAttention& tile, const std::vector<float>& x) {
      return attended(tile, cache, table, x, group, length, static_cast<int>(x.size()) / width, kv,
                      params);
    };
    expect_close("attend_prefill", k.name, both(k.prefill, q), both(plain.prefill, q), 1e-5f);
    std::vector<float> wide_keys, wide_values;
    for (uint16_t x : keys) wide_keys.push_back(fp16_to_float(x));
    for (uint16_t x : values) wide_values.push_back(fp16_to_float(x));
    const Cache wide{reinterpret_cast<uint16_t*>(wide_keys.data()),
                     reinterpret_cast<uint16_t*>(wide_values.data()), size, heads, dim, cache.block_stride};
    expect_close("attend_prefill of floats", k.name,
                 attended(k.prefill_floats, wide, table, q, group, length, count, kv, params),
                 both(k.prefill, q), 0.0f);
    if (k.matrix_units.min_tokens > 0) {
      const int more = std::min(length, 1 + static_cast<int>(random_bits() % k.matrix_units.prefill.queries));
      const auto many = noise(size_t(more) * width);
      expect_close("attention by matrix units", k.name, both(k.matrix_units.prefill, many), both(plain.prefill, many),
                   1e-2f);
    }
    std::vector<float> c(group * (dim + 2)), d(c.size());
    k.decode(cache, table.data(), q.data(), 0, length, kv, group, params, c.data(),
                    &c[group * dim], &c[group * (dim + 1)]);
    plain.decode(cache, table.data(), q.data(), 0, length, kv, group, params, d.data(),
                        &d[group * dim], &d[group * (dim + 1)]);
    expect_close("attend_decode", k.name, c, d, 1e-5f);
    if (k.fp16.supports(dim)) check_fp16(k, cache, table, group, length, kv, params);
    check_int8(k, table, size, heads, dim, group, length, kv, params);
  }
}

}  // namespace

int main() {
  check_large_scale();
  for (const std::string& name : available_isas()) {
    const Kernels& k = find_kernels(name);
    check_products(k);
    if (k.matrix_units.min_tokens > 0) check_matrix_unit_products(k);
    check_blocks(k);
    check_small(k);
    check_attention(k);
    std::printf("%s checked\n", name.c_str());
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
