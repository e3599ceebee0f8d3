// Decoder layers over the rows of one pass.
#pragma once

#include <atomic>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cache.h"
#include "linear.h"

namespace eyas {

struct Config {
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp = 0, vocab = 0, max_positions = 0;
  float eps = 1e-6f;
  std::vector<float> inv_freq;  // [rotated dimensions / 2]
  float rope_scale = 1;         // multiplies cos and sin (YaRN's attention factor)
  Type cache = Type::f32;       // of stored keys and values: f32 or bf16
};

struct Layer {
  Buffer<float> input_norm;  // empty: none (EAGLE's first layer)
  Buffer<float> embedding_norm;  // EAGLE-3's layer: attention reads (normed embedding, normed x); empty: x alone
  Buffer<float> post_norm;
  Buffer<float> q_norm, k_norm;  // empty unless Qwen3
  Linear qkv, o, gate_up, down;
  Buffer<float> qkv_bias, o_bias;  // [outputs], empty: none
  int k_at = 0, v_at = 0;          // where k and v begin in the outputs of qkv
};

// The rows of one pass and the keys each may see: slots 0 .. prefix - 1 of its cache, then its extra slots.
struct Rows {
  struct Request {
    Cache* cache;
    int first, count;
  };
  std::vector<Request> requests;
  std::vector<int> position, slot, prefix, extra_begin{0}, extra;
  int count() const { return int(position.size()); }

  // The trees of a request: rows after the committed prefix, node i at slot length + i, parents before children.
  // Without parents: a chain.
  void add_tree(Cache& cache, const int64_t* parents, int count);
};

// One layer's and one pass's memory; reused, guarded by the pool's one-job-at-a-time through its owner's lock.
struct Workspace {
  Buffer<float> x, qkv, attention, mid, rope;
  // Per thread; prepared rows that the threads share are those of thread 0.
  std::vector<Buffer<char>> acts;
  std::vector<Buffer<float>> row, out, scores;
};

class Decoder {
 public:
  Decoder(const Kernels& kernels, Pool& pool, Config config) : kernels(kernels), pool(pool), config(std::move(config)) {}

  const Kernels& kernels;
  Pool& pool;
  const Config config;
  std::vector<Layer> layers;
  Workspace work;

  CacheShape cache_shape() const { return {config.cache, config.layers, config.kv_heads, config.head_dim}; }
  size_t x_stride() const { return size_t(stride(config.hidden)); }
  static int stride(int n) { return round_up(n, 64) + 16; }  // floats; off the powers of two

  // Before the job: sizes the workspace, also for rows of `others`, and computes the rotations of the rows' positions.
  void begin(const Rows& rows, std::initializer_list<const Linear*> others);
  // Inside the job, on every thread, with x filled behind a barrier: runs one layer on x in place; ends in a barrier.
  // `embeds` [rows, x_stride] for a layer with an embedding norm. `after`: what is multiplied after the last layer.
  void run_layer(int index, const Rows& rows, int thread, const Linear& after, const float* embeds = nullptr);
  // Makes rows ready for `w` on all threads: row(r, room) gives the floats of row r, which may stand in `room` [k].
  // Few rows are made by each thread for itself, more are shared out and end in a barrier.
  template <class Row>
  Acts prepare(const Linear& w, int rows, int thread, Row&& row) {
    const bool alone = rows <= kRowsAlone;
    const auto [begin, end] = alone ? Share{0, rows} : share(rows, thread, pool.threads());
    const size_t bytes = w.row_bytes();
    char* acts = work.acts[alone ? thread : 0].get();
    for (int r = begin; r < end; ++r) w.format().prepare(row(r, work.row[thread].get()), w.k(), acts + r * bytes);
    if (!alone) pool.barrier();
    return {acts, bytes};
  }
  // Sizes the memory that preparing and multiplying `rows` rows take.
  void make_room(int rows, std::initializer_list<const Linear*> matrices);

 private:
  static constexpr size_t kFetchedBytes = size_t(384) << 10;  // per thread: a part of its second-level cache
  static constexpr int kRowsAlone = 4;  // waiting for another thread takes longer than preparing so many
  struct Item {  // attention of rows first .. first + count of a request over one K/V head
    int request, head, first, count, slots;
    int query, queries;  // of the head's group of query heads
  };
  std::vector<Item> items_;  // those of one head together, so that its keys stay in a core's cache
  std::vector<std::atomic<int>> next_item_;  // per layer: threads take items as they come free
  struct KeyBlock {
    const void* page;
    int token;  // its first within the page
  };
  std::vector<KeyBlock> key_blocks_;  // those that are read, as far as fetching them ahead pays
  void fetch_keys(int layer, Share units) const;
  const float* read_in(const Layer& layer, int row, const float* embeds, float* room) const;
  void rotate(int layer, const Rows& rows, int thread);
  void attend(int layer, const Rows& rows, int thread);
};

}  // namespace eyas
