#include "decoder.h"

#include <algorithm>
#include <cmath>

namespace eyas {

void Rows::add_tree(Cache& cache, const int64_t* parents, int count) {
  const int first = this->count(), length = cache.length();
  requests.push_back({&cache, first, count});
  std::vector<int> path;
  for (int i = 0; i < count; ++i) {
    const int parent = parents ? int(parents[i]) : i - 1;
    slot.push_back(length + i);
    position.push_back(parent < 0 ? length : position[first + parent] + 1);
    // The keys of a row: its parent's keys, then itself.
    const int own = length + i;
    if (parent < 0) {
      prefix.push_back(own == length ? length + 1 : length);
      if (own != length) extra.push_back(own);
    } else {
      const int row = first + parent, begin = extra_begin[row], end = extra_begin[row + 1];
      if (begin == end && prefix[row] == own) {
        prefix.push_back(own + 1);
      } else {
        prefix.push_back(prefix[row]);
        for (int e = begin; e < end; ++e) extra.push_back(int(extra[e]));
        extra.push_back(own);
      }
    }
    extra_begin.push_back(int(extra.size()));
  }
}

void Decoder::begin(const Rows& rows, int widest_output) {
  const int m = rows.count(), threads = pool.threads();
  const Layer& layer = layers.front();
  const int qkv = layer.qkv.outputs(), attention = config.heads * config.head_dim, mid = layer.gate_up.outputs() / 2;
  work.rows = m;
  work.x.grow(size_t(m) * stride(config.hidden));
  work.normed.grow(size_t(m) * stride(std::max(config.hidden, layer.qkv.k())));
  work.qkv.grow(size_t(m) * stride(qkv));
  work.attention.grow(size_t(m) * stride(attention));
  work.mid.grow(size_t(m) * stride(mid));
  size_t row_bytes = 0;
  for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) row_bytes = std::max(row_bytes, w->row_bytes());
  row_bytes = std::max(row_bytes, size_t(widest_output));
  work.acts.grow(row_bytes * m);

  const int half = int(config.inv_freq.size());
  work.rope.grow(size_t(m) * 2 * half);
  for (int r = 0; r < m; ++r)
    for (int i = 0; i < half; ++i) {
      const float angle = float(rows.position[r]) * config.inv_freq[i];
      work.rope.get()[(size_t(r) * 2) * half + i] = std::cos(angle) * config.rope_scale;
      work.rope.get()[(size_t(r) * 2 + 1) * half + i] = std::sin(angle) * config.rope_scale;
    }

  const int group = config.heads / config.kv_heads, per_item = std::max(1, 12 / group);
  items_.clear();
  int most_slots = 0, chunks = 0;
  for (const auto& request : rows.requests) chunks += (request.count + per_item - 1) / per_item;
  // Few items do not share out evenly: then each query head is one of its own.
  const int queries = chunks * config.kv_heads < 2 * threads ? 1 : group;
  for (int q = 0; q < int(rows.requests.size()); ++q) {
    const auto& request = rows.requests[q];
    std::vector<int> slots;  // per chunk: how many are looked at
    for (int first = 0; first < request.count; first += per_item) {
      slots.push_back(0);
      for (int r = request.first + first; r < request.first + std::min(first + per_item, request.count); ++r) {
        const int begin = rows.extra_begin[r], end = rows.extra_begin[r + 1];
        slots.back() = std::max({slots.back(), rows.prefix[r], begin < end ? rows.extra[end - 1] + 1 : 0});
      }
      most_slots = std::max(most_slots, slots.back());
    }
    for (int head = 0; head < config.kv_heads; ++head)
      for (int query = 0; query < group; query += queries)
        for (int c = 0; c < int(slots.size()); ++c) {
          const int first = c * per_item, count = std::min(per_item, request.count - first);
          items_.push_back({q, head, request.first + first, count, slots[c], query, queries});
        }
  }
  if (int(next_item_.size()) != config.layers) next_item_ = std::vector<std::atomic<int>>(config.layers);
  for (auto& next : next_item_) next.store(0, std::memory_order_relaxed);
  work.out.resize(threads);
  work.scores.resize(threads);
  for (int t = 0; t < threads; ++t) {
    work.out[t].grow(multiply_scratch(m, kernels.panel_cols));
    work.scores[t].grow(size_t(per_item) * group * round_up(most_slots, kKeyBlock));
  }
}

void Decoder::rotate(float* head, int row) const {
  const int half = int(config.inv_freq.size());
  const float* cosine = work.rope.get() + size_t(row) * 2 * half;
  const float* sine = cosine + half;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

Acts Decoder::prepare(const Linear& w, const float* x, size_t stride, int rows, int thread) {
  if (w.plain()) return {reinterpret_cast<const char*>(x), stride * sizeof(float)};
  const size_t bytes = w.row_bytes();
  const int threads = pool.threads();
  const int begin = int(int64_t(rows) * thread / threads), end = int(int64_t(rows) * (thread + 1) / threads);
  for (int r = begin; r < end; ++r) w.format().prepare(x + r * stride, w.k(), work.acts.get() + r * bytes);
  return {work.acts.get(), bytes};
}

void Decoder::run_layer(int index, const Rows& rows, int thread, const float* embeds) {
  const Layer& layer = layers[index];
  const int m = rows.count(), threads = pool.threads(), h = config.hidden, d = config.head_dim, cols = kernels.panel_cols;
  const int begin = int(int64_t(m) * thread / threads), end = int(int64_t(m) * (thread + 1) / threads);
  const size_t x_ld = stride(h), qkv_ld = stride(layer.qkv.outputs()), att_ld = stride(config.heads * d),
               mid_ld = stride(layer.gate_up.outputs() / 2);
  float* x = work.x.get();
  float* normed = work.normed.get();
  float* qkv = work.qkv.get();
  float* attention = work.attention.get();
  float* mid = work.mid.get();
  float* out = work.out[thread].get();

  // Norms are split by rows like `prepare`, so each thread prepares the rows it has just written.
  auto norm = [&](const Buffer<float>& weight) {
    for (int r = begin; r < end; ++r) {
      if (weight.size())
        kernels.rms_norm(x + r * x_ld, weight.get(), config.eps, h, normed + r * x_ld);
      else
        std::copy_n(x + r * x_ld, h, normed + r * x_ld);
    }
  };
  auto add_to_x = [&](const Buffer<float>& bias) {
    return [&, b = bias.get()](int panel, int first, int count, const float* block) {
      const int c0 = panel * cols, width = std::min(cols, h - c0);
      for (int r = 0; r < count; ++r) {
        float* target = x + (first + r) * x_ld + c0;
        for (int c = 0; c < width; ++c) target[c] += b ? block[r * cols + c] + b[c0 + c] : block[r * cols + c];
      }
    };
  };

  const size_t read_ld = stride(layer.qkv.k());
  if (layer.embedding_norm.size())
    for (int r = begin; r < end; ++r) {
      kernels.rms_norm(embeds + r * x_ld, layer.embedding_norm.get(), config.eps, h, normed + r * read_ld);
      kernels.rms_norm(x + r * x_ld, layer.input_norm.get(), config.eps, h, normed + r * read_ld + h);
    }
  else
    norm(layer.input_norm);
  Acts acts = prepare(layer.qkv, normed, read_ld, m, thread);
  pool.barrier();
  const float* bias = layer.qkv_bias.get();
  multiply<1>(layer.qkv, acts, m, thread, threads, out, [&](int panel, int first, int count, const float* block) {
    const int c0 = panel * cols;
    for (int r = 0; r < count; ++r) {
      float* target = qkv + (first + r) * qkv_ld + c0;
      if (bias)
        for (int c = 0; c < cols; ++c) target[c] = block[r * cols + c] + bias[c0 + c];
      else
        std::copy_n(block + r * cols, cols, target);
    }
  });
  pool.barrier();

  const float scale = 1.0f / std::sqrt(float(d));
  for (const auto& request : rows.requests) {
    for (int r = std::max(begin, request.first); r < std::min(end, request.first + request.count); ++r) {
      float* q = qkv + r * qkv_ld;
      float* k = q + layer.k_at;
      const float* v = q + layer.v_at;
      for (int i = 0; i < config.heads; ++i) {
        if (layer.q_norm.size()) kernels.rms_norm(q + i * d, layer.q_norm.get(), config.eps, d, q + i * d);
        rotate(q + i * d, r);
        for (int j = 0; j < d; ++j) q[i * d + j] *= scale;
      }
      for (int i = 0; i < config.kv_heads; ++i) {
        if (layer.k_norm.size()) kernels.rms_norm(k + i * d, layer.k_norm.get(), config.eps, d, k + i * d);
        rotate(k + i * d, r);
        request.cache->write(index, i, rows.slot[r], k + i * d, v + i * d);
      }
    }
  }
  pool.barrier();

  const int group = config.heads / config.kv_heads;
  const float* queries[16];
  float* outputs[16];
  for (int i; (i = next_item_[index].fetch_add(1, std::memory_order_relaxed)) < int(items_.size());) {
    const Item& item = items_[i];
    const Cache& cache = *rows.requests[item.request].cache;
    for (int r = 0; r < item.count; ++r) {
      const size_t at = size_t(item.head * group + item.query) * d;
      queries[r] = qkv + (item.first + r) * qkv_ld + at;
      outputs[r] = attention + (item.first + r) * att_ld + at;
    }
    kernels.attend({cache.page_pointers().data(), cache.shape().k_offset(index, item.head),
                    cache.shape().v_offset(index, item.head), d, cache.shape().v_stride(), item.count, item.queries, queries,
                    outputs, rows.prefix.data() + item.first, rows.extra_begin.data() + item.first, rows.extra.data(),
                    item.slots, work.scores[thread].get()});
  }
  pool.barrier();

  acts = prepare(layer.o, attention, att_ld, m, thread);
  if (!layer.o.plain()) pool.barrier();
  multiply<1>(layer.o, acts, m, thread, threads, out, add_to_x(layer.o_bias));
  pool.barrier();

  norm(layer.post_norm);
  acts = prepare(layer.gate_up, normed, x_ld, m, thread);
  pool.barrier();
  multiply<2>(layer.gate_up, acts, m, thread, threads, out, [&](int panel, int first, int count, const float* block) {
    for (int r = 0; r < count; ++r)
      kernels.swiglu(block + r * cols, block + size_t(count + r) * cols, cols, mid + (first + r) * mid_ld + panel / 2 * cols);
  });
  pool.barrier();

  acts = prepare(layer.down, mid, mid_ld, m, thread);
  if (!layer.down.plain()) pool.barrier();
  static const Buffer<float> no_bias;
  multiply<1>(layer.down, acts, m, thread, threads, out, add_to_x(no_bias));
  pool.barrier();
}

}  // namespace eyas
