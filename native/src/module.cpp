// The Python module. Functions take and fill buffers, and release the GIL while they compute.

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
#include "spec_reader.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace twostroke {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
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
  throw std::invalid_argument("there is no format '" + name + "'");
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

template <typename Array>
std::vector<float> floats(const Array& a) {
  return {a.data(), a.data() + a.size()};
}

Weights weights_of(const nb::dict& given, const Kernels& kernels) {
  Weights weights(kernels);
  for (const auto& [key, value] : given) {
    const std::string name = nb::cast<std::string>(key);
    std::shared_ptr<Matrix> matrix;
    Floats vector;
    if (!value.is_none() && nb::try_cast(value, matrix))
      weights.add(name, std::move(matrix));
    else if (!value.is_none() && nb::try_cast(value, vector))
      weights.add(name, floats(vector));
    else
      throw nb::type_error((name + " is neither a Matrix nor a float32 array").c_str());
  }
  return weights;
}

std::vector<Rope> ropes_of(const std::vector<RopeTables>& tables) {
  std::vector<Rope> ropes;
  for (const auto& [cos, sin, query_scales] : tables) {
    require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1),
            "the cosines and sines of a rope table have different shapes");
    ropes.push_back({floats(cos), floats(sin), static_cast<int>(cos.shape(0)), static_cast<int>(cos.shape(1)),
                     query_scales ? floats(*query_scales) : std::vector<float>()});
  }
  return ropes;
}

// Operations per second of `threads` threads that run `work`: the best of several runs.
double rate_of(double (*work)(int rounds), int threads) {
  if (work == nullptr) return 0;
  nb::gil_scoped_release free;
  ThreadPool pool(std::max(1, threads));
  constexpr int kRounds = 2000000;
  double best = 0;
  for (int run = 0; run < 5; run++) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<double> done{0};
    pool.run(pool.size(), [&](int) {
      const double operations = work(kRounds);
      double seen = done.load();
      while (!done.compare_exchange_weak(seen, seen + operations)) {
      }
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, done.load() / took.count());
  }
  return best;
}

void require_places(const Matrix& m, size_t rows, const Ints1& place) {
  require(rows == place.size(), "every row needs a place");
  for (size_t n = 0; n < place.size(); n++)
    require(place.data()[n] >= 0 && place.data()[n] < m.packed().rows, "the place of a row is outside the matrix");
}

// Checks every index of a step before the step reads memory. A wrong index throws.
struct CheckedStep {
  std::vector<Slot> decode;
  std::vector<Chunk> prefill;
  Rows rows;
  std::vector<Pool> pools;
  int num_tokens = 0;

  CheckedStep(const Model& model, const Ints2& tokens, const std::vector<Ints2>& tables,
              const std::vector<PoolData>& caches, const Ints2& slots, const Ints2& chunks) {
    const std::vector<KVGroup>& groups = model.groups();
    require(tables.size() == groups.size(), "every KV group needs a table");
    require(caches.size() == groups.size(), "every KV group needs a pool");
    num_rows_ = tokens.shape(0);
    rows = {tokens.data(), static_cast<int64_t>(tokens.shape(1)), {}};
    for (size_t g = 0; g < groups.size(); g++) {
      const PoolData& pool = caches[g];
      require(pool.shape(4) > 0 && shape_is(pool, 2, groups[g].sides) && shape_is(pool, 1, groups[g].layers) &&
                shape_is(pool, 3, groups[g].heads),
            "the cache does not have the shape of this model");
      const bool is_int8 = pool.dtype() == nb::dtype<int8_t>();
      require(is_int8 ? groups[g].sides == 2 && shape_is(pool, 5, groups[g].dim + kScaleBytes)
                    : pool.dtype() == nb::dtype<uint16_t>() && shape_is(pool, 5, groups[g].dim),
            "the cache does not have the shape of this model");
      pools.push_back(
          {pool.data(), static_cast<int>(pool.shape(0)), static_cast<int>(pool.shape(4)), is_int8});
      rows.tables.push_back({tables[g].data(), static_cast<int64_t>(tables[g].shape(1))});
      num_rows_ = std::min(num_rows_, tables[g].shape(0));
    }
    require(slots.shape(0) == 0 || slots.shape(1) == 3, "slots must have the columns row, position and index");
    require(chunks.shape(0) == 0 || chunks.shape(1) == 4,
          "chunks must have the columns row, start, size and index");
    for (size_t n = 0; n < slots.shape(0); n++) {
      const int32_t* p = slots.data() + 3 * n;
      decode.push_back({p[0], p[1], p[2]});
      num_tokens += 1;
      require_run(model.parts(), p[0], p[1], 1, p[2]);
    }
    for (size_t n = 0; n < chunks.shape(0); n++) {
      const int32_t* p = chunks.data() + 4 * n;
      prefill.push_back({p[0], p[1], p[2], p[3]});
      require(p[2] >= 1, "a chunk is empty");
      require_run(model.parts(), p[0], p[1], p[2], p[3]);
      num_tokens += p[2];
    }
  }

 private:
  size_t num_rows_;

  static bool shape_is(const PoolData& pool, int axis, int size) {
    return pool.shape(axis) == static_cast<size_t>(size);
  }

  void require_run(const ModelData& parts, int row, int start, int size, int index) const {
    const int64_t end = static_cast<int64_t>(start) + size;
    const int64_t index_end = static_cast<int64_t>(index) + size;
    require(row >= 0 && static_cast<size_t>(row) < num_rows_, "there is no such row");
    require(start >= 0 && end <= parts.max_len() && end <= rows.tokens_stride, "there is no such position");
    require(index >= 0, "there is no such cache index");
    const int32_t* ids = rows.tokens + row * rows.tokens_stride;
    for (int64_t n = start; n < end; n++)
      require(ids[n] >= 0 && ids[n] < parts.vocab(), "a token is outside the vocabulary");
    for (size_t g = 0; g < pools.size(); g++) {
      const int64_t count = (index_end + pools[g].block_size - 1) / pools[g].block_size;
      require(count <= rows.tables[g].stride, "the block table of a row is too short");
      const int32_t* table = rows.tables[g].blocks + row * rows.tables[g].stride;
      for (int64_t n = 0; n < count; n++)
        require(table[n] >= 0 && table[n] < pools[g].blocks,
              "a block table names a block that does not exist");
    }
  }
};

// Call work(n) for each row, on the decode threads of the model, or without a model on this thread.
template <typename F>
void for_rows(Model* model, size_t count, F&& work) {
  if (model && count > 1)
    model->parallel(static_cast<int>(count), [&](int n) { work(static_cast<size_t>(n)); });
  else
    for (size_t n = 0; n < count; n++) work(n);
}

void require_logits(const Model& model, int num_tokens, const Ints1& which, const OutFloats2& out) {
  require(out.shape(0) == which.size() &&
            out.shape(1) == static_cast<size_t>(model.parts().vocab()),
        "an array has another shape");
  for (size_t n = 0; n < which.size(); n++)
    require(which.data()[n] >= 0 && which.data()[n] < num_tokens, "there is no such token in this step");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("sample",
        [](const OutFloats2& logits, const Ints2& tokens, const Ints2& where, const Floats2& params,
           const Keys& keys, const OutInts1& out, const std::string& isa, Model* model) {
          const size_t count = logits.shape(0);
          const int vocab = static_cast<int>(logits.shape(1));
          require(where.shape(0) == count && where.shape(1) == 3 && params.shape(0) == count &&
                    params.shape(1) == 7 && keys.shape(0) == count && keys.shape(1) == 2 &&
                    out.size() == count && vocab > 0,
                "an array has another shape");
          for (size_t n = 0; n < count; n++) {
            const int32_t* p = where.data() + 3 * n;
            require(p[0] >= 0 && static_cast<size_t>(p[0]) < tokens.shape(0) && p[1] >= 0 &&
                      p[1] <= p[2] && static_cast<size_t>(p[2]) <= tokens.shape(1),
                  "there is no such row or position");
            const int32_t* ids = tokens.data() + p[0] * tokens.shape(1);
            for (int i = 0; i < p[2]; i++)
              require(ids[i] >= 0 && ids[i] < vocab, "a token is outside the vocabulary");
          }
          const Kernels& kernels = find_kernels(isa);
          nb::gil_scoped_release free;
          for_rows(model, count, [&](size_t n) {
            const int32_t* p = where.data() + 3 * n;
            const float* w = params.data() + 7 * n;
            out.data()[n] = choose(kernels, logits.data() + n * vocab, vocab,
                                   {w[0], w[1], w[2], w[3], w[4], w[5], w[6]},
                                   {tokens.data() + p[0] * tokens.shape(1), p[1], p[2]},
                                   {keys.data()[2 * n], keys.data()[2 * n + 1]});
          });
        },
        "logits"_a.noconvert(), "tokens"_a.noconvert(), "where"_a, "params"_a, "keys"_a, "out"_a.noconvert(), "isa"_a = "auto",
        "model"_a.none() = nb::none(),
        "Choose a token for each row of logits (overwritten), or -1 if the logits are NaN or infinite. `where`: "
        "row, prompt length, length. `params`: temperature, top_k, top_p, min_p, repetition, frequency, "
        "presence. `model`: its decode threads process the rows.");

  m.def("top_logprobs",
        [](const Floats2& logits, const Ints1& tokens, const OutInts2& ids,
           const OutFloats2& values, const OutInts1& ranks, const std::string& isa, Model* model) {
          const size_t count = logits.shape(0), width = ids.shape(1);
          const int vocab = static_cast<int>(logits.shape(1));
          require(tokens.size() == count && ids.shape(0) == count && values.shape(0) == count &&
                    values.shape(1) == width && ranks.size() == count && width >= 1 &&
                    width <= static_cast<size_t>(vocab) + 1,
                "an array has another shape");
          for (size_t n = 0; n < count; n++)
            require(tokens.data()[n] >= 0 && tokens.data()[n] < vocab,
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
        "Write for each row of logits the log-probability of its token, then the best `count` in order, to "
        "`ids` and `values` [rows, 1 + count]; and the rank of the token.");

  m.def("isas", &available_isas, "The instruction sets of this machine that have kernels, fastest first.");
  m.def("common_format",
        [](const std::vector<std::string>& types) { return name_of(common_format(types)); },
        "types"_a, "The smallest format that represents every value of these block types exactly.");
  m.def("lanes", [](const std::string& isa) { return find_kernels(isa).lanes; }, "isa"_a);
  m.def("has_fp16_products",
        [](const std::string& isa) { return find_kernels(isa).lanes_of(Format::kF16) > 0; },
        "isa"_a, "Whether the instruction set multiplies fp16 matrices (the format f16).");

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, const std::string& format, int rows, int cols, const std::string& isa) {
             require(rows > 0 && cols > 0, "a matrix needs rows and columns");
             const Kernels& kernels = find_kernels(isa);
             const Format own = format_of(format, kernels);
             require(kernels.lanes_of(own) > 0, "this instruction set has no matmul for this format");
             new (self) Matrix(own, rows, cols, kernels.lanes_of(own));
           },
           "format"_a, "rows"_a, "cols"_a, "isa"_a = "auto")
      .def_prop_ro("num_bytes", &Matrix::num_bytes)
      .def("put_blocks",
           [](Matrix& self, const std::string& type, const Bytes2& data, const Ints1& place,
              const std::optional<Grid>& grid) {
             require_places(self, data.shape(0), place);
             const size_t entries = find_block_type(type).grid_entries;
             require((grid ? grid->shape(0) : 0) == entries, "the grid does not belong to this block type");
             require(!grid || grid->size() == entries * find_block_type(type).grid_columns,
                   "the grid does not belong to this block type");
             nb::gil_scoped_release free;
             self.put_blocks(type, data.data(), data.shape(1), static_cast<int>(data.shape(0)),
                             place.data(), grid ? grid->data() : nullptr);
           },
           "type"_a, "data"_a, "place"_a, "grid"_a = nb::none(),
           "`grid`: the vectors that the codes of the type select, or None.")
      .def("put_floats",
           [](Matrix& self, const Floats2& data, const Ints1& place) {
             require_places(self, data.shape(0), place);
             require(data.shape(1) == static_cast<size_t>(self.packed().cols),
                   "the rows have another length than those of the matrix");
             nb::gil_scoped_release free;
             self.put_floats(data.data(), static_cast<int>(data.shape(0)), place.data());
           },
           "data"_a, "place"_a)
      .def("put_bias",
           [](Matrix& self, const Floats1& data, const Ints1& place) {
             require_places(self, data.shape(0), place);
             self.put_bias(data.data(), static_cast<int>(data.shape(0)), place.data());
           },
           "data"_a, "place"_a)
      .def("rows",
           [](const Matrix& self, const OutFloats2& out, const std::string& isa) {
             const Packed& w = self.packed();
             require(out.shape(0) == static_cast<size_t>(w.rows) &&
                       out.shape(1) == static_cast<size_t>(w.cols),
                   "an array has another shape");
             const Kernels& k = find_kernels(isa);
             require(k.lanes_of(w.format) == w.lanes, "the matrix is packed for other kernels");
             for (int row = 0; row < w.rows; row++)
               k.unpack_row(w, row, out.data() + static_cast<size_t>(row) * w.cols);
           },
           "out"_a.noconvert(), "isa"_a = "auto", "Unpack all rows.")
      .def("multiply",
           [](const Matrix& self, const Floats2& x, const OutFloats2& out, const std::string& isa,
              bool exact, bool with_residual) {
             const Packed& w = self.packed();
             const Kernels& k = find_kernels(isa);
             require(k.lanes_of(w.format) == w.lanes, "the matrix is packed for other kernels");
             require(x.shape(1) == static_cast<size_t>(w.cols) && out.shape(0) == x.shape(0) &&
                       out.shape(1) == static_cast<size_t>(w.rows),
                   "an array has another shape");
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

  m.attr("head_rows") = kHeadRows;

  m.def("matrix_unit_min_tokens", [](const std::string& isa) { return find_kernels(isa).matrix_units.min_tokens; }, "isa"_a,
        "The minimum number of tokens of a step on matrix units (in bfloat16); 0 if there are none.");
  m.def("dot_rate",
        [](const std::string& isa, int threads) {
          return rate_of(find_kernels(isa).dot_bytes, threads);
        },
        "isa"_a, "threads"_a, "Operations per second of integer products on registers; 0 if unknown.");
  m.def("fp16_rate",
        [](const std::string& isa, int threads) {
          return rate_of(find_kernels(isa).fp16.multiply, threads);
        },
        "isa"_a, "threads"_a, "Operations per second of fp16 products on registers; 0 if there are none.");

  nb::class_<Model>(m, "Model")
      .def("__init__",
           [](Model* self, const nb::dict& spec, const nb::dict& weights, const std::vector<RopeTables>& ropes,
              const std::string& isa, int threads, int threads_prefill, bool exact) {
             require(threads > 0 && threads_prefill > 0, "a thread pool needs at least one worker");
             const Kernels& kernels = find_kernels(isa);
             new (self) Model(kernels, assemble(read_model_spec(spec), weights_of(weights, kernels), ropes_of(ropes)),
                              threads, threads_prefill, exact);
           },
           nb::kw_only(), "spec"_a, "weights"_a, "ropes"_a, "isa"_a, "threads"_a, "threads_prefill"_a,
           "exact"_a,
           "`spec`: the fields of `ModelSpec` (see `spec.h`). `weights`: a Matrix or float32 array for each "
           "canonical name. `ropes`: for each rope table cosines, sines and query scales (or None).")
      .def_prop_ro("num_bytes", &Model::num_bytes)
      .def_prop_ro("stage_seconds",
                   [](const Model& self) {
                     nb::dict found;
                     for (int n = 0; n < kStages; n++) found[kStageNames[n]] = self.stage_seconds()[n];
                     return found;
                   },
                   "Seconds of each stage, summed over all steps.")
      .def("forward",
           [](Model& self, const Ints2& tokens, const std::vector<Ints2>& tables,
              const std::vector<PoolData>& caches, const Ints2& slots, const Ints2& chunks, const Ints1& which, const OutFloats2& out,
              bool keep_all) {
             nb::gil_scoped_release free;
             const CheckedStep step(self, tokens, tables, caches, slots, chunks);
             require_logits(self, step.num_tokens, which, out);
             for (size_t n = 1; n < which.size(); n++)
               require(which.data()[n - 1] < which.data()[n], "the tokens are not in ascending order");
             self.forward({step.rows, step.pools, step.decode, step.prefill}, which.data(),
                          static_cast<int>(which.size()), out.data(), keep_all);
           },
           "tokens"_a.noconvert(), "tables"_a.noconvert(), "caches"_a.noconvert(), "slots"_a,
           "chunks"_a, "which"_a, "out"_a.noconvert(), "keep_all"_a = false,
           "Compute slots [n, (row, position, index)] and chunks [n, (row, start, size, index)], and the logits "
           "of the tokens `which`. `tables` and `caches` have one entry per KV group.")
      .def("keep_shares", &Model::keep_shares,
           "Keep the attention shares of the slots of each step from now on.")
      .def("shares",
           [](const Model& self) {
             const size_t slots = self.share_slots(), parts = self.share_parts();
             float* data = new float[slots * parts + 1];
             nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
             self.shares(data);
             return nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {slots, parts}, owner);
           },
           "The attention shares of the last step: the share that each slot gave to every 64 cache entries, "
           "averaged over heads and layers, [slots, parts].")
      .def("logits",
           [](Model& self, const Ints1& which, const OutFloats2& out) {
             require_logits(self, self.num_kept(), which, out);
             nb::gil_scoped_release free;
             if (which.size() > 0)
               self.logits(which.data(), static_cast<int>(which.size()), out.data());
           },
           "which"_a, "out"_a.noconvert(), "Write the logits of tokens of the last step, if that step kept its hidden states or had slots only.");
}

}  // namespace twostroke
