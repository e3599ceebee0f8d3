// Attention of some rows over one K/V head: scores, softmax, sums of values, each in one fixed order.
namespace {

constexpr int kKeyVectors = kKeyBlock / L;
constexpr int kQueryTile = 12 / kKeyVectors < 8 ? 12 / kKeyVectors : 8;

// Scores of R queries against one block of keys; each sum runs over the head dimension in order.
template <int R>
inline void score_tile(const float* const* q, const float* keys, int head_dim, float* const* scores) {
  F acc[R][kKeyVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) acc[r][c] = f_zero();
  for (int d = 0; d < head_dim; ++d) {
    F b[kKeyVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) b[c] = f_load(keys + c * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F a = f_bcast(q[r] + d);
#pragma GCC unroll 8
      for (int c = 0; c < kKeyVectors; ++c) acc[r][c] = f_fma(a, b[c], acc[r][c]);
    }
    keys += kKeyBlock;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) f_store(scores[r] + c * L, acc[r][c]);
}

struct ScoreTile {
  const float* const* q;
  const float* keys;
  int head_dim;
  float* const* scores;
  template <int R>
  void run() const {
    score_tile<R>(q, keys, head_dim, scores);
  }
};

inline const float* value_row(const Attention& a, int slot) {
  return a.pages[slot / kPageTokens] + a.v_offset + size_t(slot % kPageTokens) * a.v_stride;
}

// R queries of one row, D vectors of the head dimension: sums over the row's keys in logical order.
template <int R, int D>
inline void value_tile(const Attention& a, int row, const float* const* p, int d0, float (*out)[D * L],
                       const float* inverse) {
  F acc[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) acc[r][d] = f_zero();
  auto step = [&](const float* v, int j) __attribute__((always_inline)) {
    F w[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) w[r] = f_bcast(p[r] + j);
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) {
      F b = f_load(v + d * L);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][d] = f_fma(w[r], b, acc[r][d]);
    }
  };
  int j = 0;
  for (int prefix = a.prefix[row]; j < prefix;) {
    const float* v = value_row(a, j) + d0;
    int end = (j / kPageTokens + 1) * kPageTokens;
    end = end < prefix ? end : prefix;
    for (; j < end; ++j, v += a.v_stride) step(v, j);
  }
  for (int e = a.extra_begin[row]; e < a.extra_begin[row + 1]; ++e, ++j) step(value_row(a, a.extra[e]) + d0, j);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) f_store(out[r] + d * L, f_mul(acc[r][d], f_set(inverse[r])));
}

template <int R, int D>
inline void value_part(const Attention& a, int row, const float* const* p, int d0, float* out, const float* inverse) {
  float block[R][D * L];
  value_tile<R, D>(a, row, p, d0, block, inverse);
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D * L && d0 + d < a.head_dim; ++d) out[size_t(r) * a.head_dim + d0 + d] = block[r][d];
}

template <int R>
inline void value_rows(const Attention& a, int row, const float* const* p, float* out, const float* inverse) {
  int d = 0;
  for (; d + 3 * L < a.head_dim; d += 4 * L) value_part<R, 4>(a, row, p, d, out, inverse);
  for (; d < a.head_dim; d += L) value_part<R, 1>(a, row, p, d, out, inverse);
}

// Replaces n scores by exp(score - largest); returns their sum.
inline float exponentials(float* s, int n) {
  const int whole = n / L * L;
  const float most = most_of_row(s, n);
  // Sum by lane j % L; lanes beyond n add zero, which changes no bit.
  F sum = f_zero();
  for (int j = 0; j < whole; j += L) {
    F e = f_exp(f_sub(f_load(s + j), f_set(most)));
    f_store(s + j, e);
    sum = f_add(sum, e);
  }
  if (whole < n) {
    float tail[L];
    for (int j = 0; j < L; ++j) tail[j] = whole + j < n ? s[whole + j] : most;
    f_store(tail, f_exp(f_sub(f_load(tail), f_set(most))));
    for (int j = 0; j < L; ++j) {
      if (whole + j < n)
        s[whole + j] = tail[j];
      else
        tail[j] = 0;
    }
    sum = f_add(sum, f_load(tail));
  }
  return lane_sum(sum);
}

// Every query against every slot, kQueryTile at a time: a.scratch [queries, stride].
inline void score_slots(const Attention& a, int stride) {
  const int blocks = stride / kKeyBlock;
  const int queries = a.rows * a.group;
  for (int first = 0; first < queries; first += kQueryTile) {
    int count = queries - first < kQueryTile ? queries - first : kQueryTile;
    const float* q[kQueryTile];
    float* scores[kQueryTile];
    for (int i = 0; i < count; ++i) {
      q[i] = a.queries[(first + i) / a.group] + size_t((first + i) % a.group) * a.head_dim;
      scores[i] = a.scratch + size_t(first + i) * stride;
    }
    for (int b = 0; b < blocks; ++b) {
      int slot = b * kKeyBlock;
      const float* keys = a.pages[slot / kPageTokens] + a.k_offset + size_t(slot % kPageTokens) * a.head_dim;
      if (first == 0) {  // while these keys are scored, their values and the next keys come in
        const float* values = value_row(a, slot);
        for (int i = 0; i < kKeyBlock * a.v_stride; i += 16) fetch(values + i);
        for (int i = 0; i < kKeyBlock * a.head_dim; i += 16) fetch(keys + kKeyBlock * a.head_dim + i);
      }
      run_tile<kQueryTile>(count, ScoreTile{q, keys, a.head_dim, scores});
      for (int i = 0; i < count; ++i) scores[i] += kKeyBlock;
    }
  }
}

void attend(const Attention& a) {
  const int stride = round_up(a.slots, kKeyBlock);
  score_slots(a, stride);
  for (int row = 0; row < a.rows; ++row) {
    const int prefix = a.prefix[row];
    const int* extra = a.extra + a.extra_begin[row];
    const int extras = a.extra_begin[row + 1] - a.extra_begin[row];
    const int n = prefix + extras;
    for (int g = 0; g < a.group;) {
      const float* p[3];
      float inverse[3];
      int count = a.group - g < 3 ? a.group - g : 3;
      for (int i = 0; i < count; ++i) {
        float* s = a.scratch + size_t(row * a.group + g + i) * stride;
        for (int e = 0; e < extras; ++e) s[prefix + e] = s[extra[e]];  // extra[e] >= prefix + e
        p[i] = s;
        inverse[i] = 1.0f / exponentials(s, n);
      }
      float* out = a.outputs[row] + size_t(g) * a.head_dim;
      if (count == 3)
        value_rows<3>(a, row, p, out, inverse);
      else if (count == 2)
        value_rows<2>(a, row, p, out, inverse);
      else
        value_rows<1>(a, row, p, out, inverse);
      g += count;
    }
  }
}

}  // namespace
