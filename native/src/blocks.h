// GGUF block types: `twostroke/model/gguf/dequant.py` says the same in numpy.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace twostroke {

// 32 columns of a row. value = scale · code + least, each half with its own.
struct Run {
  int8_t code[kBlock];
  float scale[2], least[2];
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
  const int8_t* table = nullptr;  // all codes there are, if they are at most 16 but not in a row
  // What `read` is to be given: [entries, columns] numbers; a code is the number of an entry.
  int grid_entries = 0, grid_columns = 0;
};

const BlockType& find_block_type(const std::string& name);

// Whether a format has every value of a block type exactly.
bool holds(Format format, const BlockType& type);

// The smallest format that holds all of these types.
Format common_format(const std::vector<std::string>& types);

}  // namespace twostroke
