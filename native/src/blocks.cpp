#include "blocks.h"

#include <cstring>
#include <stdexcept>

namespace twostroke {

namespace {

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return fp16_to_float(h);
}

void set_scales(Run& run, float scale, float least = 0) {
  run.scale[0] = run.scale[1] = scale;
  run.least[0] = run.least[1] = least;
}

// ── blocks of 32 ────────────────────────────────────────────────────────────────────────────────

// 16 bytes: the low nibbles are the first half, the high ones the second.
void read_nibbles(const uint8_t* p, int centre, Run& run) {
  for (int k = 0; k < kHalfBlock; k++) {
    run.code[k] = static_cast<int8_t>((p[k] & 15) - centre);
    run.code[k + kHalfBlock] = static_cast<int8_t>((p[k] >> 4) - centre);
  }
}

void add_fifth_bits(const uint8_t* p, Run& run) {
  for (int n = 0; n < 4; n++)
    for (int k = 0; k < 8; k++)
      run.code[8 * n + k] = static_cast<int8_t>(run.code[8 * n + k] + (p[n] >> k & 1) * 16);
}

void read_q4_0(const uint8_t* p, int, Run& run) {
  read_nibbles(p + 2, 8, run);
  set_scales(run, half_at(p));
}

void read_q4_1(const uint8_t* p, int, Run& run) {
  read_nibbles(p + 4, 0, run);
  set_scales(run, half_at(p), half_at(p + 2));
}

void read_q5_0(const uint8_t* p, int, Run& run) {
  read_nibbles(p + 6, 16, run);
  add_fifth_bits(p + 2, run);
  set_scales(run, half_at(p));
}

void read_q5_1(const uint8_t* p, int, Run& run) {
  read_nibbles(p + 8, 0, run);
  add_fifth_bits(p + 4, run);
  set_scales(run, half_at(p), half_at(p + 2));
}

void read_q8_0(const uint8_t* p, int, Run& run) {
  std::memcpy(run.code, p + 2, kBlock);
  set_scales(run, half_at(p));
}

// ── blocks of 256 ───────────────────────────────────────────────────────────────────────────────

// The products below are exact: 11 bits of fp16 by at most 8 of a whole number.

// 8 scales and 8 minima of 6 bits, in 12 bytes.
void read_six_bit_scales(const uint8_t* block, int n, Run& run) {
  const uint8_t* p = block + 4;
  const int scale = n < 4 ? p[n] & 63 : (p[n + 4] & 15) | p[n - 4] >> 6 << 4;
  const int least = n < 4 ? p[n + 4] & 63 : p[n + 4] >> 4 | p[n] >> 6 << 4;
  set_scales(run, half_at(block) * scale, -(half_at(block + 2) * least));
}

// Each 32 bytes hold one run low and the next high.
void read_k_nibbles(const uint8_t* p, int n, Run& run) {
  const int shift = n % 2 * 4;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(p[n / 2 * kBlock + k] >> shift & 15);
}

void read_q4_k(const uint8_t* p, int n, Run& run) {
  read_k_nibbles(p + 16, n, run);
  read_six_bit_scales(p, n, run);
}

void read_q5_k(const uint8_t* p, int n, Run& run) {
  read_k_nibbles(p + 48, n, run);
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(run.code[k] | (p[16 + k] >> n & 1) << 4);
  read_six_bit_scales(p, n, run);
}

void read_q6_k(const uint8_t* p, int n, Run& run) {
  const uint8_t* low = p + n / 4 * 64 + n % 2 * kBlock;
  const uint8_t* high = p + 128 + n / 4 * kBlock;
  const int nibble = n % 4 / 2 * 4, pair = n % 4 * 2;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(((low[k] >> nibble & 15) | (high[k] >> pair & 3) << 4) - 32);
  set_scales(run, 0);
  for (int h = 0; h < 2; h++)
    run.scale[h] = half_at(p + 208) * static_cast<int8_t>(p[192 + 2 * n + h]);
}

// Bit pair n % 4 of 32 bytes, which serve four runs.
void read_pairs(const uint8_t* p, int n, Run& run) {
  const int shift = n % 4 * 2;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(p[n / 4 * kBlock + k] >> shift & 3);
}

void read_q2_k(const uint8_t* p, int n, Run& run) {
  read_pairs(p + 16, n, run);
  for (int h = 0; h < 2; h++) {
    const int both = p[2 * n + h];
    run.scale[h] = half_at(p + 80) * (both & 15);
    run.least[h] = -(half_at(p + 82) * (both >> 4));
  }
}

void read_q3_k(const uint8_t* p, int n, Run& run) {
  read_pairs(p + 32, n, run);
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(run.code[k] - 4 + (p[k] >> n & 1) * 4);
  set_scales(run, 0);
  for (int h = 0; h < 2; h++) {
    const int at = 2 * n + h;
    const int low = p[96 + at % 8] >> at / 8 * 4 & 15, high = p[104 + at % 4] >> at / 4 * 2 & 3;
    run.scale[h] = half_at(p + 108) * ((low | high << 4) - 32);
  }
}

const BlockType kTypes[] = {
    // name, columns, bytes, scales, minima, four bits
    {"Q4_0", 32, 18, Scales::kFp16, false, true, read_q4_0},
    {"Q4_1", 32, 20, Scales::kFp16, true, true, read_q4_1},
    {"Q5_0", 32, 22, Scales::kFp16, false, false, read_q5_0},
    {"Q5_1", 32, 24, Scales::kFp16, true, false, read_q5_1},
    {"Q8_0", 32, 34, Scales::kFp16, false, false, read_q8_0},
    {"Q2_K", 256, 84, Scales::kFloatOf16, true, false, read_q2_k},
    {"Q3_K", 256, 110, Scales::kFloatOf16, false, false, read_q3_k},
    {"Q4_K", 256, 144, Scales::kFloat, true, true, read_q4_k},
    {"Q5_K", 256, 176, Scales::kFloat, true, false, read_q5_k},
    {"Q6_K", 256, 210, Scales::kFloatOf16, false, false, read_q6_k},
};

}  // namespace

const BlockType& find_block_type(const std::string& name) {
  for (const BlockType& type : kTypes)
    if (name == type.name) return type;
  throw std::invalid_argument("no block type is called '" + name + "'");
}

bool holds(Format format, const BlockType& type) {
  switch (format) {
    case Format::kQ4: return type.four_bits && type.scales == Scales::kFp16;
    case Format::kQ4F: return type.four_bits;
    case Format::kQ8: return type.scales == Scales::kFp16 && !type.minima;
    case Format::kQ8F: return type.scales != Scales::kFloatOf16;
    case Format::kQ8S: return !type.minima;
    case Format::kQ8M: return true;
    default: return false;
  }
}

Format common_format(const std::vector<std::string>& types) {
  for (Format format : {Format::kQ4, Format::kQ4F, Format::kQ8, Format::kQ8F, Format::kQ8S}) {
    bool all = true;
    for (const std::string& name : types) all = all && holds(format, find_block_type(name));
    if (all) return format;
  }
  return Format::kQ8M;
}

}  // namespace twostroke
