// Attention of some rows over one K/V head: scores, softmax, sums of values, each in one fixed order.
// K and V are stored as E, float or bf16 (uint16_t), and computed with as floats.
namespace {

inline F load(const float* p) { return f_load(p); }
inline F load(const uint16_t* p) { return f_bf16(p); }

constexpr int kKeyVectors = kKeyBlock / L;
// Blocks of keys that are scored together, where there are registers for that, and queries scored together.
constexpr int kPageBlocks = kPageTokens / kKeyBlock;
constexpr int kBlockTile = kKeyVectors == 1 ? kPageBlocks : 1;
constexpr int kQueryTile = kBlockTile > 1 ? 24 / kBlockTile : 12 / kKeyVectors < 8 ? 12 / kKeyVectors : 8;

// Scores of R queries against B blocks of keys; each sum runs over the head dimension in order. Meanwhile as many bytes
// as the keys take are fetched from `keys_ahead` and from `values_ahead`.
template <int R, int B, class E>
inline void score_tile(const float* const* q, const E* keys, int head_dim, float* const* scores, const E* keys_ahead,
                       const E* values_ahead) {
  constexpr int V = B * kKeyVectors, step = B * kKeyBlock, line = 64 / sizeof(E);
  const size_t block = size_t(head_dim) * kKeyBlock;
  F acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = f_zero();
  for (int d = 0; d < head_dim; ++d) {
#pragma GCC unroll 8
    for (int i = 0; i < step; i += line) fetch(keys_ahead + i), fetch(values_ahead + i);
    keys_ahead += step;
    values_ahead += step;
    F b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) b[v] = load(keys + v / kKeyVectors * block + v % kKeyVectors * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F a = f_bcast(q[r] + d);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = f_fma(a, b[v], acc[r][v]);
    }
    keys += kKeyBlock;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) keep(acc[r][v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) f_store(scores[r] + v * L, acc[r][v]);
}

template <int B, class E>
struct ScoreTile {
  const float* const* q;
  const E* keys;
  int head_dim;
  float* const* scores;
  const E* keys_ahead;
  const E* values_ahead;
  template <int R>
  void run() const {
    score_tile<R, B>(q, keys, head_dim, scores, keys_ahead, values_ahead);
  }
};

template <class E>
inline const E* key_block(const Attention& a, int block) {
  return static_cast<const E*>(a.pages[block / kPageBlocks]) + a.k_offset +
         size_t(block % kPageBlocks) * kKeyBlock * a.head_dim;
}

template <class E>
inline const E* value_row(const Attention& a, int slot) {
  return static_cast<const E*>(a.pages[slot / kPageTokens]) + a.v_offset + size_t(slot % kPageTokens) * a.v_stride;
}

// Slots first .. last - 1, then those of a list.
struct Keys {
  int first, last;
  const int* extra;
  int extras;
};

// Adds values, weighted by p, to the sums of R queries, D vectors of the head dimension from d0 on, one key after the
// other. p is indexed by a key's place in its row's order.
template <int R, int D, class E>
inline void value_tile(const Attention& a, const Keys& keys, const float* const* p, float* const* sums, int d0) {
  F acc[R][D];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) acc[r][d] = f_load(sums[r] + d0 + d * L);
  auto step = [&](const E* v, int j) __attribute__((always_inline)) {
    F b[D];
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) b[d] = load(v + d * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F w = f_bcast(p[r] + j);
#pragma GCC unroll 8
      for (int d = 0; d < D; ++d) acc[r][d] = f_fma(w, b[d], acc[r][d]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int d = 0; d < D; ++d) keep(acc[r][d]);
  };
  int j = keys.first;
  while (j < keys.last) {
    const E* v = value_row<E>(a, j) + d0;
    int end = (j / kPageTokens + 1) * kPageTokens;
    end = end < keys.last ? end : keys.last;
    for (; j < end; ++j, v += a.v_stride) step(v, j);
  }
  for (int e = 0; e < keys.extras; ++e, ++j) step(value_row<E>(a, keys.extra[e]) + d0, j);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) f_store(sums[r] + d0 + d * L, acc[r][d]);
}

constexpr int kValueSums = L == 16 ? 24 : 12;  // accumulators that leave registers for the rest
constexpr int kValueTile = kValueSums / 2;

template <class E>
struct ValueTile {
  const Attention& a;
  const Keys& keys;
  const float* const* p;
  float* const* sums;
  template <int R>
  void run() const {
    constexpr int D = 4 * R <= kValueSums ? 4 : 2;
    int d = 0;
    for (; d + (D - 1) * L < a.head_dim; d += D * L) value_tile<R, D, E>(a, keys, p, sums, d);
    for (; d < a.head_dim; d += L) value_tile<R, 1, E>(a, keys, p, sums, d);
  }
};

// The queries first .. first + count of an item over the same keys: p and sums lie in its scratch.
template <class E>
inline void add_values(const Attention& a, const Keys& keys, int stride, int first, int count) {
  if (keys.first == keys.last && keys.extras == 0) return;
  for (int end = first + count; first < end; first += kValueTile) {
    const float* p[kValueTile];
    float* sums[kValueTile];
    const int queries = end - first < kValueTile ? end - first : kValueTile;
    for (int i = 0; i < queries; ++i) {
      p[i] = a.scratch + size_t(first + i) * stride;
      sums[i] = a.scratch + size_t(first + i + 1) * stride - a.v_stride;
    }
    run_tile<kValueTile>(queries, ValueTile<E>{a, keys, p, sums});
  }
}

// Replaces n scores by exp(score - largest); returns their sum, taken by lane j % L. Scores up to the next whole vector
// may be written too: there they count as next to nothing, the same for every row of n keys.
inline float exponentials(float* s, int n) {
  const int padded = round_up(n, L);
  for (int j = n; j < padded; ++j) s[j] = -1e30f;
  F top = f_load(s);
  for (int j = L; j < padded; j += L) top = f_max(top, f_load(s + j));
  const F most = f_set(lane_max(top));
  F sum = f_zero();
  for (int j = 0; j < padded; j += L) {
    F e = f_exp(f_sub(f_load(s + j), most));
    f_store(s + j, e);
    sum = f_add(sum, e);
  }
  return lane_sum(sum);
}

// Every query against every slot, kQueryTile at a time. While keys are scored, their values and the keys after them
// come in.
template <class E>
inline void score_slots(const Attention& a, int stride) {
  const int blocks = round_up(a.slots, kKeyBlock) / kKeyBlock;
  const int queries = a.rows * a.group;
  for (int first = 0; first < queries; first += kQueryTile) {
    const int count = queries - first < kQueryTile ? queries - first : kQueryTile;
    const float* q[kQueryTile];
    float* scores[kQueryTile];
    for (int i = 0; i < count; ++i) {
      q[i] = a.queries[(first + i) / a.group] + size_t((first + i) % a.group) * a.head_dim;
      scores[i] = a.scratch + size_t(first + i) * stride;
    }
    for (int block = 0; block < blocks;) {
      const int step = blocks - block >= kBlockTile ? kBlockTile : 1;  // whole pages first: none is begun in its middle
      const E* keys = key_block<E>(a, block);
      const E* keys_ahead = block + step < blocks ? key_block<E>(a, block + step) : keys;
      const E* values = value_row<E>(a, block * kKeyBlock);
      if (step == kBlockTile)
        run_tile<kQueryTile>(count, ScoreTile<kBlockTile, E>{q, keys, a.head_dim, scores, keys_ahead, values});
      else
        run_tile<kQueryTile>(count, ScoreTile<1, E>{q, keys, a.head_dim, scores, keys_ahead, values});
      for (int i = 0; i < count; ++i) scores[i] += step * kKeyBlock;
      block += step;
    }
  }
}

template <class E>
void attend_as(const Attention& a) {
  const int stride = attend_stride(a.slots, a.v_stride);
  score_slots<E>(a, stride);
  int shared = a.prefix[0];  // slots that every row sees
  for (int row = 0; row < a.rows; ++row) {
    const int prefix = a.prefix[row];
    const int* extra = a.extra + a.extra_begin[row];
    const int extras = a.extra_begin[row + 1] - a.extra_begin[row];
    shared = prefix < shared ? prefix : shared;
    for (int g = 0; g < a.group; ++g) {
      float* p = a.scratch + size_t(row * a.group + g) * stride;
      for (int e = 0; e < extras; ++e) p[prefix + e] = p[extra[e]];  // extra[e] >= prefix + e
      const float inverse = 1.0f / exponentials(p, prefix + extras);
      float* sums = p + stride - a.v_stride;
      for (int d = 0; d < a.v_stride; d += L) f_store(sums + d, f_zero());
      a.outputs[row][size_t(g) * a.head_dim] = inverse;  // kept until the sums are there
    }
  }
  add_values<E>(a, {0, shared, nullptr, 0}, stride, 0, a.rows * a.group);
  for (int row = 0; row < a.rows; ++row) {
    const int begin = a.extra_begin[row], extras = a.extra_begin[row + 1] - begin;
    add_values<E>(a, {shared, a.prefix[row], a.extra + begin, extras}, stride, row * a.group, a.group);
    for (int g = 0; g < a.group; ++g) {
      const float* sums = a.scratch + size_t(row * a.group + g + 1) * stride - a.v_stride;
      float* out = a.outputs[row] + size_t(g) * a.head_dim;
      const float inverse = out[0];
      int d = 0;
      for (; d + L <= a.head_dim; d += L) f_store(out + d, f_mul(f_load(sums + d), f_set(inverse)));
      for (; d < a.head_dim; ++d) out[d] = sums[d] * inverse;
    }
  }
}

void attend(const Attention& a) { a.type == Type::bf16 ? attend_as<uint16_t>(a) : attend_as<float>(a); }

void fetch_bytes(const void* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) fetch(static_cast<const char*>(at) + i);
}

}  // namespace
