#include "isa.h"

#include <stdexcept>

#if defined(TS_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(TS_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twostroke {

namespace {

#if defined(TS_HAVE_NEON)
bool has_dot_products_and_halves() {
#if defined(__linux__)
  constexpr unsigned long kAsimdHp = 1ul << 10, kAsimdDp = 1ul << 20;  // HWCAP_…
  const unsigned long both = kAsimdHp | kAsimdDp;
  return (getauxval(AT_HWCAP) & both) == both;
#else
  return true;  // every 64-bit Arm machine of Apple's since the M1
#endif
}
#endif

#if defined(TS_HAVE_AMX)
// Whether the machine has tiles of bfloat16, and the system lets this process use them. Threads
// that start later may, too.
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
  __builtin_cpu_init();
  // The compiler's check asks the system, too, whether it keeps the wide registers.
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
#if defined(TS_HAVE_AMX)
  if (avx512 && has_tiles()) found.push_back(&kAmx);
#endif
  if (avx512) found.push_back(&kAvx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    found.push_back(&kAvx2);
#endif
#if defined(TS_HAVE_NEON)
  if (has_dot_products_and_halves()) found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
  return found;
}

// The best first.
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
