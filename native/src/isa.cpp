#include "isa.h"

#include <stdexcept>

#if defined(TS_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(TS_HAVE_X86)
#include <cpuid.h>
#endif
#if defined(TS_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twostroke {

namespace {

#if defined(TS_HAVE_NEON)
bool has_dot_products_and_fp16() {
#if defined(__linux__)
  constexpr unsigned long kAsimdHp = 1ul << 10, kAsimdDp = 1ul << 20;  // HWCAP_…
  const unsigned long both = kAsimdHp | kAsimdDp;
  return (getauxval(AT_HWCAP) & both) == both;
#else
  return true;  // every Apple CPU since the M1 has both
#endif
}
#endif

#if defined(TS_HAVE_X86)
struct X86 {
  bool avx2 = false, avx512bw = false, avx512 = false;
};

// The extensions that the CPU has and whose registers the operating system saves. Does not use
// __builtin_cpu_supports, because the runtime library of zig has no table for it.
X86 ask_x86() {
  unsigned a, b, c, d;
  constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr unsigned kFirst = kFma | kOsXsave | kAvx | kF16c;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kFirst) != kFirst) return {};
  unsigned kept, high;
  __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  constexpr unsigned kYmm = 0x6, kZmm = 0xE6;  // bits of XCR0
  if ((kept & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  constexpr unsigned kAvx2Bit = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kAvx512Bits = kF | kDq | kBw | kVl, kVnni = 1u << 11;
  const bool avx2 = (b & kAvx2Bit) != 0;
  const bool avx512bw = avx2 && (kept & kZmm) == kZmm && (b & kAvx512Bits) == kAvx512Bits;
  return {avx2, avx512bw, avx512bw && (c & kVnni) != 0};
}
#endif

#if defined(TS_HAVE_AMX)
// Return whether the CPU has bfloat16 tiles and the system permits this process to use them. Threads
// that start later inherit the permission.
bool has_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kAvx512Bf16 = 1u << 5;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kAvx512Bf16) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const Kernels*> find_available() {
  std::vector<const Kernels*> found;
#if defined(TS_HAVE_X86)
  const X86 machine = ask_x86();
#if defined(TS_HAVE_AMX)
  if (machine.avx512 && has_tiles()) found.push_back(&kAmx);
#endif
  if (machine.avx512) found.push_back(&kAvx512);
  if (machine.avx512bw) found.push_back(&kAvx512bw);
  if (machine.avx2) found.push_back(&kAvx2);
#endif
#if defined(TS_HAVE_NEON)
  if (has_dot_products_and_fp16()) found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
  return found;
}

// Fastest first.
const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

const Kernels& find_kernels(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : available()) {
    if (name == "auto" || name == kernels->name) return *kernels;
    known += known.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("this machine has no kernels for '" + name + "'; it has " + known);
}

}  // namespace twostroke
