#include "pack.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace twostroke {

namespace {
// Large matrices begin at a large page, where the system has them: a step passes over all weights,
// and finding the small pages one by one would take a good part of its time.
constexpr size_t kAlign = 64, kLargePage = 2 << 20;

uint8_t* allocate(size_t bytes) {
  const size_t align = bytes >= kLargePage / 4 ? kLargePage : kAlign;
  const size_t size = (bytes + align - 1) / align * align;
  void* p = std::aligned_alloc(align, size);
  if (p == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (align == kLargePage) madvise(p, size, MADV_HUGEPAGE);
#endif
  return static_cast<uint8_t*>(p);
}

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

float to_half_and_back(float f) { return half_to_float(float_to_half(f)); }

uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
}  // namespace

Matrix::Matrix(Format format, int rows, int cols, int lanes) : data_(nullptr, std::free) {
  packed_ = {format, rows, cols, lanes, (cols + kBlock - 1) / kBlock, 0, nullptr, nullptr};
  if (has_codes(format)) {
    packed_.group_bytes = packed_.blocks * block_bytes(format, lanes);
  } else {
    packed_.group_bytes = static_cast<size_t>(cols) * lanes * (format == Format::kBF16 ? 2 : 4);
  }
  bytes_ = packed_.groups() * packed_.group_bytes;
  data_.reset(allocate(bytes_));
  std::memset(data_.get(), 0, bytes_);
  packed_.data = data_.get();
}

void Matrix::set_code(int row, int col, int code) {
  const int lanes = packed_.lanes, lane = row % lanes, block = col / kBlock, k = col % kBlock;
  uint8_t* p = data_.get() + row / lanes * packed_.group_bytes +
               block * block_bytes(packed_.format, lanes);
  const int vector = k / 4, byte = 4 * lane + k % 4;
  if (is_q4(packed_.format)) {
    p[vector % 4 * 4 * lanes + byte] |= static_cast<uint8_t>(vector < 4 ? code : code << 4);
  } else {
    p[vector * 4 * lanes + byte] = static_cast<uint8_t>(code);
  }
}

void Matrix::set_scale(int row, int block, float scale, float least) {
  const int lanes = packed_.lanes, lane = row % lanes;
  uint8_t* p = data_.get() + row / lanes * packed_.group_bytes +
               block * block_bytes(packed_.format, lanes) + code_bytes(packed_.format, lanes);
  if (packed_.format == Format::kQ4F) {
    reinterpret_cast<float*>(p)[lane] = scale;
    reinterpret_cast<float*>(p)[lanes + lane] = least;
  } else {
    reinterpret_cast<uint16_t*>(p)[lane] = float_to_half(scale);
    if (is_q4(packed_.format)) reinterpret_cast<uint16_t*>(p)[lanes + lane] = float_to_half(least);
  }
}

void Matrix::put_blocks(const std::string& type, const uint8_t* data, size_t row_bytes, int count,
                        const int32_t* place) {
  const bool q8 = type == "Q8_0", with_min = type == "Q4_1";
  if ((packed_.format == Format::kQ8) != q8 || (!q8 && !with_min && type != "Q4_0"))
    throw std::invalid_argument("blocks of type " + type + " do not fit this matrix");
  const int head = with_min ? 4 : 2, size = head + (q8 ? kBlock : kBlock / 2);
  if (packed_.cols % kBlock != 0 || row_bytes != static_cast<size_t>(packed_.blocks) * size)
    throw std::invalid_argument("rows of " + std::to_string(row_bytes) + " bytes do not hold " +
                                std::to_string(packed_.cols) + " columns of " + type);
  for (int n = 0; n < count; n++, data += row_bytes) {
    const int row = place[n];
    if (row < 0 || row >= packed_.rows) throw std::out_of_range("a row's place is outside");
    for (int b = 0; b < packed_.blocks; b++) {
      const uint8_t* p = data + static_cast<size_t>(b) * size;
      const float scale = half_at(p);
      set_scale(row, b, scale, with_min ? half_at(p + 2) : -8.0f * scale);
      for (int k = 0; k < kBlock; k++) {
        const int code = q8 ? p[head + k] : k < 16 ? p[head + k] & 15 : p[head + k - 16] >> 4;
        set_code(row, b * kBlock + k, code);
      }
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
  const bool q4 = is_q4(packed_.format);
  for (int b = 0; b < packed_.blocks; b++) {
    const int from = b * kBlock, to = from + kBlock < cols ? from + kBlock : cols;
    float least = 0, most = 0;
    for (int k = from; k < to; k++) {
      least = x[k] < least ? x[k] : least;
      most = x[k] > most ? x[k] : most;
    }
    if (!q4) {
      least = most > -least ? -most : least;  // symmetric
      const float scale = to_half_and_back(-least / 127.0f);
      set_scale(row, b, scale, 0);
      for (int k = from; k < to && scale > 0; k++) {
        const float code = std::nearbyint(x[k] / scale);
        set_code(row, k, static_cast<int>(code > 127 ? 127 : code < -127 ? -127 : code));
      }
      continue;
    }
    const float scale = to_half_and_back((most - least) / 15.0f);
    const float minimum = to_half_and_back(least);
    set_scale(row, b, scale, minimum);
    for (int k = from; k < to && scale > 0; k++) {
      const float code = std::nearbyint((x[k] - minimum) / scale);
      set_code(row, k, static_cast<int>(code > 15 ? 15 : code < 0 ? 0 : code));
    }
  }
}

void Matrix::put_floats(const float* data, int count, const int32_t* place) {
  for (int n = 0; n < count; n++) {
    if (place[n] < 0 || place[n] >= packed_.rows)
      throw std::out_of_range("a row's place is outside");
    put_float_row(data + static_cast<size_t>(n) * packed_.cols, place[n]);
  }
}

void Matrix::put_bias(const float* data, int count, const int32_t* place) {
  const int padded = packed_.groups() * packed_.lanes;
  if (bias_ == nullptr) {
    bias_.reset(new float[padded]());
    packed_.bias = bias_.get();
  }
  for (int n = 0; n < count; n++) {
    if (place[n] < 0 || place[n] >= packed_.rows)
      throw std::out_of_range("a row's place is outside");
    bias_[place[n]] = data[n];
  }
}

}  // namespace twostroke
