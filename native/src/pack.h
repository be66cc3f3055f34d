// Packs matrices of model files to `Packed`.
#pragma once

#include <memory>
#include <string>

#include "blocks.h"

namespace twostroke {

// The owner of a packed matrix. Each row is put at a given place. Several threads may put different rows
// at the same time, because rows share no byte. NaN and infinity throw std::domain_error; a number that
// the fp16 scales of a format cannot hold throws std::overflow_error.
class Matrix {
 public:
  Matrix(Format format, int rows, int cols, int lanes);

  const Packed& packed() const { return packed_; }
  size_t num_bytes() const { return bytes_; }

  // Put `count` rows of GGUF blocks, of a type that the format holds. Row n goes to place[n]. `grid` is
  // the grid of the type, or null. All types put in a matrix with a table must have the same table.
  void put_blocks(const std::string& type, const uint8_t* data, size_t row_bytes, int count,
                  const int32_t* place, const int8_t* grid = nullptr);
  // Put rows of floats: unchanged (F32), rounded to bfloat16 or fp16, or quantised (Q8, Q4).
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
