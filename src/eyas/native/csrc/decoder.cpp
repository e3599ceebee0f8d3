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

void Decoder::make_room(int rows, std::initializer_list<const Linear*> matrices) {
  const int threads = pool.threads();
  work.acts.resize(threads);
  work.row.resize(threads);
  work.out.resize(threads);
  for (const Linear* w : matrices)
    for (int t = 0; t < threads; ++t) {
      work.acts[t].grow(w->row_bytes() * (t == 0 ? rows : std::min(rows, kRowsAlone)));
      work.row[t].grow(w->k());
    }
  for (auto& out : work.out) out.grow(multiply_scratch(rows, kernels.panel_cols));
}

void Decoder::begin(const Rows& rows, std::initializer_list<const Linear*> others) {
  const int m = rows.count(), threads = pool.threads();
  const Layer& layer = layers.front();
  const int qkv = layer.qkv.outputs(), attention = config.heads * config.head_dim, mid = layer.gate_up.outputs() / 2;
  work.x.grow(size_t(m) * stride(config.hidden));
  work.qkv.grow(size_t(m) * stride(qkv));
  work.attention.grow(size_t(m) * stride(attention));
  work.mid.grow(size_t(m) * stride(mid));
  make_room(m, {&layer.qkv, &layer.o, &layer.gate_up, &layer.down});
  make_room(m, others);

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
  key_blocks_.clear();
  const size_t most_blocks = kFetchedBytes * threads * config.layers / (cache_shape().token_bytes() * kKeyBlock);
  int most_slots = 0, chunks = 0;
  for (const auto& request : rows.requests) chunks += (request.count + per_item - 1) / per_item;
  // Where there is not an item for each thread, each query head is one of its own.
  const int queries = chunks * config.kv_heads < threads ? 1 : group;
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
    const int request_slots = *std::max_element(slots.begin(), slots.end());
    for (int slot = 0; slot < request_slots && key_blocks_.size() < most_blocks; slot += kKeyBlock)
      key_blocks_.push_back({request.cache->page_pointers()[slot / kPageTokens], slot % kPageTokens});
    for (int head = 0; head < config.kv_heads; ++head)
      for (int query = 0; query < group; query += queries)
        for (int c = 0; c < int(slots.size()); ++c) {
          const int first = c * per_item, count = std::min(per_item, request.count - first);
          items_.push_back({q, head, request.first + first, count, slots[c], query, queries});
        }
  }
  if (int(next_item_.size()) != config.layers) next_item_ = std::vector<std::atomic<int>>(config.layers);
  for (auto& next : next_item_) next.store(0, std::memory_order_relaxed);
  work.scores.resize(threads);
  for (auto& scores : work.scores)
    scores.grow(size_t(per_item) * group * attend_stride(most_slots, cache_shape().v_stride()));
}

// Asks for keys and values that attention will read; a unit is a block of keys of one head.
void Decoder::fetch_keys(int index, Share units) const {
  const CacheShape shape = cache_shape();
  const size_t element = shape.element_bytes();
  for (int i = units.begin; i < units.end; ++i) {
    const int head = i % config.kv_heads;
    const auto [page, token] = key_blocks_[size_t(i / config.kv_heads)];
    const char* start = static_cast<const char*>(page);
    kernels.fetch(start + shape.key_at(index, head, token) * element, kKeyBlock * shape.head_dim * element);
    kernels.fetch(start + shape.value_at(index, head, token) * element, kKeyBlock * shape.v_stride() * element);
  }
}

// What a layer's attention reads of a row.
const float* Decoder::read_in(const Layer& layer, int row, const float* embeds, float* room) const {
  const int h = config.hidden;
  const float* x = work.x.get() + row * x_stride();
  if (!layer.input_norm.size()) return x;
  float* normed = room;
  if (layer.embedding_norm.size()) {
    kernels.rms_norm(embeds + row * x_stride(), layer.embedding_norm.get(), config.eps, h, room);
    normed += h;
  }
  kernels.rms_norm(x, layer.input_norm.get(), config.eps, h, normed);
  return room;
}

// Rotates queries and keys of the rows, scales the queries, and writes keys and values to the caches. Shared out by
// heads: one row keeps all threads busy too, and the keys of neighbouring rows, whose numbers share cache lines, are
// written by one thread.
void Decoder::rotate(int index, const Rows& rows, int thread) {
  const Layer& layer = layers[index];
  const int d = config.head_dim, half = int(config.inv_freq.size()), heads = config.heads + config.kv_heads;
  const float scale = 1.0f / std::sqrt(float(d));
  const auto [begin, end] = share(heads, thread, pool.threads());
  for (const auto& request : rows.requests)
    for (int row = request.first; row < request.first + request.count; ++row) {
      const float* cosine = work.rope.get() + size_t(row) * 2 * half;
      float* out = work.qkv.get() + size_t(row) * stride(layer.qkv.outputs());
      for (int head = begin; head < end; ++head) {
        const int key = head - config.heads;  // queries come first
        float* x = out + (key < 0 ? head * d : layer.k_at + key * d);
        const Buffer<float>& norm = key < 0 ? layer.q_norm : layer.k_norm;
        if (norm.size()) kernels.rms_norm(x, norm.get(), config.eps, d, x);
        kernels.rotate(x, cosine, cosine + half, half);
        if (key < 0)
          for (int j = 0; j < d; ++j) x[j] *= scale;
        else
          request.cache->write(index, key, rows.slot[row], x, out + layer.v_at + key * d);
      }
    }
}

void Decoder::attend(int index, const Rows& rows, int thread) {
  const int d = config.head_dim, group = config.heads / config.kv_heads;
  const size_t qkv_ld = stride(layers[index].qkv.outputs()), attention_ld = stride(config.heads * d);
  const float* queries[16];
  float* outputs[16];
  for (int i; (i = next_item_[index].fetch_add(1, std::memory_order_relaxed)) < int(items_.size());) {
    const Item& item = items_[i];
    const Cache& cache = *rows.requests[item.request].cache;
    for (int r = 0; r < item.count; ++r) {
      const size_t at = size_t(item.head * group + item.query) * d;
      queries[r] = work.qkv.get() + (item.first + r) * qkv_ld + at;
      outputs[r] = work.attention.get() + (item.first + r) * attention_ld + at;
    }
    const CacheShape& shape = cache.shape();
    kernels.attend({cache.page_pointers().data(), shape.type, shape.k_offset(index, item.head),
                    shape.v_offset(index, item.head), d, shape.v_stride(), item.count, item.queries, queries, outputs,
                    rows.prefix.data() + item.first, rows.extra_begin.data() + item.first, rows.extra.data(), item.slots,
                    work.scores[thread].get()});
  }
}

void Decoder::run_layer(int index, const Rows& rows, int thread, const Linear& after, const float* embeds) {
  const Layer& layer = layers[index];
  const int m = rows.count(), threads = pool.threads(), h = config.hidden, cols = kernels.panel_cols;
  const size_t x_ld = x_stride(), qkv_ld = stride(layer.qkv.outputs()), attention_ld = stride(config.heads * config.head_dim),
               mid_ld = stride(layer.gate_up.outputs() / 2);
  float* x = work.x.get();
  float* qkv = work.qkv.get();
  float* mid = work.mid.get();
  float* out = work.out[thread].get();
  auto start = [&](const Linear& w, int unit = 1) { return first_panel(w, unit, thread, threads); };
  auto add_to_x = [&](const Buffer<float>& bias) {
    return [&, b = bias.get()](int panel, int first, int count, float* block) {
      const int c0 = panel * cols, width = std::min(cols, h - c0);
      for (int r = 0; r < count; ++r) {
        if (b) kernels.add(b + c0, width, block + r * cols);
        kernels.add(block + r * cols, width, x + (first + r) * x_ld + c0);
      }
    };
  };

  Acts acts = prepare(layer.qkv, m, thread, [&](int r, float* room) { return read_in(layer, r, embeds, room); });
  const float* bias = layer.qkv_bias.get();
  const Share panels = share(int(layer.qkv.panels().size()), thread, threads);
  const Share keys = share(int(key_blocks_.size()) * config.kv_heads, thread, threads);
  multiply<1>(layer.qkv, acts, m, thread, threads, out, start(layer.o),
              [&](int panel, int first, int count, float* block) {
                if (first == 0) fetch_keys(index, share(keys, panel - panels.begin, panels.end - panels.begin));
                const int c0 = panel * cols;
                for (int r = 0; r < count; ++r) {
                  if (bias) kernels.add(bias + c0, cols, block + r * cols);
                  std::copy_n(block + r * cols, cols, qkv + (first + r) * qkv_ld + c0);
                }
              });
  pool.barrier();
  rotate(index, rows, thread);
  pool.barrier();
  attend(index, rows, thread);
  pool.barrier();

  acts = prepare(layer.o, m, thread, [&](int r, float*) { return work.attention.get() + r * attention_ld; });
  multiply<1>(layer.o, acts, m, thread, threads, out, start(layer.gate_up, 2), add_to_x(layer.o_bias));
  pool.barrier();

  acts = prepare(layer.gate_up, m, thread, [&](int r, float* room) {
    kernels.rms_norm(x + r * x_ld, layer.post_norm.get(), config.eps, h, room);
    return room;
  });
  multiply<2>(layer.gate_up, acts, m, thread, threads, out, start(layer.down),
              [&](int panel, int first, int count, const float* block) {
                for (int r = 0; r < count; ++r)
                  kernels.swiglu(block + r * cols, block + size_t(count + r) * cols, cols,
                                 mid + (first + r) * mid_ld + panel / 2 * cols);
              });
  pool.barrier();

  static const Buffer<float> no_bias;
  acts = prepare(layer.down, m, thread, [&](int r, float*) { return mid + r * mid_ld; });
  multiply<1>(layer.down, acts, m, thread, threads, out, start(index + 1 < config.layers ? layers[index + 1].qkv : after),
              add_to_x(no_bias));
  pool.barrier();
}

}  // namespace eyas
