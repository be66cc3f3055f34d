// AVX-512 of Skylake, which has no VNNI: the same source, built without it.
#include "kernels_avx512.cpp"
