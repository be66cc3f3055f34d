#include "blocks.h"

#include <cstring>
#include <stdexcept>

namespace twostroke {

namespace {

float fp16_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return fp16_to_float(h);
}

void set_scales(Run& run, float scale, float minimum = 0) {
  run.scale[0] = run.scale[1] = scale;
  run.minimum[0] = run.minimum[1] = minimum;
}

// ── blocks of 32 ────────────────────────────────────────────────────────────────────────────────

// 16 bytes: the low nibbles are the first 16 codes, the high nibbles the last 16.
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

void read_q4_0(const uint8_t* p, int, const int8_t*, Run& run) {
  read_nibbles(p + 2, 8, run);
  set_scales(run, fp16_at(p));
}

void read_q4_1(const uint8_t* p, int, const int8_t*, Run& run) {
  read_nibbles(p + 4, 0, run);
  set_scales(run, fp16_at(p), fp16_at(p + 2));
}

void read_q5_0(const uint8_t* p, int, const int8_t*, Run& run) {
  read_nibbles(p + 6, 16, run);
  add_fifth_bits(p + 2, run);
  set_scales(run, fp16_at(p));
}

void read_q5_1(const uint8_t* p, int, const int8_t*, Run& run) {
  read_nibbles(p + 8, 0, run);
  add_fifth_bits(p + 4, run);
  set_scales(run, fp16_at(p), fp16_at(p + 2));
}

void read_q8_0(const uint8_t* p, int, const int8_t*, Run& run) {
  std::memcpy(run.code, p + 2, kBlock);
  set_scales(run, fp16_at(p));
}

// ── blocks of 256 ───────────────────────────────────────────────────────────────────────────────

// The products below are exact: 11 bits of fp16 times at most 8 bits of an integer.

// Read 8 scales and 8 minima of 6 bits from 12 bytes.
void read_six_bit_scales(const uint8_t* block, int n, Run& run) {
  const uint8_t* p = block + 4;
  const int scale = n < 4 ? p[n] & 63 : (p[n + 4] & 15) | p[n - 4] >> 6 << 4;
  const int minimum = n < 4 ? p[n + 4] & 63 : p[n + 4] >> 4 | p[n] >> 6 << 4;
  set_scales(run, fp16_at(block) * scale, -(fp16_at(block + 2) * minimum));
}

// Each 32 bytes hold one run in the low nibbles and the next run in the high nibbles.
void read_k_nibbles(const uint8_t* p, int n, Run& run) {
  const int shift = n % 2 * 4;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(p[n / 2 * kBlock + k] >> shift & 15);
}

void read_q4_k(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_k_nibbles(p + 16, n, run);
  read_six_bit_scales(p, n, run);
}

void read_q5_k(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_k_nibbles(p + 48, n, run);
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(run.code[k] | (p[16 + k] >> n & 1) << 4);
  read_six_bit_scales(p, n, run);
}

void read_q6_k(const uint8_t* p, int n, const int8_t*, Run& run) {
  const uint8_t* low = p + n / 4 * 64 + n % 2 * kBlock;
  const uint8_t* high = p + 128 + n / 4 * kBlock;
  const int nibble = n % 4 / 2 * 4, pair = n % 4 * 2;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(((low[k] >> nibble & 15) | (high[k] >> pair & 3) << 4) - 32);
  set_scales(run, 0);
  for (int h = 0; h < 2; h++)
    run.scale[h] = fp16_at(p + 208) * static_cast<int8_t>(p[192 + 2 * n + h]);
}

// Bit pair n % 4 of 32 bytes, which four runs share.
void read_pairs(const uint8_t* p, int n, Run& run) {
  const int shift = n % 4 * 2;
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(p[n / 4 * kBlock + k] >> shift & 3);
}

void read_q2_k(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_pairs(p + 16, n, run);
  for (int h = 0; h < 2; h++) {
    const int both = p[2 * n + h];
    run.scale[h] = fp16_at(p + 80) * (both & 15);
    run.minimum[h] = -(fp16_at(p + 82) * (both >> 4));
  }
}

void read_q3_k(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_pairs(p + 32, n, run);
  for (int k = 0; k < kBlock; k++)
    run.code[k] = static_cast<int8_t>(run.code[k] - 4 + (p[k] >> n & 1) * 4);
  set_scales(run, 0);
  for (int h = 0; h < 2; h++) {
    const int at = 2 * n + h;
    const int low = p[96 + at % 8] >> at / 8 * 4 & 15, high = p[104 + at % 4] >> at / 4 * 2 & 3;
    run.scale[h] = fp16_at(p + 108) * ((low | high << 4) - 32);
  }
}

// ── codes from a table of 16 ────────────────────────────────────────────────────────────────────

constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kE2m1Table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

void read_table_nibbles(const uint8_t* p, const int8_t* table, Run& run) {
  for (int k = 0; k < kHalfBlock; k++) {
    run.code[k] = table[p[k] & 15];
    run.code[k + kHalfBlock] = table[p[k] >> 4];
  }
}

void read_iq4_nl(const uint8_t* p, int, const int8_t*, Run& run) {
  read_table_nibbles(p + 2, kIq4Table, run);
  set_scales(run, fp16_at(p));
}

// Eight scales of 6 bits, offset by 32: low nibbles in four bytes, upper bit pairs in two bytes.
void read_iq4_xs(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_table_nibbles(p + 8 + kHalfBlock * n, kIq4Table, run);
  const int low = p[4 + n / 2] >> n % 2 * 4 & 15, high = p[2 + n / 4] >> n % 4 * 2 & 3;
  set_scales(run, fp16_at(p) * ((low | high << 4) - 32));
}

// The scale is a power of two, halved because the codes are doubled: 2^(e − 128), subnormal below
// 2^-126. From 2^125 on the largest value would be infinite, so the scale is infinite, too.
void read_mxfp4(const uint8_t* p, int, const int8_t*, Run& run) {
  read_table_nibbles(p + 1, kE2m1Table, run);
  const uint32_t bits = p[0] < 2 ? 0x200000u << p[0] : p[0] < 253 ? (p[0] - 1u) << 23 : 0x7F800000u;
  float scale;
  std::memcpy(&scale, &bits, 4);
  set_scales(run, scale);
}

// ── codes of −1, 0 and 1 ────────────────────────────────────────────────────────────────────────

constexpr int8_t kTernaryTable[16] = {-1, 0, 1, 2};  // (2 is a possible bit pair that no file contains)

void read_tq2_0(const uint8_t* p, int n, const int8_t*, Run& run) {
  read_pairs(p, n, run);
  for (int8_t& code : run.code) code = static_cast<int8_t>(code - 1);
  set_scales(run, fp16_at(p + 64));
}

// A byte holds five codes (each of the last four bytes: four) as a fraction of 256 in base 3. 32 bytes
// hold the first five runs, 16 bytes the next 80 values, 4 bytes the last 16.
void read_tq1_0(const uint8_t* p, int n, const int8_t*, Run& run) {
  static constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
  for (int k = 0; k < kBlock; k++) {
    const int at = n * kBlock + k;
    const int width = at < 160 ? 32 : at < 240 ? 16 : 4, first = at < 160 ? 0 : at < 240 ? 160 : 240;
    const uint8_t byte = p[(at < 160 ? 0 : at < 240 ? 32 : 48) + (at - first) % width];
    const auto moved = static_cast<uint8_t>(byte * kPowers[(at - first) / width]);
    run.code[k] = static_cast<int8_t>((moved * 3 >> 8) - 1);
  }
  set_scales(run, fp16_at(p + 52));
}

// ── codes from a grid: each group of 8 or 4 columns is an entry of the grid ─────────────────────

constexpr int8_t kIq2Table[16] = {8, 25, 43, -8, -25, -43};
constexpr int8_t kIq3xxsTable[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                     -4, -12, -20, -28, -36, -44, -52, -62};
constexpr int8_t kIq3sTable[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr int8_t kIq1Table[16] = {-9, -7, -1, 1, 7, 9};

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

uint16_t uint16_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// Group `j` of 8 columns. Bit k of `signs` makes column k negative.
void put_signed(const int8_t* eight, int signs, int j, Run& run) {
  for (int k = 0; k < 8; k++)
    run.code[8 * j + k] = static_cast<int8_t>(signs >> k & 1 ? -eight[k] : eight[k]);
}

// Seven signs are stored; the eighth makes the number of negative columns even.
int eight_signs(uint32_t seven) {
  seven &= 127;
  return static_cast<int>(seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7);
}

// One nibble per half block.
void set_iq2_scales(float scale, int nibbles, Run& run) {
  set_scales(run, 0);
  for (int h = 0; h < 2; h++)
    run.scale[h] = scale * (0.5f + static_cast<float>(nibbles >> 4 * h & 15)) * 0.25f;
}

void read_iq2_xxs(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  const uint8_t* at = p + 2 + 8 * n;
  const uint32_t word = word_at(at + 4);
  for (int j = 0; j < 4; j++) put_signed(grid + 8 * at[j], eight_signs(word >> 7 * j), j, run);
  const int nibble = static_cast<int>(word >> 28);
  set_iq2_scales(fp16_at(p), nibble | nibble << 4, run);
}

void read_iq2_xs(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  for (int j = 0; j < 4; j++) {
    const int word = uint16_at(p + 2 + 8 * n + 2 * j);
    put_signed(grid + 8 * (word & 511), eight_signs(word >> 9), j, run);
  }
  set_iq2_scales(fp16_at(p), p[66 + n], run);
}

void read_iq2_s(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  for (int j = 0; j < 4; j++) {
    const int entry = p[2 + 4 * n + j] | (p[66 + n] >> 2 * j & 3) << 8;
    put_signed(grid + 8 * entry, p[34 + 4 * n + j], j, run);
  }
  set_iq2_scales(fp16_at(p), p[74 + n], run);
}

// Set two grid entries of 4 columns.
void put_signed_pair(const int8_t* first, const int8_t* second, int signs, int j, Run& run) {
  int8_t eight[8];
  std::memcpy(eight, first, 4);
  std::memcpy(eight + 4, second, 4);
  put_signed(eight, signs, j, run);
}

void read_iq3_xxs(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  const uint8_t* at = p + 2 + 8 * n;
  const uint32_t word = word_at(p + 66 + 4 * n);
  for (int j = 0; j < 4; j++)
    put_signed_pair(grid + 4 * at[2 * j], grid + 4 * at[2 * j + 1], eight_signs(word >> 7 * j), j, run);
  set_scales(run, fp16_at(p) * (0.5f + static_cast<float>(word >> 28)) * 0.5f);
}

void read_iq3_s(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  auto entry = [&](int j) { return grid + 4 * (p[2 + 8 * n + j] | (p[66 + n] >> j & 1) << 8); };
  for (int j = 0; j < 4; j++)
    put_signed_pair(entry(2 * j), entry(2 * j + 1), p[74 + 4 * n + j], j, run);
  const int nibble = p[106 + n / 2] >> n % 2 * 4 & 15;
  set_scales(run, fp16_at(p) * static_cast<float>(1 + 2 * nibble));
}

// The values −1, 0 and 1 of the grid are shifted up or down by an eighth: integers in eighths of the
// scale.
void put_moved(const int8_t* eight, bool down, int j, Run& run) {
  for (int k = 0; k < 8; k++) run.code[8 * j + k] = static_cast<int8_t>(8 * eight[k] + (down ? -1 : 1));
}

void read_iq1_s(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  const int word = uint16_at(p + 34 + 2 * n);
  for (int j = 0; j < 4; j++)
    put_moved(grid + 8 * (p[2 + 4 * n + j] | (word >> 3 * j & 7) << 8), word >> 15 != 0, j, run);
  set_scales(run, fp16_at(p) * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125f);
}

// The upper nibbles of four 16-bit words form the scale in fp16; the lower bits are four scales of
// 3 bits.
void read_iq1_m(const uint8_t* p, int n, const int8_t* grid, Run& run) {
  for (int j = 0; j < 4; j++) {
    const int nibble = p[32 + 2 * n + j / 2] >> j % 2 * 4;
    put_moved(grid + 8 * (p[4 * n + j] | (nibble & 7) << 8), (nibble & 8) != 0, j, run);
  }
  uint16_t bits = 0;
  for (int k = 0; k < 4; k++) bits = static_cast<uint16_t>(bits | uint16_at(p + 48 + 2 * k) >> 12 << 4 * k);
  set_scales(run, 0);
  for (int h = 0; h < 2; h++) {
    const int three = uint16_at(p + 48 + n / 2 * 2) >> 3 * (n % 2 * 2 + h) & 7;
    run.scale[h] = fp16_to_float(bits) * static_cast<float>(2 * three + 1) * 0.125f;
  }
}

const BlockType kTypes[] = {
    // name, columns, bytes, scales, minima, four bits, reader, table, grid's entries and columns
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
    {"IQ4_NL", 32, 18, Scales::kFp16, false, false, read_iq4_nl, kIq4Table},
    {"IQ4_XS", 256, 136, Scales::kFloat, false, false, read_iq4_xs, kIq4Table},
    {"MXFP4", 32, 17, Scales::kFloat, false, false, read_mxfp4, kE2m1Table},
    {"TQ1_0", 256, 54, Scales::kFp16, false, false, read_tq1_0, kTernaryTable},
    {"TQ2_0", 256, 66, Scales::kFp16, false, false, read_tq2_0, kTernaryTable},
    {"IQ2_XXS", 256, 66, Scales::kFloat, false, false, read_iq2_xxs, kIq2Table, 256, 8},
    {"IQ2_XS", 256, 74, Scales::kFloatOf16, false, false, read_iq2_xs, kIq2Table, 512, 8},
    {"IQ2_S", 256, 82, Scales::kFloatOf16, false, false, read_iq2_s, kIq2Table, 1024, 8},
    {"IQ3_XXS", 256, 98, Scales::kFloat, false, false, read_iq3_xxs, kIq3xxsTable, 256, 4},
    {"IQ3_S", 256, 110, Scales::kFloat, false, false, read_iq3_s, kIq3sTable, 512, 4},
    {"IQ1_S", 256, 50, Scales::kFloat, false, false, read_iq1_s, kIq1Table, 2048, 8},
    {"IQ1_M", 256, 56, Scales::kFloatOf16, false, false, read_iq1_m, kIq1Table, 2048, 8},
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
    case Format::kQ4T: return type.table != nullptr && type.scales != Scales::kFloatOf16;
    case Format::kQ4F: return type.four_bits;
    case Format::kQ4TS: return type.table != nullptr;
    case Format::kQ8: return type.scales == Scales::kFp16 && !type.minima;
    case Format::kQ8F: return type.scales != Scales::kFloatOf16;
    case Format::kQ8S: return !type.minima;
    case Format::kQ8M: return true;
    default: return false;
  }
}

Format common_format(const std::vector<std::string>& types) {
  for (Format format : {Format::kQ4, Format::kQ4T, Format::kQ4F, Format::kQ4TS, Format::kQ8,
                        Format::kQ8F, Format::kQ8S}) {
    bool all = true;
    for (const std::string& name : types) {
      const BlockType& type = find_block_type(name);
      const bool same_table = type.table == find_block_type(types[0]).table;
      all = all && holds(format, type) && (same_table || !has_table(format));
    }
    if (all) return format;
  }
  return Format::kQ8M;
}

}  // namespace twostroke
