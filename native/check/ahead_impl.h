// `Kernels::matmul` for Q4 with 1 or 8 tokens only. `ahead_avx512.cpp` includes this file after
// `products_impl.h`.
static void multiply(const Packed& w, const Activations& a, int t0, int t1, int g0, int g1, float* out,
                     int stride, bool add) {
  for (int g = g0; g < g1; g++, out += W) {
    if (t1 - t0 == 1) matmul_tile<Format::kQ4, 1>(w, a, g, nullptr, t0, out, stride, add);
    else matmul_tile<Format::kQ4, 8>(w, a, g, nullptr, t0, out, stride, add);
  }
}
