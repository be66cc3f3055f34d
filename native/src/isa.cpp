#include "isa.h"

#include <stdexcept>

#if defined(TS_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace twostroke {

namespace {

#if defined(TS_HAVE_NEON)
bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#else
  return true;  // every 64-bit Arm machine of Apple's since the M1
#endif
}
#endif

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(TS_HAVE_X86)
  __builtin_cpu_init();
  // The compiler's check asks the system, too, whether it keeps the wide registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    found.push_back(&kAvx2);
  // Not the first choice, though the widest: these kernels have been compiled, but not yet run.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    found.push_back(&kAvx512);
#endif
#if defined(TS_HAVE_NEON)
  if (has_dot_products()) found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
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
