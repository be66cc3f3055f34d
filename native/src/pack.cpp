#include "pack.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace twostroke {

namespace {
// Matrices are allocated one after another in huge pages, where the system has them: a step reads all
// weights, and TLB misses of small pages would take a considerable part of the time.
constexpr size_t kAlign = 64, kLargePage = 2 << 20, kChunk = 16 * kLargePage;

std::shared_ptr<uint8_t> allocate_pages(size_t bytes) {
  const size_t size = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  void* p = std::aligned_alloc(kLargePage, size);
  if (p == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  madvise(p, size, MADV_HUGEPAGE);
#endif
  return {static_cast<uint8_t*>(p), std::free};
}

// A chunk is freed with its last matrix.
std::shared_ptr<uint8_t> allocate(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<uint8_t> open;  // the chunk with free space
  static size_t used = 0;
  if (bytes > kChunk / 4) return allocate_pages(bytes);
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<uint8_t> chunk = open.lock();
  if (chunk == nullptr || used + bytes > kChunk) {
    chunk = allocate_pages(kChunk);
    open = chunk;
    used = 0;
  }
  uint8_t* here = chunk.get() + used;
  used += (bytes + kAlign - 1) / kAlign * kAlign;
  return {chunk, here};
}

// The table of a matrix before `set_table`.
constexpr int8_t kNoTable[16] = {};

float to_fp16_and_back(float f) { return fp16_to_float(float_to_fp16(f)); }

// Convert the scale of finite weights or a scale of a file to fp16.
uint16_t checked_half(float f) {
  if (!(std::fabs(f) < 65520.0f))
    throw std::overflow_error("a number of " + std::to_string(f) +
                              " is more than fp16 holds");
  return float_to_fp16(f);
}

void refuse_non_finite() { throw std::domain_error("NaN or infinity"); }

// Throw if a float is NaN or infinite: these have the largest exponent. The loop has no branch and takes
// almost no time.
void check_finite(const float* x, int count) {
  uint32_t largest = 0;
  for (int k = 0; k < count; k++) {
    uint32_t bits;
    std::memcpy(&bits, x + k, 4);
    bits &= 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7F800000u) refuse_non_finite();
}

uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
}  // namespace

Matrix::Matrix(Format format, int rows, int cols, int lanes) {
  packed_ = {format, rows, cols, lanes, (cols + kBlock - 1) / kBlock, 0, nullptr, nullptr, kNoTable};
  if (has_codes(format)) {
    packed_.group_bytes = packed_.blocks * block_bytes(format, lanes);
  } else {
    // fp16 products multiply whole blocks.
    const size_t columns = format == Format::kF16 ? packed_.blocks * kBlock : cols;
    packed_.group_bytes = columns * lanes * (format == Format::kF32 ? 4 : 2);
  }
  bytes_ = packed_.groups() * packed_.group_bytes;
  data_ = allocate(bytes_);
  std::memset(data_.get(), 0, bytes_);
  packed_.data = data_.get();
}

void Matrix::put_run(int row, int block, const Run& run) {
  const Format format = packed_.format;
  const int lanes = packed_.lanes, lane = row % lanes;
  uint8_t* p = data_.get() + row / lanes * packed_.group_bytes + block * block_bytes(format, lanes);
  uint32_t four[8];  // the codes of each vector
  std::memcpy(four, run.code, kBlock);
  const bool q4 = is_q4(format);
  for (int j = 0; j < (q4 ? 4 : 8); j++) {
    const uint32_t word = q4 ? four[j] | four[j + 4] << 4 : four[j];
    std::memcpy(p + 4 * (j * lanes + lane), &word, 4);
  }
  p += code_bytes(format, lanes);
  const int parts = has_half_block_scales(format) ? 2 : 1;
  auto put = [&](int n, float number) {
    if (!std::isfinite(number)) refuse_non_finite();
    if (has_float_scales(format)) {
      reinterpret_cast<float*>(p)[n * lanes + lane] = number;
    } else {
      reinterpret_cast<uint16_t*>(p)[n * lanes + lane] = checked_half(number);
    }
  };
  for (int n = 0; n < parts; n++) {
    put(n, run.scale[n]);
    if (has_minima(format)) put(parts + n, run.minimum[n]);
  }
}

// Set the table of the matrix, or throw if it has another table. The first rows determine the table.
void Matrix::set_table(const BlockType& type) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (packed_.table != kNoTable && packed_.table != type.table)
    throw std::invalid_argument("blocks of type " + std::string(type.name) +
                                " do not fit this matrix, which has the table of another type");
  packed_.table = type.table;
}

void Matrix::put_blocks(const std::string& name, const uint8_t* data, size_t row_bytes, int count,
                        const int32_t* place, const int8_t* grid) {
  const BlockType& type = find_block_type(name);
  if (!holds(packed_.format, type))
    throw std::invalid_argument("blocks of type " + name + " do not fit this matrix");
  if (packed_.cols % type.cols != 0 ||
      row_bytes != static_cast<size_t>(packed_.cols / type.cols) * type.bytes)
    throw std::invalid_argument("rows of " + std::to_string(row_bytes) + " bytes do not hold " +
                                std::to_string(packed_.cols) + " columns of " + name);
  const int runs = type.cols / kBlock;
  uint8_t index_of[256];  // place of a code in the table
  if (has_table(packed_.format)) {
    set_table(type);
    for (int n = 15; n >= 0; n--)
      index_of[static_cast<uint8_t>(type.table[n])] = static_cast<uint8_t>(n);
  }
  const bool from_zero = has_minima(packed_.format) && is_q4(packed_.format) && !type.minima;  // −8 … 7 → 0 … 15
  Run run;
  for (int n = 0; n < count; n++, data += row_bytes) {
    if (place[n] < 0 || place[n] >= packed_.rows)
      throw std::out_of_range("a row's place is outside");
    for (int b = 0; b < packed_.blocks; b++) {
      type.read(data + static_cast<size_t>(b / runs) * type.bytes, b % runs, grid, run);
      if (has_table(packed_.format))
        for (int8_t& code : run.code) code = static_cast<int8_t>(index_of[static_cast<uint8_t>(code)]);
      if (from_zero) {
        for (int8_t& code : run.code) code = static_cast<int8_t>(code + 8);
        run.minimum[0] = -8.0f * run.scale[0];
      }
      put_run(place[n], b, run);
    }
  }
}

void Matrix::put_float_row(const float* x, int row) {
  const int lanes = packed_.lanes, cols = packed_.cols;
  uint8_t* group = data_.get() + row / lanes * packed_.group_bytes;
  if (packed_.format == Format::kF32) {
    for (int k = 0; k < cols; k++) reinterpret_cast<float*>(group)[k * lanes + row % lanes] = x[k];
    return;
  }
  if (packed_.format == Format::kBF16) {
    auto* to = reinterpret_cast<uint16_t*>(group);
    for (int k = 0; k < cols; k++) to[k * lanes + row % lanes] = to_bf16(x[k]);
    return;
  }
  if (packed_.format == Format::kF16) {
    auto* to = reinterpret_cast<uint16_t*>(group);
    for (int k = 0; k < cols; k++) to[k * lanes + row % lanes] = checked_half(x[k] / kF16Unit);
    return;
  }
  const bool q4 = is_q4(packed_.format);
  const float first = q4 ? 0 : -127, last = q4 ? 15 : 127;
  for (int b = 0; b < packed_.blocks; b++) {
    const int from = b * kBlock, to = from + kBlock < cols ? from + kBlock : cols;
    float minimum = 0, maximum = 0;
    for (int k = from; k < to; k++) {
      minimum = x[k] < minimum ? x[k] : minimum;
      maximum = x[k] > maximum ? x[k] : maximum;
    }
    Run run = {};
    const float largest = maximum > -minimum ? maximum : -minimum;
    const float scale = to_fp16_and_back(q4 ? (maximum - minimum) / 15.0f : largest / 127.0f);
    const float rounded_minimum = q4 ? to_fp16_and_back(minimum) : 0;
    run.scale[0] = scale;
    run.minimum[0] = rounded_minimum;
    for (int k = from; k < to && scale > 0; k++) {
      const float code = std::nearbyint((x[k] - rounded_minimum) / scale);
      run.code[k - from] = static_cast<int8_t>(code > last ? last : code < first ? first : code);
    }
    put_run(row, b, run);
  }
}

void Matrix::put_floats(const float* data, int count, const int32_t* place) {
  const Format format = packed_.format;
  if (has_codes(format) && format != Format::kQ4 && format != Format::kQ4F && format != Format::kQ8)
    throw std::invalid_argument("floats are not rounded to this format");
  for (int n = 0; n < count; n++) {
    if (place[n] < 0 || place[n] >= packed_.rows)
      throw std::out_of_range("a row's place is outside");
    const float* row = data + static_cast<size_t>(n) * packed_.cols;
    check_finite(row, packed_.cols);
    put_float_row(row, place[n]);
  }
}

void Matrix::put_bias(const float* data, int count, const int32_t* place) {
  const int padded = packed_.groups() * packed_.lanes;
  if (bias_ == nullptr) {
    bias_.reset(new float[padded]());
    packed_.bias = bias_.get();
  }
  check_finite(data, count);
  for (int n = 0; n < count; n++) {
    if (place[n] < 0 || place[n] >= packed_.rows)
      throw std::out_of_range("a row's place is outside");
    bias_[place[n]] = data[n];
  }
}

}  // namespace twostroke
