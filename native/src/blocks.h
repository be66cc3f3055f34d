// GGUF block types. The numpy reference is `twostroke/model/gguf/dequant.py`.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace twostroke {

// 32 columns of a row. value = scale · code + minimum, with one scale and minimum per half.
struct Run {
  int8_t code[kBlock];
  float scale[2], minimum[2];
};

enum class Scales {
  kFp16,        // one (and one minimum) for 32 columns, in fp16
  kFloat,       // one for 32 columns, in single precision
  kFloatOf16,   // one for 16 columns
};

struct BlockType {
  const char* name;
  int cols, bytes;  // of a block
  Scales scales;
  bool minima;
  bool four_bits;  // a code is 0 … 15, or −8 … 7 where there are no minima
  // Columns [32 · n, 32 · (n + 1)) of a block.
  void (*read)(const uint8_t* block, int n, const int8_t* grid, Run& run);
  const int8_t* table = nullptr;  // the values of the codes, if there are at most 16 and they are not consecutive
  // Shape of the grid passed to `read`: [entries, columns]. A code is the number of an entry.
  int grid_entries = 0, grid_columns = 0;
};

const BlockType& find_block_type(const std::string& name);

// Return whether a format represents every value of a block type exactly.
bool holds(Format format, const BlockType& type);

// The smallest format that holds all of the types.
Format common_format(const std::vector<std::string>& types);

}  // namespace twostroke
