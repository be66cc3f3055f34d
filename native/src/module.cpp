// What Python sees: buffers in, buffers out, the lock of the interpreter let go meanwhile.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "isa.h"
#include "model.h"
#include "pack.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace twostroke {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutFloats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutInts2 = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutInts1 = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Grid = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RopeTables = std::tuple<Floats2, Floats2, std::optional<Floats1>>;
using PoolData = nb::ndarray<nb::ndim<6>, nb::c_contig, nb::device::cpu>;  // fp16 as bits, or int8

namespace {

Format format_of(const std::string& name, const Kernels& kernels) {
  if (name == "q4") return kernels.slow_fp16_loads ? Format::kQ4F : Format::kQ4;
  if (name == "q4t") return Format::kQ4T;
  if (name == "q4ts") return Format::kQ4TS;
  if (name == "q4f") return Format::kQ4F;
  if (name == "q8") return Format::kQ8;
  if (name == "q8f") return Format::kQ8F;
  if (name == "q8s") return Format::kQ8S;
  if (name == "q8m") return Format::kQ8M;
  if (name == "bf16") return Format::kBF16;
  if (name == "f16") return Format::kF16;
  if (name == "f32") return Format::kF32;
  throw std::invalid_argument("no format is called '" + name + "'");
}

const char* name_of(Format format) {
  switch (format) {
    case Format::kQ4: return "q4";
    case Format::kQ4T: return "q4t";
    case Format::kQ4F: return "q4f";
    case Format::kQ4TS: return "q4ts";
    case Format::kQ8: return "q8";
    case Format::kQ8F: return "q8f";
    case Format::kQ8S: return "q8s";
    case Format::kQ8M: return "q8m";
    case Format::kBF16: return "bf16";
    case Format::kF16: return "f16";
    case Format::kF32: return "f32";
  }
  return "";
}

ActivationKind activation_of(const std::string& name) {
  if (name == "silu") return ActivationKind::kSilu;
  if (name == "gelu_tanh") return ActivationKind::kGeluTanh;
  if (name == "gelu") return ActivationKind::kGelu;
  if (name == "clamped_swiglu") return ActivationKind::kClampedSwiglu;
  throw std::invalid_argument("no activation is called '" + name + "'");
}

template <typename Array>
std::vector<float> floats(const Array& a) {
  return {a.data(), a.data() + a.size()};
}
std::vector<float> floats(const std::optional<Floats1>& a) {
  return a ? floats(*a) : std::vector<float>();
}

Norm norm_of(const std::optional<Floats1>& weight, const std::optional<Floats1>& bias) {
  return {floats(weight), floats(bias)};
}

// Operations a second of a team that is busy with `work`, the best of some runs.
double rate_of(double (*work)(int rounds), int threads) {
  if (work == nullptr) return 0;
  nb::gil_scoped_release free;
  Team team(std::max(1, threads));
  constexpr int kRounds = 2000000;
  double best = 0;
  for (int run = 0; run < 5; run++) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<double> done{0};
    team.run(team.size(), [&](int) {
      const double own = work(kRounds);
      double seen = done.load();
      while (!done.compare_exchange_weak(seen, seen + own)) {
      }
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, done.load() / took.count());
  }
  return best;
}

void check(bool fine, const char* what) {
  if (!fine) throw std::invalid_argument(what);
}

void check_places(const Matrix& m, size_t rows, const Ints1& place) {
  check(rows == place.size(), "a place for every row is needed");
  for (size_t n = 0; n < place.size(); n++)
    check(place.data()[n] >= 0 && place.data()[n] < m.packed().rows, "a row's place is outside");
}

// Everything that a step reads by number is checked first: what is wrong raises, and reads nothing.
struct CheckedStep {
  std::vector<Slot> decode;
  std::vector<Chunk> prefill;
  Rows rows;
  std::vector<Pool> pools;
  int num_tokens = 0;

  CheckedStep(const Model& model, const Ints2& tokens, const std::vector<Ints2>& tables,
              const std::vector<PoolData>& caches, const Ints2& slots, const Ints2& chunks) {
    const std::vector<KVGroup>& groups = model.groups();
    check(tables.size() == groups.size(), "a table for each KV group is needed");
    check(caches.size() == groups.size(), "a pool for each KV group is needed");
    num_rows_ = tokens.shape(0);
    rows = {tokens.data(), static_cast<int64_t>(tokens.shape(1)), {}};
    for (size_t g = 0; g < groups.size(); g++) {
      const PoolData& pool = caches[g];
      check(pool.shape(4) > 0 && shape_is(pool, 2, groups[g].parts) && shape_is(pool, 1, groups[g].layers) &&
                shape_is(pool, 3, groups[g].heads),
            "the cache is not this model's");
      const bool is_int8 = pool.dtype() == nb::dtype<int8_t>();
      check(is_int8 ? groups[g].parts == 2 && shape_is(pool, 5, groups[g].dim + kScaleBytes)
                    : pool.dtype() == nb::dtype<uint16_t>() && shape_is(pool, 5, groups[g].dim),
            "the cache is not this model's");
      pools.push_back(
          {pool.data(), static_cast<int>(pool.shape(0)), static_cast<int>(pool.shape(4)), is_int8});
      rows.tables.push_back({tables[g].data(), static_cast<int64_t>(tables[g].shape(1))});
      num_rows_ = std::min(num_rows_, tables[g].shape(0));
    }
    check(slots.shape(0) == 0 || slots.shape(1) == 3, "slots are rows, positions and indices");
    check(chunks.shape(0) == 0 || chunks.shape(1) == 4,
          "chunks are rows, starts, sizes and indices");
    for (size_t n = 0; n < slots.shape(0); n++) {
      const int32_t* p = slots.data() + 3 * n;
      decode.push_back({p[0], p[1], p[2]});
      num_tokens += 1;
      check_run(model.parts(), p[0], p[1], 1, p[2]);
    }
    for (size_t n = 0; n < chunks.shape(0); n++) {
      const int32_t* p = chunks.data() + 4 * n;
      prefill.push_back({p[0], p[1], p[2], p[3]});
      check(p[2] >= 1, "an empty chunk");
      check_run(model.parts(), p[0], p[1], p[2], p[3]);
      num_tokens += p[2];
    }
  }

 private:
  size_t num_rows_;

  static bool shape_is(const PoolData& pool, int axis, int size) {
    return pool.shape(axis) == static_cast<size_t>(size);
  }

  void check_run(const ModelParts& parts, int row, int start, int size, int index) const {
    const int64_t end = static_cast<int64_t>(start) + size;
    const int64_t index_end = static_cast<int64_t>(index) + size;
    check(row >= 0 && static_cast<size_t>(row) < num_rows_, "no such row");
    check(start >= 0 && end <= parts.max_len() && end <= rows.tokens_stride, "no such position");
    check(index >= 0, "no such cache index");
    const int32_t* ids = rows.tokens + row * rows.tokens_stride;
    for (int64_t n = start; n < end; n++)
      check(ids[n] >= 0 && ids[n] < parts.vocab(), "a token is outside the vocabulary");
    for (size_t g = 0; g < pools.size(); g++) {
      const int64_t count = (index_end + pools[g].block_size - 1) / pools[g].block_size;
      check(count <= rows.tables[g].stride, "the table of a row is too short");
      const int32_t* table = rows.tables[g].blocks + row * rows.tables[g].stride;
      for (int64_t n = 0; n < count; n++)
        check(table[n] >= 0 && table[n] < pools[g].blocks,
              "a table names a block that is not there");
    }
  }
};

// Each row once: by the model's threads, or without a model by the caller alone.
template <typename F>
void for_rows(Model* model, size_t count, F&& work) {
  if (model && count > 1)
    model->parallel(static_cast<int>(count), [&](int n) { work(static_cast<size_t>(n)); });
  else
    for (size_t n = 0; n < count; n++) work(n);
}

void check_logits(const Model& model, int num_tokens, const Ints1& which, const OutFloats2& out) {
  check(out.shape(0) == which.size() &&
            out.shape(1) == static_cast<size_t>(model.parts().vocab()),
        "another shape");
  for (size_t n = 0; n < which.size(); n++)
    check(which.data()[n] >= 0 && which.data()[n] < num_tokens, "no such token in this step");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("sample",
        [](const OutFloats2& logits, const Ints2& tokens, const Ints2& where, const Floats2& params,
           const Keys& keys, const OutInts1& out, const std::string& isa, Model* model) {
          const size_t count = logits.shape(0);
          const int vocab = static_cast<int>(logits.shape(1));
          check(where.shape(0) == count && where.shape(1) == 3 && params.shape(0) == count &&
                    params.shape(1) == 7 && keys.shape(0) == count && keys.shape(1) == 2 &&
                    out.size() == count && vocab > 0,
                "another shape");
          for (size_t n = 0; n < count; n++) {
            const int32_t* p = where.data() + 3 * n;
            check(p[0] >= 0 && static_cast<size_t>(p[0]) < tokens.shape(0) && p[1] >= 0 &&
                      p[1] <= p[2] && static_cast<size_t>(p[2]) <= tokens.shape(1),
                  "no such row, or no such position");
            const int32_t* ids = tokens.data() + p[0] * tokens.shape(1);
            for (int i = 0; i < p[2]; i++)
              check(ids[i] >= 0 && ids[i] < vocab, "a token is outside the vocabulary");
          }
          const Kernels& kernels = find_kernels(isa);
          nb::gil_scoped_release free;
          for_rows(model, count, [&](size_t n) {
            const int32_t* p = where.data() + 3 * n;
            const float* w = params.data() + 7 * n;
            out.data()[n] = choose(kernels, logits.data() + n * vocab, vocab,
                                   {w[0], w[1], w[2], w[3], w[4], w[5], w[6]},
                                   tokens.data() + p[0] * tokens.shape(1), p[1], p[2],
                                   keys.data()[2 * n], keys.data()[2 * n + 1]);
          });
        },
        "logits"_a.noconvert(), "tokens"_a.noconvert(), "where"_a, "params"_a, "keys"_a, "out"_a.noconvert(), "isa"_a = "auto",
        "model"_a.none() = nb::none(),
        "A token for each row of logits (overwritten), or -1 if they are NaN or infinite. `where`: row, length of its prompt, length; "
        "`params`: temperature, top_k, top_p, min_p, repetition, frequency, presence. `model`: whose threads share the rows.");

  m.def("top_logprobs",
        [](const Floats2& logits, const Ints1& tokens, const OutInts2& ids,
           const OutFloats2& values, const OutInts1& ranks, const std::string& isa, Model* model) {
          const size_t count = logits.shape(0), width = ids.shape(1);
          const int vocab = static_cast<int>(logits.shape(1));
          check(tokens.size() == count && ids.shape(0) == count && values.shape(0) == count &&
                    values.shape(1) == width && ranks.size() == count && width >= 1 &&
                    width <= static_cast<size_t>(vocab) + 1,
                "another shape");
          for (size_t n = 0; n < count; n++)
            check(tokens.data()[n] >= 0 && tokens.data()[n] < vocab,
                  "a token is outside the vocabulary");
          const Kernels& kernels = find_kernels(isa);
          nb::gil_scoped_release free;
          for_rows(model, count, [&](size_t n) {
            top_logprobs(kernels, logits.data() + n * vocab, vocab, tokens.data()[n],
                         static_cast<int>(width) - 1, ids.data() + n * width,
                         values.data() + n * width, ranks.data() + n);
          });
        },
        "logits"_a.noconvert(), "tokens"_a, "ids"_a.noconvert(), "values"_a.noconvert(),
        "ranks"_a.noconvert(), "isa"_a = "auto", "model"_a.none() = nb::none(),
        "For each row of logits the log-probability of its token, then the best ones in order: "
        "as many as `ids` and `values` [rows, 1 + count] have room for; and the token's rank.");

  m.def("isas", &available_isas, "The instruction sets there are kernels for, the best first.");
  m.def("common_format",
        [](const std::vector<std::string>& types) { return name_of(common_format(types)); },
        "types"_a, "The smallest format that has every value of these block types exactly.");
  m.def("lanes", [](const std::string& isa) { return find_kernels(isa).lanes; }, "isa"_a);
  m.def("has_fp16_products",
        [](const std::string& isa) { return find_kernels(isa).lanes_of(Format::kF16) > 0; },
        "isa"_a, "Whether there are products with fp16 matrices, the format f16.");

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, const std::string& format, int rows, int cols, const std::string& isa) {
             check(rows > 0 && cols > 0, "a matrix has rows and columns");
             const Kernels& kernels = find_kernels(isa);
             const Format own = format_of(format, kernels);
             check(kernels.lanes_of(own) > 0, "this instruction set has no such products");
             new (self) Matrix(own, rows, cols, kernels.lanes_of(own));
           },
           "format"_a, "rows"_a, "cols"_a, "isa"_a = "auto")
      .def_prop_ro("num_bytes", &Matrix::num_bytes)
      .def("put_blocks",
           [](Matrix& self, const std::string& type, const Bytes2& data, const Ints1& place,
              const std::optional<Grid>& grid) {
             check_places(self, data.shape(0), place);
             const size_t entries = find_block_type(type).grid_entries;
             check((grid ? grid->shape(0) : 0) == entries, "another grid than this type's");
             check(!grid || grid->size() == entries * find_block_type(type).grid_columns,
                   "another grid than this type's");
             nb::gil_scoped_release free;
             self.put_blocks(type, data.data(), data.shape(1), static_cast<int>(data.shape(0)),
                             place.data(), grid ? grid->data() : nullptr);
           },
           "type"_a, "data"_a, "place"_a, "grid"_a = nb::none(),
           "`grid`: the vectors that the type's codes choose from, where it has such.")
      .def("put_floats",
           [](Matrix& self, const Floats2& data, const Ints1& place) {
             check_places(self, data.shape(0), place);
             check(data.shape(1) == static_cast<size_t>(self.packed().cols),
                   "rows of another length");
             nb::gil_scoped_release free;
             self.put_floats(data.data(), static_cast<int>(data.shape(0)), place.data());
           },
           "data"_a, "place"_a)
      .def("put_bias",
           [](Matrix& self, const Floats1& data, const Ints1& place) {
             check_places(self, data.shape(0), place);
             self.put_bias(data.data(), static_cast<int>(data.shape(0)), place.data());
           },
           "data"_a, "place"_a)
      .def("rows",
           [](const Matrix& self, const OutFloats2& out, const std::string& isa) {
             const Packed& w = self.packed();
             check(out.shape(0) == static_cast<size_t>(w.rows) &&
                       out.shape(1) == static_cast<size_t>(w.cols),
                   "another shape");
             const Kernels& k = find_kernels(isa);
             check(k.lanes_of(w.format) == w.lanes, "packed for other kernels");
             for (int row = 0; row < w.rows; row++)
               k.unpack_row(w, row, out.data() + static_cast<size_t>(row) * w.cols);
           },
           "out"_a.noconvert(), "isa"_a = "auto", "Unpack every row.")
      .def("multiply",
           [](const Matrix& self, const Floats2& x, const OutFloats2& out, const std::string& isa,
              bool exact, bool with_residual) {
             const Packed& w = self.packed();
             const Kernels& k = find_kernels(isa);
             check(k.lanes_of(w.format) == w.lanes, "packed for other kernels");
             check(x.shape(1) == static_cast<size_t>(w.cols) && out.shape(0) == x.shape(0) &&
                       out.shape(1) == static_cast<size_t>(w.rows),
                   "another shape");
             const int tokens = static_cast<int>(x.shape(0)), places = w.blocks + (with_residual ? 1 : 0);
             const size_t padded = (tokens + kTile - 1) / kTile * static_cast<size_t>(kTile);
             std::vector<int8_t> codes(padded * places * kBlock);
             std::vector<float> scale(padded * places), sum(padded * places);
             std::vector<float> half_sums(padded * places * 2);
             std::vector<int32_t> coarsest(padded);
             const bool is_f16 = w.format == Format::kF16;
             std::vector<uint16_t> fp16(is_f16 ? padded * w.blocks * kBlock : 0);
             std::vector<float> fp16_scale(padded * w.blocks);
             for (int t = 0; t < tokens; t++) {
               const float* line = x.data() + static_cast<size_t>(t) * w.cols;
               k.quantise(line, w.cols, t, 0, places, codes.data(), scale.data(), sum.data(),
                          half_sums.data());
               if (with_residual)
                 coarsest[t] = k.quantise_residual(line, w.cols, t, places, codes.data(), scale.data(),
                                               sum.data(), half_sums.data());
             }
             for (int t = 0; t < tokens && is_f16; t++)
               k.fp16.to_fp16_blocks(x.data() + static_cast<size_t>(t) * w.cols, w.cols, t, 0, w.blocks,
                                  fp16.data(), fp16_scale.data());
             const Activations a{x.data(),     w.cols,        exact ? nullptr : codes.data(),
                                 scale.data(), sum.data(),    w.blocks,
                                 half_sums.data(), nullptr,      with_residual ? coarsest.data() : nullptr,
                                 exact || !is_f16 ? nullptr : fp16.data(), fp16_scale.data()};
             k.matmul(w, a, 0, tokens, 0, w.groups(), out.data(), w.rows, false);
           },
           "x"_a, "out"_a.noconvert(), "isa"_a = "auto", "exact"_a = false,
           "with_residual"_a = false, "out = x · selfᵀ + bias.");

  nb::class_<Experts>(m, "Experts")
      .def("__init__",
           [](Experts* self, std::shared_ptr<Matrix> router,
              const std::vector<std::shared_ptr<Matrix>>& gate_up,
              const std::vector<std::shared_ptr<Matrix>>& down,
              const std::optional<Floats1>& correction, bool shared_gate, int experts_per_token,
              const std::string& scoring, bool normalised, float scale, int num_groups,
              int groups_used, const std::string& group_score) {
             check(!gate_up.empty() && gate_up.size() == down.size(), "experts have both matrices");
             check(scoring == "softmax" || scoring == "sigmoid", "no scoring is called so");
             check(group_score == "max" || group_score == "top2_sum", "no score of a group is called so");
             Experts experts{router, shared_gate, floats(correction), {}, {}};
             for (size_t e = 0; e < gate_up.size(); e++) experts.each.push_back({gate_up[e], down[e]});
             experts.routing = {experts_per_token, scoring == "sigmoid", normalised, scale,
                                num_groups,        groups_used,          group_score == "top2_sum"};
             new (self) Experts(std::move(experts));
           },
           nb::kw_only(), "router"_a, "gate_up"_a, "down"_a, "correction"_a = nb::none(),
           "shared_gate"_a = false, "experts_per_token"_a, "scoring"_a = "softmax",
           "normalised"_a = true, "scale"_a = 1.0f, "num_groups"_a = 1, "groups_used"_a = 1,
           "group_score"_a = "max",
           "A layer's experts. `shared_gate`: the router's last row is the gate of the shared one.");

  nb::class_<Latent>(m, "Latent")
      .def("__init__",
           [](Latent* self, std::shared_ptr<Matrix> q_b, std::shared_ptr<Matrix> keys,
              std::shared_ptr<Matrix> values, std::shared_ptr<Matrix> keys_transposed,
              const std::optional<Floats1>& q_a_norm, const Floats1& kv_a_norm, float eps,
              int value_dim) {
             new (self) Latent{q_b, keys, values, keys_transposed, floats(q_a_norm),
                               floats(kv_a_norm), eps, value_dim};
           },
           nb::kw_only(), "q_b"_a.none() = nb::none(), "keys"_a, "values"_a, "keys_transposed"_a,
           "q_a_norm"_a = nb::none(), "kv_a_norm"_a, "eps"_a, "value_dim"_a,
           "Latent attention of a layer. Of kv_b: each head's rows for keys, also transposed, and "
           "for values, each head from a multiple of `head_rows` on.");
  m.attr("head_rows") = kHeadRows;

  nb::class_<Layer>(m, "Layer")
      .def("__init__",
           [](Layer* self, std::shared_ptr<Matrix> qkv, std::shared_ptr<Matrix> o,
              std::shared_ptr<Matrix> gate_up, std::shared_ptr<Matrix> down,
              std::shared_ptr<Experts> experts, std::shared_ptr<Latent> latent, int heads,
              int kv_heads, int dim, float scale, float softcap, int window,
              const std::string& activation, float alpha, float limit, bool gated, bool parallel,
              const std::optional<Floats1>& attn_norm, const std::optional<Floats1>& mlp_norm,
              const std::optional<Floats1>& attn_post_norm,
              const std::optional<Floats1>& mlp_post_norm,
              const std::optional<Floats1>& attn_norm_bias,
              const std::optional<Floats1>& mlp_norm_bias,
              const std::optional<Floats1>& attn_post_norm_bias,
              const std::optional<Floats1>& mlp_post_norm_bias,
              const std::optional<Floats1>& q_norm, const std::optional<Floats1>& k_norm,
              const std::optional<Floats1>& key_scales, const std::optional<Floats1>& sinks, int rope,
              int rope_dim, int group, int in_group) {
             Layer layer{};
             layer.qkv = qkv, layer.o = o, layer.mlp = {gate_up, down}, layer.experts = experts;
             layer.latent = latent, layer.rope_dim = rope_dim;
             layer.attn_norm = norm_of(attn_norm, attn_norm_bias);
             layer.mlp_norm = norm_of(mlp_norm, mlp_norm_bias);
             layer.attn_post_norm = norm_of(attn_post_norm, attn_post_norm_bias);
             layer.mlp_post_norm = norm_of(mlp_post_norm, mlp_post_norm_bias);
             layer.q_norm = floats(q_norm), layer.k_norm = floats(k_norm);
             layer.key_scales = floats(key_scales);
             for (float scale : layer.key_scales) layer.key_factors.push_back(1 / scale);
             layer.sinks = floats(sinks);
             layer.heads = heads, layer.kv_heads = kv_heads, layer.dim = dim;
             layer.attention = {scale, softcap, window};
             layer.activation = {activation_of(activation), alpha, limit};
             check(gated || layer.activation.kind != ActivationKind::kClampedSwiglu,
                   "a clamped swiglu has a gate");
             layer.gated = gated, layer.parallel = parallel;
             layer.rope = rope, layer.group = group, layer.in_group = in_group;
             new (self) Layer(std::move(layer));
           },
           nb::kw_only(), "qkv"_a, "o"_a, "gate_up"_a.none() = nb::none(),
           "down"_a.none() = nb::none(), "experts"_a.none() = nb::none(), "latent"_a.none() = nb::none(), "heads"_a, "kv_heads"_a, "dim"_a,
           "scale"_a, "softcap"_a = 0.0f, "window"_a = 0, "activation"_a = "silu",
           "alpha"_a = 1.0f, "limit"_a = 0.0f, "gated"_a = true, "parallel"_a = false, "attn_norm"_a = nb::none(),
           "mlp_norm"_a = nb::none(), "attn_post_norm"_a = nb::none(),
           "mlp_post_norm"_a = nb::none(), "attn_norm_bias"_a = nb::none(),
           "mlp_norm_bias"_a = nb::none(), "attn_post_norm_bias"_a = nb::none(),
           "mlp_post_norm_bias"_a = nb::none(), "q_norm"_a = nb::none(), "k_norm"_a = nb::none(),
           "key_scales"_a = nb::none(), "sinks"_a = nb::none(), "rope"_a = 0, "rope_dim"_a = 0, "group"_a = 0, "in_group"_a,
           "Weights and rules of one layer. `rope`: which of the model's tables; `rope_dim`: with "
           "latents, a head's channels with rope; `in_group`: which layer of its KV group.");

  m.def("matrix_unit_min_tokens", [](const std::string& isa) { return find_kernels(isa).matrix_units.min_tokens; }, "isa"_a,
        "Tokens from which a step goes through matrix units, in bfloat16; 0 if there are none.");
  m.def("dot_rate",
        [](const std::string& isa, int threads) {
          return rate_of(find_kernels(isa).dot_bytes, threads);
        },
        "isa"_a, "threads"_a, "Operations a second of integer products on registers; 0 if unknown.");
  m.def("fp16_rate",
        [](const std::string& isa, int threads) {
          return rate_of(find_kernels(isa).fp16.multiply, threads);
        },
        "isa"_a, "threads"_a, "The same of fp16; 0 if the instruction set has none.");

  nb::class_<Model>(m, "Model")
      .def("__init__",
           [](Model* self, const std::string& isa, const std::vector<const Layer*>& layers,
              std::shared_ptr<Matrix> embed, std::shared_ptr<Matrix> head,
              const Floats1& final_norm, const std::vector<RopeTables>& ropes,
              float eps, float embed_scale, float residual_scale, float logit_scale,
              float logit_softcap, bool layer_norms, const std::optional<Floats1>& final_norm_bias,
              const std::optional<Floats2>& positions, int threads, int threads_prefill, bool exact) {
             check(threads > 0 && threads_prefill > 0, "a team has at least one member");
             ModelParts parts{{},
                              std::move(embed),
                              std::move(head),
                              norm_of(final_norm, final_norm_bias),
                              {},
                              eps,
                              embed_scale,
                              residual_scale,
                              logit_scale,
                              logit_softcap,
                              layer_norms,
                              positions ? floats(*positions) : std::vector<float>()};
             for (const Layer* layer : layers) {
               check(layer != nullptr, "a layer is None");
               parts.layers.push_back(*layer);
             }
             for (const auto& [cos, sin, query_scales] : ropes) {
               check(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1),
                     "angles of another shape");
               parts.ropes.push_back({floats(cos), floats(sin), static_cast<int>(cos.shape(0)),
                                      static_cast<int>(cos.shape(1)), floats(query_scales)});
             }
             new (self) Model(find_kernels(isa), std::move(parts), threads, threads_prefill, exact);
           },
           nb::kw_only(), "isa"_a, "layers"_a, "embed"_a, "head"_a, "final_norm"_a, "ropes"_a,
           "eps"_a, "embed_scale"_a = 1.0f, "residual_scale"_a = 1.0f, "logit_scale"_a = 1.0f,
           "logit_softcap"_a = 0.0f, "layer_norms"_a = false, "final_norm_bias"_a = nb::none(),
           "positions"_a = nb::none(), "threads"_a, "threads_prefill"_a, "exact"_a,
           "`ropes`: tables of cosines and sines, and what each position's queries are multiplied by, "
           "or None; `positions`: learned embeddings of them.")
      .def_prop_ro("num_bytes", &Model::num_bytes)
      .def_prop_ro("stage_seconds",
                   [](const Model& self) {
                     nb::dict found;
                     for (int n = 0; n < kStages; n++) found[kStageNames[n]] = self.stage_seconds()[n];
                     return found;
                   },
                   "Seconds of each stage of all steps so far.")
      .def("forward",
           [](Model& self, const Ints2& tokens, const std::vector<Ints2>& tables,
              const std::vector<PoolData>& caches, const Ints2& slots, const Ints2& chunks, const Ints1& which, const OutFloats2& out,
              bool keep_all) {
             nb::gil_scoped_release free;
             const CheckedStep step(self, tokens, tables, caches, slots, chunks);
             check_logits(self, step.num_tokens, which, out);
             for (size_t n = 1; n < which.size(); n++)
               check(which.data()[n - 1] < which.data()[n], "tokens out of their order");
             self.forward(step.rows, step.pools, step.decode, step.prefill, which.data(),
                          static_cast<int>(which.size()), out.data(), keep_all);
           },
           "tokens"_a.noconvert(), "tables"_a.noconvert(), "caches"_a.noconvert(), "slots"_a,
           "chunks"_a, "which"_a, "out"_a.noconvert(), "keep_all"_a = false,
           "Compute slots [n, (row, position, index)] and chunks [n, (row, start, size, index)], and "
           "the logits of some of their tokens. Tables and caches: one for each KV group.")
      .def("keep_shares", &Model::keep_shares,
           "Keep the shares of attention of each step's slots from now on.")
      .def("shares",
           [](const Model& self) {
             const size_t slots = self.share_slots(), parts = self.share_parts();
             float* data = new float[slots * parts + 1];
             nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
             self.shares(data);
             return nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {slots, parts}, owner);
           },
           "Of the last step's attention: what share each slot gave to every 64 cache entries, a mean "
           "over heads and layers, [slots, parts].")
      .def("logits",
           [](Model& self, const Ints1& which, const OutFloats2& out) {
             check_logits(self, self.num_kept(), which, out);
             nb::gil_scoped_release free;
             if (which.size() > 0)
               self.logits(which.data(), static_cast<int>(which.size()), out.data());
           },
           "which"_a, "out"_a.noconvert(), "Logits of some tokens of the last step, if it was kept or had slots alone.");
}

}  // namespace twostroke
