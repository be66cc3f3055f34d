// Matrices as the files have them → `Packed`.
#pragma once

#include <memory>
#include <string>

#include "kernels.h"

namespace twostroke {

// Owns a packed matrix. Rows are put one by one at the places they are to have; different threads
// may put different rows unless two share a group's byte, which they do not.
class Matrix {
 public:
  Matrix(Format format, int rows, int cols, int lanes);

  const Packed& packed() const { return packed_; }
  size_t num_bytes() const { return bytes_; }

  // `count` rows of GGUF blocks of type "Q4_0", "Q4_1" or "Q8_0"; row n goes to place[n].
  void put_blocks(const std::string& type, const uint8_t* data, size_t row_bytes, int count,
                  const int32_t* place);
  // Rows of floats: as they are (F32), cut to bfloat16, or quantised here (Q8, Q4).
  void put_floats(const float* data, int count, const int32_t* place);
  void put_bias(const float* data, int count, const int32_t* place);

 private:
  void set_code(int row, int col, int code);
  void set_scale(int row, int block, float scale, float least);
  void put_float_row(const float* x, int row);

  Packed packed_;
  size_t bytes_;
  std::unique_ptr<uint8_t, void (*)(void*)> data_;
  std::unique_ptr<float[]> bias_;
};

}  // namespace twostroke
