// What a decoder does to one row at a time: norms, the gated activation, log-sum-exp.
namespace {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  F sum = f_zero();
  int whole = n / L * L;
  for (int i = 0; i < whole; i += L) {
    F v = f_load(x + i);
    sum = f_fma(v, v, sum);
  }
  float total = lane_sum(sum);
  for (int i = whole; i < n; ++i) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / float(n) + eps);
  for (int i = 0; i < whole; i += L) f_store(out + i, f_mul(f_load(weight + i), f_mul(f_load(x + i), f_set(scale))));
  for (int i = whole; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

void add(const float* x, int n, float* out) {
  int i = 0;
  for (; i + L <= n; i += L) f_store(out + i, f_add(f_load(out + i), f_load(x + i)));
  for (; i < n; ++i) out[i] += x[i];
}

inline F silu_times(F g, F u) {
  F e = f_exp(f_sub(f_zero(), g));
  return f_mul(f_div(g, f_add(f_set(1.0f), e)), u);
}
void swiglu(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + L <= n; i += L) f_store(out + i, silu_times(f_load(gate + i), f_load(up + i)));
  if (i < n) {
    float g[L] = {}, u[L] = {}, o[L];
    for (int j = i; j < n; ++j) g[j - i] = gate[j], u[j - i] = up[j];
    f_store(o, silu_times(f_load(g), f_load(u)));
    for (int j = i; j < n; ++j) out[j] = o[j - i];
  }
}

void rotate(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + L <= half; i += L) {
    const F a = f_load(x + i), b = f_load(x + i + half), c = f_load(cosine + i), s = f_load(sine + i);
    f_store(x + i, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store(x + i + half, f_add(f_mul(b, c), f_mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

void exponentials_of(const float* x, float scale, int n, float* out) {
  const int whole = n / L * L;
  const F most = f_set(most_of_row(x, n)), by = f_set(scale);
  for (int i = 0; i < whole; i += L) f_store(out + i, f_exp(f_mul(f_sub(f_load(x + i), most), by)));
  if (whole < n) {
    float tail[L] = {}, exponentials[L];
    for (int i = whole; i < n; ++i) tail[i - whole] = x[i];
    f_store(exponentials, f_exp(f_mul(f_sub(f_load(tail), most), by)));
    for (int i = whole; i < n; ++i) out[i] = exponentials[i - whole];
  }
}

float log_sum_exp(const float* x, int n) {
  const int whole = n / L * L;
  const float most = most_of_row(x, n);
  F sum = f_zero();
  for (int i = 0; i < whole; i += L) sum = f_add(sum, f_exp(f_sub(f_load(x + i), f_set(most))));
  float total = lane_sum(sum);
  for (int i = whole; i < n; ++i) total += expf(x[i] - most);
  return most + logf(total);
}

}  // namespace
