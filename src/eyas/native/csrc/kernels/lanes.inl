// Over the lanes of vectors: sum and largest, and the exponential.
namespace {

inline float lane_sum(F v) {  // fixed tree over the lanes
  float a[L];
  f_store(a, v);
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}
inline float lane_max(F v) {
  float a[L];
  f_store(a, v);
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = a[i + half] > a[i] ? a[i + half] : a[i];
  return a[0];
}
inline float most_of_row(const float* x, int n) {
  int whole = n / L * L;
  float most = x[0];
  if (whole) {
    F top = f_load(x);
    for (int i = L; i < whole; i += L) top = f_max(top, f_load(x + i));
    most = lane_max(top);
  }
  for (int i = whole; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// exp to about 2 units in the last place: 2^n * e^r, |r| <= ln2 / 2, degree-6 polynomial (Taylor coefficients refit
// are not needed at this width). Below -87 the result is the smallest it can be, about 1e-38.
inline F f_exp(F x) {
  x = f_min(f_max(x, f_set(-87.0f)), f_set(88.0f));
  I n = i_round(f_mul(x, f_set(1.44269504f)));
  F nf = i_float(n);
  F r = f_fma(nf, f_set(-0.693359375f), x);  // ln2 in two parts
  r = f_fma(nf, f_set(2.12194440e-4f), r);
  F p = f_set(1.0f / 720);
  p = f_fma(p, r, f_set(1.0f / 120));
  p = f_fma(p, r, f_set(1.0f / 24));
  p = f_fma(p, r, f_set(1.0f / 6));
  p = f_fma(p, r, f_set(0.5f));
  p = f_fma(p, r, f_set(1.0f));
  p = f_fma(p, r, f_set(1.0f));
  return f_mul(p, f_pow2(n));
}

}  // namespace
