// AVX-512 without VNNI (Skylake), from the source of `kernels_avx512.cpp`.
#include "kernels_avx512.cpp"
