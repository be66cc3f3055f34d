// Measures each kernel on one core, for every instruction set of the machine, and matmuls whose weights
// come from memory, on one core and on two. `native/README.md` has the command. The shapes are those of
// the default model.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../src/isa.h"
#include "../src/pack.h"
#include "../src/thread_pool.h"
#include "ahead.h"

using namespace twostroke;

namespace {

std::mt19937 random_bits(0);

std::vector<float> noise(size_t n) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random_bits);
  return x;
}

// Seconds of one call: the best of several runs of at least 5 ms.
double seconds(const std::function<void()>& work) {
  using clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int run = 0; run < 15; run++) {
    int calls = 0;
    const auto start = clock::now();
    double took = 0;
    do {
      work();
      calls++;
      took = std::chrono::duration<double>(clock::now() - start).count();
    } while (took < 0.005);
    best = took / calls < best ? took / calls : best;
  }
  return best;
}

void time_products(const Kernels& k, Format format, const char* name, int rows, int cols,
                   std::initializer_list<int> counts) {
  Matrix m(format, rows, cols, k.lanes_of(format));
  const auto w = noise(size_t(rows) * cols);
  std::vector<int32_t> place(rows);
  for (int n = 0; n < rows; n++) place[n] = n;
  m.put_floats(w.data(), rows, place.data());
  for (int tokens : counts) {
    const auto x = noise(size_t(tokens) * cols);
    const int blocks = m.packed().blocks;
    const size_t padded = (tokens + kTileTokens - 1) / kTileTokens * static_cast<size_t>(kTileTokens);
    std::vector<int8_t> codes(padded * blocks * kBlock);
    std::vector<uint16_t> tiles(padded * blocks * kBlock);
    std::vector<float> scale(padded * blocks), sum(padded * blocks), half_sums(2 * padded * blocks);
    std::vector<float> out(padded * rows), fp16_scale(padded * blocks);
    std::vector<uint16_t> fp16(padded * blocks * kBlock);
    for (int t = 0; t < tokens; t++) {
      k.quantise(&x[size_t(t) * cols], cols, t, 0, blocks, codes.data(), scale.data(), sum.data(),
                 half_sums.data());
      if (k.fp16.to_fp16_blocks != nullptr)
        k.fp16.to_fp16_blocks(&x[size_t(t) * cols], cols, t, 0, blocks, fp16.data(), fp16_scale.data());
      if (k.matrix_units.min_tokens > 0)
        k.matrix_units.to_bf16(&x[size_t(t) * cols], cols, &tiles[bf16_tile_at(t, 0, blocks)]);
    }
    for (const bool use_tiles : {false, true}) {
      if (use_tiles && (k.matrix_units.min_tokens == 0 || tokens < 8)) continue;
      const Activations a{x.data(), cols, codes.data(), scale.data(), sum.data(), blocks,
                          half_sums.data(), use_tiles ? tiles.data() : nullptr, nullptr, fp16.data(),
                          fp16_scale.data()};
      const double s = seconds([&] {
        k.matmul(m.packed(), a, 0, tokens, 0, m.packed().groups(), out.data(), rows, false);
      });
      const double each = double(rows) * cols;
      std::printf("%-9s %s %5d x %4d, %3d tokens%s: %9.1f us, %7.1f GFLOP/s, %5.1f GB/s\n", k.name,
                  name, rows, cols, tokens, use_tiles ? " (matrix units)" : "", s * 1e6,
                  2 * each * tokens / s * 1e-9, m.num_bytes() / s * 1e-9);
    }
  }
}

void time_attention(const Kernels& k) {
  const int dim = 64, heads = 3, group = 3, size = 16, length = 1024, blocks = length / size + 1;
  std::vector<uint16_t> keys(size_t(blocks) * size * heads * dim), values(keys.size());
  const auto kf = noise(keys.size());
  k.to_fp16(kf.data(), static_cast<int>(kf.size()), keys.data());
  k.to_fp16(kf.data(), static_cast<int>(kf.size()), values.data());
  const Cache cache{keys.data(), values.data(), size, heads, dim, size_t(size) * heads * dim};
  const AttentionParams params{0.125f};
  std::vector<int32_t> table(blocks);
  for (int n = 0; n < blocks; n++) table[n] = blocks - 1 - n;
  const int width = heads * group * dim;
  const auto q = noise(size_t(64) * width);
  std::vector<float> out(q.size()), partial(group * (dim + 2));
  auto decode = [&](const char* name, DecodeAttention attend, const Cache& read) {
    const double s = seconds([&] {
      for (int from = 0; from < length; from += 64)
        attend(read, table.data(), q.data(), from, from + 64, 1, group, params, partial.data(),
               &partial[group * dim], &partial[group * (dim + 1)]);
    });
    std::printf("%-9s decode attention%s: %5.2f ns a key and head\n", k.name, name,
                s * 1e9 / length / group);
  };
  auto prefill = [&](const char* name, const PrefillAttention& tile, const Cache& read) {
    std::vector<float> scratch(tile.scratch_floats(group, dim));
    const double s = seconds([&] {
      for (int n = 0; n < 64; n += tile.queries)
        tile.attend(read, table.data(), &q[size_t(n) * width], width, length - 64 + n,
                    tile.queries, 1, group, params, scratch.data(), &out[size_t(n) * width],
                    width);
    });
    std::printf("%-9s prefill attention%s: %5.3f ns a query and key, %5.1f GFLOP/s\n", k.name, name,
                s * 1e9 / (64.0 * group * length), 4.0 * dim * 64 * group * length / s * 1e-9);
  };
  const size_t bytes = size_t(size) * heads * (dim + kScaleBytes);
  std::vector<uint16_t> int8_keys(blocks * bytes / 2), int8_values(int8_keys.size());
  const Cache int8{int8_keys.data(), int8_values.data(), size, heads, dim, bytes, true};
  for (int n = 0; n < length; n++)
    for (int head = 0; head < heads; head++) {
      int8.store_int8(int8.keys, table.data(), n, head, &kf[size_t(n) * dim]);
      int8.store_int8(int8.values, table.data(), n, head, &kf[size_t(n) * dim]);
    }
  decode("", k.decode, cache);
  decode(" (int8)", k.int8.decode, int8);
  prefill("", k.prefill, cache);
  prefill(" (int8)", k.int8.prefill, int8);
  if (k.matrix_units.min_tokens > 0) {
    prefill(" (matrix units)", k.matrix_units.prefill, cache);
    prefill(" (int8, matrix units)", k.matrix_units.int8_prefill, int8);
  }
  if (k.fp16.supports(dim)) {
    decode(" (fp16)", k.fp16.decode, cache);
    decode(" (int8, fp16)", k.fp16.int8.decode, int8);
    prefill(" (fp16)", k.fp16.prefill, cache);
    prefill(" (int8, fp16)", k.fp16.int8.prefill, int8);
  }
}

void time_small(const Kernels& k) {
  const int n = 576, blocks = n / kBlock;
  auto x = noise(n), w = noise(n), out = noise(n);
  std::vector<int8_t> codes(size_t(blocks) * kTile * kBlock);
  std::vector<float> scale(blocks * kTile), sum(blocks * kTile), both(2 * blocks * kTile);
  std::vector<uint16_t> fp16(16 * n);
  auto tell = [&](const char* name, int count, const std::function<void()>& work) {
    std::printf("%-9s %s of %d: %6.0f ns\n", k.name, name, count, seconds(work) * 1e9);
  };
  tell("quantise", n, [&] {
    k.quantise(x.data(), n, 0, 0, blocks, codes.data(), scale.data(), sum.data(), both.data());
  });
  if (k.matrix_units.min_tokens > 0) tell("to_bf16", n, [&] { k.matrix_units.to_bf16(x.data(), n, fp16.data()); });
  tell("rms_norm", n, [&] { k.rms_norm(x.data(), w.data(), 1e-5f, n, out.data()); });
  tell("layer_norm", n, [&] { k.layer_norm(x.data(), w.data(), w.data(), 1e-5f, n, out.data()); });
  tell("silu_mul", n, [&] { k.silu_mul(x.data(), w.data(), n, out.data()); });
  tell("gelu_tanh_mul", n, [&] { k.gelu_tanh_mul(x.data(), w.data(), n, out.data()); });
  tell("gelu_mul", n, [&] { k.gelu_mul(x.data(), w.data(), n, out.data()); });
  tell("clamped_swiglu", n,
       [&] { k.clamped_swiglu(x.data(), w.data(), 1.7f, 7.0f, n, out.data()); });
  tell("soft_cap", n, [&] { k.soft_cap(out.data(), n, 1, 30); });
  const std::vector<float> cos(32, 0.6f), sin(32, 0.8f);
  tell("rope", n, [&] { k.rope(out.data(), 9, 64, cos.data(), sin.data(), 32); });
  tell("to_fp16", n, [&] { k.to_fp16(x.data(), n, fp16.data()); });
  const auto logits = noise(49152);
  tell("argmax", 49152, [&] { (void)k.argmax(logits.data(), 49152); });
  tell("draw", 49152, [&] { (void)k.draw(logits.data(), 49152, 1, 2); });
}

// Matmuls with weights from memory, as in a step of few tokens: many matrices of 3,072 rows (1.1 MB), each
// computed by all workers, with a barrier after each. Prints the median of the passes, and the worst.
void time_memory(const Kernels& k, const char* what, decltype(Kernels::matmul) matmul, int workers,
                 int runs, int tokens) {
  const int rows = 3072, cols = 576, blocks = cols / kBlock, matrices = 320, passes = 15;
  const size_t group_bytes = blocks * block_bytes(Format::kQ4, k.lanes);
  const int groups = rows / k.lanes, per_task = (groups + workers * runs - 1) / (workers * runs);
  const Matrix weights(Format::kQ4, rows * matrices, cols, k.lanes);
  const auto x = noise(size_t(tokens) * cols);
  const size_t places = (tokens + kTile - 1) / kTile * kTile * blocks;
  std::vector<int8_t> codes(places * kBlock);
  std::vector<float> scale(places), sum(places), half_sums(2 * places);
  std::vector<float> out(size_t(tokens) * rows);
  for (int t = 0; t < tokens; t++)
    k.quantise(&x[size_t(t) * cols], cols, t, 0, blocks, codes.data(), scale.data(), sum.data(),
               half_sums.data());
  const Activations a{x.data(), cols, codes.data(), scale.data(), sum.data(), blocks, half_sums.data()};
  ThreadPool pool(workers);
  std::vector<double> took;
  for (int pass = 0; pass < passes; pass++) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(workers, [&](int) {
      for (int n = 0; n < matrices; n++) {
        const Packed w{Format::kQ4, rows, cols, k.lanes, blocks, group_bytes,
                       weights.packed().group(n * groups), nullptr};
        pool.parallel_for((groups + per_task - 1) / per_task, [&](int task) {
          const int from = task * per_task, to = from + per_task < groups ? from + per_task : groups;
          matmul(w, a, 0, tokens, from, to, out.data() + from * k.lanes, rows, false);
        });
      }
    });
    took.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(took.begin(), took.end());
  auto rate = [&](double s) { return weights.num_bytes() / s * 1e-9; };
  std::printf("%-9s from memory, %d cores, %d runs each, %d tokens, %s: %5.1f GB/s (slowest pass %5.1f)\n", k.name,
              workers, runs, tokens, what, rate(took[passes / 2]), rate(took.back()));
}

// The time of an empty run after a pause, as between two steps, and the time of a barrier.
void time_pool(int workers) {
  for (const int awake_us : {0, 2000}) {
    ThreadPool pool(workers, std::chrono::microseconds(awake_us));
    for (const int idle_us : {0, 300, 1000, 1800}) {
      std::vector<double> took;
      for (int n = 0; n < 200; n++) {
        const auto wake = std::chrono::steady_clock::now() + std::chrono::microseconds(idle_us);
        while (std::chrono::steady_clock::now() < wake) relax();  // busy, like the loop of the engine
        const auto start = std::chrono::steady_clock::now();
        pool.run(workers, [&](int) { pool.barrier(); });
        took.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      std::sort(took.begin(), took.end());
      std::printf("pool of %d, awake for %4d us, idle for %4d us: %7.1f us to start and end (worst %7.1f)\n", workers,
                  awake_us, idle_us, took[100] * 1e6, took.back() * 1e6);
    }
  }
  ThreadPool pool(workers);
  const double s = seconds([&] {
    pool.run(workers, [&](int) {
      for (int n = 0; n < 1000; n++) pool.parallel_for(workers, [](int) {});
    });
  });
  std::printf("pool of %d: %5.2f us a parallel_for of nothing\n", workers, s * 1e3);
}

void time_few_tokens() {
  const int cores = std::thread::hardware_concurrency() < 2 ? 1 : 2;
  if (cores == 2) time_pool(2);
  for (const std::string& name : available_isas()) {
    if (name == "portable" || name == "amx") continue;  // below 24 tokens amx equals avx512
    const Kernels& k = find_kernels(name);
    for (int workers = 1; workers <= cores; workers++)
      for (int runs : {1, 2, 4, 8})
        if (workers > 1 || runs == 1) time_memory(k, "as it is", k.matmul, workers, runs, 1);
    for (int tokens : {4, 8, 16}) time_memory(k, "as it is", k.matmul, cores, 4, tokens);
#if defined(TS_HAVE_X86)
    if (name != "avx512") continue;
    for (int round = 0; round < 2; round++)
      for (int tokens : {1, 8})
        for (const Ahead& ahead : kAheadOnAvx512) {
          const std::string what = std::to_string(ahead.bytes) + " bytes ahead";
          time_memory(k, what.c_str(), ahead.matmul, cores, 1, tokens);
        }
#endif
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "few") == 0) {
    time_few_tokens();
    return 0;
  }
  for (const std::string& name : available_isas()) {
    if (name == "portable") continue;
    const Kernels& k = find_kernels(name);
    time_products(k, Format::kQ4, "Q4", 3072, 576, {1, 2, 4, 8, 16, 32, 64, 512});
    time_products(k, Format::kQ4, "Q4", 576, 1536, {1, 8, 512});
    time_products(k, Format::kQ8, "Q8", 49152, 576, {1, 8, 32});
    time_products(k, Format::kBF16, "BF16", 3072, 576, {1, 8, 512});
    if (k.lanes_of(Format::kF16) > 0)
      time_products(k, Format::kF16, "F16", 3072, 576, {1, 2, 4, 5, 8, 16, 32, 64, 512});
    time_attention(k);
    time_small(k);
  }
}
