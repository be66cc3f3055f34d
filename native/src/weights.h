// The weights of a model under their canonical names, and the model assembled from them.
#pragma once

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "model.h"
#include "pack.h"

namespace twostroke {

// Throws std::invalid_argument unless `condition` holds.
inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}
inline void require(bool condition, const std::string& message) { require(condition, message.c_str()); }

// Matrices that are multiplied together are one weight: `qkv`, `gate_up`. Matrices that attention
// expands latents by are `kv_b.keys`, `kv_b.values` and `kv_b.keys_transposed`.
class Weights {
 public:
  explicit Weights(const Kernels& kernels) : kernels_(kernels) {}

  void add(const std::string& name, std::shared_ptr<Matrix> matrix) { matrices_[name] = std::move(matrix); }
  void add(const std::string& name, std::vector<float> values) { vectors_[name] = std::move(values); }

  bool has(const std::string& name) const { return matrices_.count(name) + vectors_.count(name) > 0; }

  // Take a weight out. Throws unless the weight exists and has this shape.
  std::shared_ptr<Matrix> matrix(const std::string& name, int rows, int cols, bool bias = false);
  std::vector<float> vector(const std::string& name, size_t size);

  // Throws if a weight is left: the specification does not ask for that weight.
  void require_all_taken() const;

 private:
  const Kernels& kernels_;
  std::map<std::string, std::shared_ptr<Matrix>> matrices_;
  std::map<std::string, std::vector<float>> vectors_;
};

// Throws std::invalid_argument if the specification is inconsistent or a weight has another shape.
ModelData assemble(ModelSpec spec, Weights weights, std::vector<Rope> ropes);

}  // namespace twostroke
