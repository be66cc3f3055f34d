// Matrices as the files have them → `Packed`.
#pragma once

#include <memory>
#include <string>

#include "blocks.h"

namespace twostroke {

// Owns a packed matrix. Rows are put one by one at the places they are to have; different threads
// may put different rows unless two share a group's byte, which they do not. What is NaN or infinite
// is refused (std::domain_error), as is what a format's fp16 scales cannot hold (std::overflow_error).
class Matrix {
 public:
  Matrix(Format format, int rows, int cols, int lanes);

  const Packed& packed() const { return packed_; }
  size_t num_bytes() const { return bytes_; }

  // `count` rows of GGUF blocks, of a type that the format holds; row n goes to place[n]. `grid` is
  // the type's, if it has one. All types of a matrix with a table have the same.
  void put_blocks(const std::string& type, const uint8_t* data, size_t row_bytes, int count,
                  const int32_t* place, const int8_t* grid = nullptr);
  // Rows of floats: as they are (F32), rounded to bfloat16 or fp16, or quantised here (Q8, Q4).
  void put_floats(const float* data, int count, const int32_t* place);
  void put_bias(const float* data, int count, const int32_t* place);

 private:
  void put_run(int row, int block, const Run& run);
  void set_table(const BlockType& type);
  void put_float_row(const float* x, int row);

  Packed packed_;
  size_t bytes_;
  std::shared_ptr<uint8_t> data_;
  std::unique_ptr<float[]> bias_;
};

}  // namespace twostroke
