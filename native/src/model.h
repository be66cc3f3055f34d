// One decoder, a step at a time: `twostroke/model/decoder.py` says the same in torch.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "team.h"

namespace twostroke {

struct Shape {
  int vocab, hidden, inner, heads, kv_heads, dim, rope_half, max_len;
  float eps;
};

struct Layer {
  std::shared_ptr<Matrix> qkv, o, gate_up, down;  // gate and up: 32 rows of each in turn
  std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;  // the last two: empty if there are none
  int window;                                              // 0: none
};

struct Slot {  // decode: feed the token at `position` of `row`
  int32_t row, position;
};

struct Chunk {  // prefill: feed positions [start, start + size) of `row`
  int32_t row, start, size;
};

// The rows of the requests, as `exec/state.py` keeps them, and the pool of `kv/halves.py`.
struct Rows {
  const int32_t* tokens;
  int64_t tokens_stride;
  const int32_t* tables;
  int64_t tables_stride;
};

struct Pool {
  uint16_t* data;  // [layers, 2, blocks, kv_heads, block_size, dim]
  int blocks, block_size;
};

// What a step's time goes to.
enum Stage { kEmbed, kNorm, kQkv, kStore, kAttend, kMerge, kOutput, kGateUp, kDown, kHead, kStages };
constexpr const char* kStageNames[kStages] = {"embed", "norm",   "qkv",     "store", "attend",
                                              "merge", "output", "gate_up", "down",  "head"};

// Throws unless the parts of a model fit each other.
void check_model(const Shape& shape, const std::vector<Layer>& layers, const Matrix& embed,
                 const Matrix& head, size_t final_norm, const Kernels& kernels);

class Model {
 public:
  Model(const Kernels& kernels, const Shape& shape, std::vector<Layer> layers,
        std::shared_ptr<Matrix> embed, std::shared_ptr<Matrix> head, std::vector<float> final_norm,
        std::vector<float> cos, std::vector<float> sin, int threads, int threads_prefill,
        bool exact);

  // Decode slots, then chunks, and the logits [count, vocab] of the tokens `which` of them, which
  // come in their order. `keep_all`: the last hidden state of every token stays until the next step.
  void forward(const Rows& rows, const Pool& pool, const std::vector<Slot>& decode,
               const std::vector<Chunk>& prefill, const int32_t* which, int count, float* out,
               bool keep_all);
  // Logits of more tokens of a step that was kept.
  void logits(const int32_t* which, int count, float* out);

  int num_kept() const { return kept_; }
  // Seconds of each stage since the model was made, as its first member saw them.
  const std::array<double, kStages>& spent() const { return spent_; }
  size_t num_layers() const { return layers_.size(); }
  const Shape& shape() const { return shape_; }
  size_t num_bytes() const;

 private:
  struct Quantised {  // activations of a step: floats, and 8-bit blocks or (`is_wide`) bfloat16
    std::vector<float> values, scale, sum, halves;
    std::vector<int8_t> codes;
    std::vector<uint16_t> wide;
    std::vector<uint16_t> half;  // for products with F16
    std::vector<float> half_scale;
    std::vector<int32_t> again;  // of each token: its coarsest block, which has a second place
    bool is_wide = false;
  };
  struct Step;
  struct Part {  // of a decode slot's context
    int t, kv, from, to;
  };

  void reserve(int tokens);
  void resize(Quantised& a, int tokens, int width) const;
  bool is_wide(int tokens) const;
  bool in_halves() const { return !exact_ && k_.halves.take(shape_.dim); }
  const PrefillAttention& prefill_attention() const {
    return in_halves() ? k_.halves.prefill : k_.prefill;
  }
  Activations view(const Quantised& a, int width, bool again = false) const;
  void quantise(Quantised& a, int t, int from, int n, const Matrix& next, bool again = false) const;
  void norm(const float* x, const std::vector<float>& weight, Quantised& a, int t,
            const Matrix& next, bool again) const;
  void plan(Step& step, int members);
  Cache cache_of(const Step& step, size_t index) const;
  void norm_all(const Step& step, const std::vector<float>& weight, const Matrix& next, bool again,
                int member);
  void project(const Step& step, const Layer& layer, int member);
  void finish(const Step& step, const Layer& layer, int member);
  void pick(const Step& wanted, const int32_t* which);
  void gate_and_up(const Layer& layer, const Activations& a, int tokens, int member);
  void multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                bool add);
  void rotate_and_store(const Step& step, const Layer& layer, const Cache& cache, int t, int kv);
  void store(const Step& step, const Layer& layer, const Cache& cache, int from);
  void attend(const Step& step, const Layer& layer, const Cache& cache, int member);
  void attend_slot(const Step& step, const Layer& layer, const Cache& cache, int task);
  Part part(const Step& step, const Layer& layer, int n) const;
  void prefetch_part(const Step& step, const Layer& layer, const Cache& cache, int n) const;
  void attend_part(const Step& step, const Layer& layer, const Cache& cache, int n);
  void merge(const Step& step, const Layer& layer, int t, int kv);
  void head(const int32_t* which, int count, float* out);
  int num_tasks(int tokens) const;
  void lap(Stage stage, int member);
  template <typename F>
  void share_tokens(int from, int to, F&& work);

  const Kernels& k_;
  Shape shape_;
  std::vector<Layer> layers_;
  std::shared_ptr<Matrix> embed_, head_;
  std::vector<float> final_norm_, cos_, sin_;
  bool exact_, any_halves_ = false;
  int threads_, threads_prefill_;
  Team team_;
  int kept_ = 0;
  std::vector<float> x_, qkv_;
  Quantised normed_, attended_, inner_, last_;
  std::vector<Quantised> own_;  // of each member: what it norms for itself in a small step
  std::vector<std::vector<float>> scratch_, both_;
  std::vector<float> partial_;  // of split decode attention: acc, largest, sum
  std::array<double, kStages> spent_{};
  std::chrono::steady_clock::time_point since_;
};

}  // namespace twostroke
