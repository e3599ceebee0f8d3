// What the machine can do: as fast as memory is read, as many multiply-adds as its units give.
namespace {

float sum_floats(const float* x, size_t n) {
  F acc[8];
  for (F& a : acc) a = f_zero();
  for (size_t i = 0; i + 8 * L <= n; i += 8 * L) {
    fetch(x + i + 1024);
    if (L > 2) fetch(x + i + 1024 + 16);
    if (L > 4) fetch(x + i + 1024 + 32), fetch(x + i + 1024 + 48);
    if (L > 8) fetch(x + i + 1024 + 64), fetch(x + i + 1024 + 80), fetch(x + i + 1024 + 96), fetch(x + i + 1024 + 112);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) acc[j] = f_add(acc[j], f_load(x + i + j * L));
  }
  F total = acc[0];
  for (int j = 1; j < 8; ++j) total = f_add(total, acc[j]);
  return lane_sum(total);
}

[[maybe_unused]] double burn_flops(int64_t steps) {
  constexpr int n = 10;  // more than latency times units
  F acc[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) acc[i] = f_set(float(i));
  F a = f_set(0.999f), b = f_set(1e-3f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      acc[i] = f_fma(acc[i], a, b);
      keep(acc[i]);
    }
  }
  F total = acc[0];
#pragma GCC unroll 16
  for (int i = 1; i < n; ++i) total = f_add(total, acc[i]);
  return double(steps) * n * L * 2 + (lane_sum(total) > 1e30f);  // the sum must be seen to be needed
}

}  // namespace
