// Python's view of the engine: Pool, Cache, Model. Arrays in, arrays out; the GIL is released while computing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "head.h"

namespace nb = nanobind;
using namespace eyas;

namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Anything = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
struct Owned {  // uninitialised memory that becomes a numpy array
  T* data;
  explicit Owned(size_t n) : data(static_cast<T*>(std::malloc(std::max<size_t>(1, n * sizeof(T))))) {
    if (!data) throw std::bad_alloc();
  }
  ~Owned() { std::free(data); }
  template <class... Size>
  nb::ndarray<nb::numpy, T> array(Size... sizes) {
    T* p = data;
    data = nullptr;
    nb::capsule owner(p, [](void* q) noexcept { std::free(q); });
    return nb::ndarray<nb::numpy, T>(p, {size_t(sizes)...}, owner);
  }
};

Type parse_type(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "bfloat16") return Type::bf16;
  if (name == "int8" || name == "q4") return Type::int8;  // q4 keeps GGUF blocks; what has none becomes int8
  throw std::invalid_argument("unknown weight type '" + name + "'; there are float32, bfloat16, int8 and q4");
}

Type parse_block_type(const std::string& name) {
  if (name == "Q8_0") return Type::q8_0;
  if (name == "Q4_1") return Type::q4_1;
  if (name == "Q4_0") return Type::q4_0;
  throw std::invalid_argument("block type " + name + "; supported: Q4_0, Q4_1, Q8_0");
}

// A weight in the mapping: a float32 or uint16 (bf16) array of one or two dimensions, or GGUF blocks as a tuple
// (type name, uint8 array [rows, bytes], columns).
struct Held {
  nb::object keep;
  Anything array;
  Source source;
};

class Weights {
 public:
  explicit Weights(nb::object mapping) : mapping_(std::move(mapping)) {}
  bool has(const std::string& name) const { return nb::cast<bool>(mapping_.attr("__contains__")(name)); }

  Held get(const std::string& name, int rows, int cols) const {
    if (!has(name)) throw std::invalid_argument("weight '" + name + "' is missing");
    Held held;
    held.keep = mapping_[nb::str(name.c_str())];
    nb::object array = held.keep;
    Source source{};
    if (nb::isinstance<nb::tuple>(held.keep)) {
      nb::tuple parts = nb::cast<nb::tuple>(held.keep);
      source.kind = Source::blocks;
      try {
        source.type = parse_block_type(nb::cast<std::string>(parts[0]));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("weight '" + name + "' has " + error.what());
      }
      array = parts[1];
      source.cols = nb::cast<int>(parts[2]);
    }
    held.array = nb::cast<Anything>(array);
    source.data = held.array.data();
    source.rows = held.array.ndim() == 2 ? int(held.array.shape(0)) : 1;
    const int last = int(held.array.shape(held.array.ndim() - 1));
    if (source.kind == Source::blocks) {
      if (held.array.dtype() != nb::dtype<uint8_t>() || source.cols % 32 || size_t(last) != source.row_bytes())
        throw std::invalid_argument("weight '" + name + "': blocks must be a uint8 array [rows, bytes per row]");
    } else {
      source.cols = last;
      if (held.array.dtype() == nb::dtype<float>())
        source.kind = Source::f32;
      else if (held.array.dtype() == nb::dtype<uint16_t>())
        source.kind = Source::bf16;
      else
        throw std::invalid_argument("weight '" + name + "' must be float32, or bfloat16 as uint16");
    }
    if (source.rows != rows || source.cols != cols)
      throw std::invalid_argument("weight '" + name + "' has shape [" + std::to_string(source.rows) + ", " +
                                  std::to_string(source.cols) + "], expected [" + std::to_string(rows) + ", " +
                                  std::to_string(cols) + "]");
    held.source = source;
    return held;
  }

  Buffer<float> vector(const std::string& name, int n) const {
    Held held = get(name, 1, n);
    if (held.source.kind == Source::blocks) throw std::invalid_argument("weight '" + name + "' cannot be quantised");
    Buffer<float> out(n);
    held.source.read_row(0, out.get());
    return out;
  }

 private:
  nb::object mapping_;
};

template <class T>
T setting(const nb::dict& config, const char* name) {
  if (!config.contains(name)) throw std::invalid_argument(std::string("config lacks '") + name + "'");
  return nb::cast<T>(config[name]);
}

Config read_config(const nb::dict& d) {
  Config c;
  c.hidden = setting<int>(d, "hidden_size");
  c.layers = setting<int>(d, "num_hidden_layers");
  c.heads = setting<int>(d, "num_attention_heads");
  c.kv_heads = setting<int>(d, "num_key_value_heads");
  c.head_dim = setting<int>(d, "head_dim");
  c.mlp = setting<int>(d, "intermediate_size");
  c.vocab = setting<int>(d, "vocab_size");
  c.max_positions = setting<int>(d, "max_position_embeddings");
  c.eps = setting<float>(d, "rms_norm_eps");
  c.inv_freq = setting<std::vector<float>>(d, "inv_freq");
  c.rope_scale = setting<float>(d, "rope_scale");
  if (c.hidden < 1 || c.layers < 1 || c.heads < 1 || c.kv_heads < 1 || c.heads % c.kv_heads || c.head_dim < 1 ||
      c.mlp < 1 || c.vocab < 1 || int(c.inv_freq.size()) * 2 > c.head_dim)
    throw std::invalid_argument("config sizes do not fit together");
  return c;
}

class Loader {
 public:
  Loader(const Kernels& kernels, Pool& pool, Arena& arena, nb::object weights, const std::string& type)
      : kernels_(kernels), pool_(pool), arena_(arena), weights_(std::move(weights)), type_(parse_type(type)), keep_blocks_(type == "q4") {}
  const Weights& weights() const { return weights_; }

  struct Part {
    std::string name;
    int rows;
  };
  Linear linear(const std::vector<Part>& parts, int cols, bool interleave = false) const {
    return linear(parts, cols, type_, interleave);
  }
  Linear linear(const std::vector<Part>& parts, int cols, Type type, bool interleave) const {
    std::vector<Held> held;
    std::vector<Source> sources;
    for (const Part& part : parts) {
      held.push_back(weights_.get(part.name, part.rows, cols));
      sources.push_back(held.back().source);
    }
    nb::gil_scoped_release released;
    return Linear(kernels_, pool_, arena_, sources, type, keep_blocks_, interleave);
  }
  // Bias of stacked parts, laid out like the outputs of their Linear; empty when the first part has none.
  Buffer<float> bias(const std::vector<Part>& parts) const {
    if (!weights_.has(parts[0].name)) return {};
    int total = 0;
    for (const Part& part : parts) total += round_up(part.rows, kernels_.panel_cols);
    Buffer<float> out(total);
    int at = 0;
    for (const Part& part : parts) {
      Buffer<float> values = weights_.vector(part.name, part.rows);
      std::copy_n(values.get(), part.rows, out.get() + at);
      at += round_up(part.rows, kernels_.panel_cols);
    }
    return out;
  }

  // `reads`: what queries, keys and values take in.
  Layer layer(const std::string& prefix, const Config& c, bool has_input_norm, int reads) const {
    Layer layer;
    const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    if (has_input_norm) layer.input_norm = weights_.vector(prefix + "input_layernorm.weight", c.hidden);
    layer.post_norm = weights_.vector(prefix + "post_attention_layernorm.weight", c.hidden);
    if (weights_.has(attention + "q_norm.weight")) {
      layer.q_norm = weights_.vector(attention + "q_norm.weight", c.head_dim);
      layer.k_norm = weights_.vector(attention + "k_norm.weight", c.head_dim);
    }
    layer.qkv = linear({{attention + "q_proj.weight", q}, {attention + "k_proj.weight", kv}, {attention + "v_proj.weight", kv}}, reads);
    layer.k_at = round_up(q, kernels_.panel_cols);
    layer.v_at = layer.k_at + round_up(kv, kernels_.panel_cols);
    layer.qkv_bias = bias({{attention + "q_proj.bias", q}, {attention + "k_proj.bias", kv}, {attention + "v_proj.bias", kv}});
    layer.o = linear({{attention + "o_proj.weight", c.hidden}}, q);
    layer.o_bias = bias({{attention + "o_proj.bias", c.hidden}});
    layer.gate_up = linear({{mlp + "gate_proj.weight", c.mlp}, {mlp + "up_proj.weight", c.mlp}}, c.hidden, true);
    layer.down = linear({{mlp + "down_proj.weight", c.hidden}}, c.mlp);
    return layer;
  }

 private:
  const Kernels& kernels_;
  Pool& pool_;
  Arena& arena_;
  Weights weights_;
  Type type_;
  bool keep_blocks_;
};

const Kernels& kernels_named(const std::string& name) {
  const Kernels* kernels = select_kernels(name.c_str());
  if (!kernels) throw std::invalid_argument("no kernel set '" + name + "' runs on this processor");
  return *kernels;
}

std::shared_ptr<Model> make_model(nb::dict config, nb::object weights, const std::string& type, std::shared_ptr<Pool> pool,
                                  std::vector<int> feature_layers, const std::string& kernel_set) {
  const Kernels& kernels = kernels_named(kernel_set);
  auto model = std::make_shared<Model>(kernels, pool, read_config(config));
  const Config& c = model->config();
  Loader loader(kernels, *pool, model->arena, weights, type);
  for (int l = 0; l < c.layers; ++l)
    model->decoder.layers.push_back(loader.layer("model.layers." + std::to_string(l) + ".", c, true, c.hidden));
  model->norm = loader.weights().vector("model.norm.weight", c.hidden);
  const bool untied = loader.weights().has("lm_head.weight");
  model->lm_head = loader.linear({{untied ? "lm_head.weight" : "model.embed_tokens.weight", c.vocab}}, c.hidden);
  if (untied) {
    Type table = parse_type(type) == Type::f32 ? Type::f32 : Type::bf16;
    model->embedding = loader.linear({{"model.embed_tokens.weight", c.vocab}}, c.hidden, table, false);
  }
  if (feature_layers.empty() || !std::is_sorted(feature_layers.begin(), feature_layers.end()))
    throw std::invalid_argument("feature layers are given in ascending order, at least one");
  for (int l : feature_layers)
    if (l < 0 || l > c.layers) throw std::invalid_argument("feature layer " + std::to_string(l) + " does not exist");
  model->feature_layers = std::move(feature_layers);
  return model;
}

// Several trees in one pass. tokens and parents are concatenated, counts says how many nodes each cache's tree has;
// parents are indices within a tree; None means chains. logits: "all", "last" (of each tree) or "none" computes them
// for those rows and returns them; "argmax" computes all rows but keeps only the argmax.
nb::tuple forward(Model& model, const std::vector<std::shared_ptr<Cache>>& caches, Array1<int64_t> tokens,
                  std::optional<Array1<int64_t>> parents, Array1<int64_t> counts, const std::string& logits, bool want_features) {
  const Config& c = model.config();
  if (caches.empty() || counts.size() != caches.size()) throw std::invalid_argument("one count per cache is needed");
  const bool all = logits == "all" || logits == "argmax", last = logits == "last";
  if (!all && !last && logits != "none") throw std::invalid_argument("logits must be all, last, argmax or none");
  if (parents && parents->size() != tokens.size()) throw std::invalid_argument("one parent per token is needed");
  size_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts(i) < 1) throw std::invalid_argument("a tree has at least one node");
    total += size_t(counts(i));
  }
  if (total != tokens.size()) throw std::invalid_argument("counts do not add up to the number of tokens");
  for (size_t i = 0; i < total; ++i)
    if (tokens(i) < 0 || tokens(i) >= c.vocab)
      throw std::invalid_argument("token " + std::to_string(tokens(i)) + " is outside the vocabulary of " + std::to_string(c.vocab));
  for (size_t i = 0; i < caches.size(); ++i) {
    if (!(caches[i]->shape() == model.decoder.cache_shape())) throw std::invalid_argument("a cache belongs to another model");
    for (size_t j = 0; j < i; ++j)
      if (caches[i] == caches[j]) throw std::invalid_argument("a cache appears twice in one pass");
  }
  Rows rows;
  std::vector<int> wanted;
  size_t first = 0;
  for (size_t i = 0; i < caches.size(); ++i) {
    const int n = int(counts(i));
    const int64_t* up = parents ? parents->data() + first : nullptr;
    if (up)
      for (int j = 0; j < n; ++j)
        if (j == 0 ? up[0] != -1 : up[j] < 0 || up[j] >= j)
          throw std::invalid_argument("parents must start with -1 and point to earlier nodes");
    rows.add_tree(*caches[i], up, n);
    for (int j = 0; j < n; ++j)
      if (rows.position[first + j] >= c.max_positions)
        throw std::invalid_argument("position " + std::to_string(rows.position[first + j]) + " is beyond the context of " +
                                    std::to_string(c.max_positions));
    if (all)
      for (int j = 0; j < n; ++j) wanted.push_back(int(first) + j);
    if (last) wanted.push_back(int(first) + n - 1);
    first += size_t(n);
  }
  for (size_t i = 0; i < caches.size(); ++i) caches[i]->reserve(int(counts(i)));
  const bool keep = logits == "all" || last;
  Owned<float> logit_array(keep ? wanted.size() * size_t(c.vocab) : 0);
  Owned<int64_t> argmax(wanted.size());
  Owned<float> features(want_features ? total * size_t(model.feature_size()) : 0);
  {
    nb::gil_scoped_release released;
    model.forward(rows, tokens.data(), wanted, keep ? logit_array.data : nullptr, argmax.data,
                  want_features ? features.data : nullptr);
  }
  return nb::make_tuple(keep ? nb::cast(logit_array.array(wanted.size(), c.vocab)) : nb::none(),
                        argmax.array(wanted.size()),
                        want_features ? nb::cast(features.array(total, model.feature_size())) : nb::none());
}

void load_eagle3(Head& head, const Loader& loader, const std::string& type, const std::optional<Array1<int64_t>>& token_ids) {
  const Config& c = head.decoder.config;
  // Hidden states of inner layers have few huge numbers among small ones, which one scale per row cannot hold.
  const Type fc_type = parse_type(type) == Type::f32 ? Type::f32 : Type::bf16;
  head.fc = loader.linear({{"fc.weight", c.hidden}}, 3 * c.hidden, fc_type, false);
  Layer layer = loader.layer("midlayer.", c, false, 2 * c.hidden);
  layer.embedding_norm = loader.weights().vector("midlayer.input_layernorm.weight", c.hidden);
  layer.input_norm = loader.weights().vector("midlayer.hidden_norm.weight", c.hidden);
  head.decoder.layers.push_back(std::move(layer));
  head.norm = loader.weights().vector("norm.weight", c.hidden);
  head.own_lm_head = loader.linear({{"lm_head.weight", token_ids ? int(token_ids->size()) : c.vocab}}, c.hidden);
  for (size_t i = 0; token_ids && i < token_ids->size(); ++i) {
    const int64_t id = (*token_ids)(i);
    if (id < 0 || id >= c.vocab) throw std::invalid_argument("draft token " + std::to_string(id) + " is outside the vocabulary");
    head.token_ids.push_back(id);
  }
}

std::shared_ptr<Head> make_head(std::shared_ptr<Model> target, nb::dict config, nb::object weights, const std::string& type,
                                std::optional<Array1<int64_t>> token_ids) {
  const Kernels& kernels = target->decoder.kernels;
  Pool& pool = *target->pool;
  auto head = std::make_shared<Head>(target, read_config(config));
  const Config& c = head->decoder.config;
  if (c.hidden != target->config().hidden || c.vocab != target->config().vocab)
    throw std::invalid_argument("the head's hidden and vocabulary sizes must be the target's");
  Loader loader(kernels, pool, head->arena, weights, type);
  if (loader.weights().has("midlayer.hidden_norm.weight")) {
    if (c.layers != 1) throw std::invalid_argument("an EAGLE-3 head has one layer");
    load_eagle3(*head, loader, type, token_ids);
    return head;
  }
  head->fc = loader.linear({{"fc.weight", c.hidden}}, 2 * c.hidden);
  head->fc_bias = loader.bias({{"fc.bias", c.hidden}});
  for (int l = 0; l < c.layers; ++l)
    head->decoder.layers.push_back(loader.layer("layers." + std::to_string(l) + ".", c, l > 0, c.hidden));
  if (token_ids) {
    const int n = int(token_ids->size());
    if (n < 1) throw std::invalid_argument("a draft vocabulary has at least one token");
    std::vector<float> rows(size_t(n) * c.hidden);
    for (int i = 0; i < n; ++i) {
      const int64_t id = (*token_ids)(i);
      if (id < 0 || id >= c.vocab) throw std::invalid_argument("draft token " + std::to_string(id) + " is outside the vocabulary");
      head->token_ids.push_back(id);
      target->lm_head.unpack(int(id), rows.data() + size_t(i) * c.hidden);
    }
    Source source{Source::f32, Type::f32, rows.data(), n, c.hidden};
    head->own_lm_head = Linear(kernels, pool, head->arena, {source}, parse_type(type), false);
  }
  return head;
}

struct Children {  // [n, k] ids and log-probabilities on their way to Python
  Owned<int64_t> ids;
  Owned<float> log_probs;
  int n, k;
  Children(int n, int k) : ids(size_t(n) * k), log_probs(size_t(n) * k), n(n), k(k) {
    if (k < 1) throw std::invalid_argument("k must be at least 1");
  }
  nb::tuple tuple() { return nb::make_tuple(ids.array(n, k), log_probs.array(n, k)); }
};
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_tokens(const HeadSession& session, Array1<int64_t> tokens) {
  const int vocab = session.head().decoder.config.vocab;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens(i) < 0 || tokens(i) >= vocab) throw std::invalid_argument("token " + std::to_string(tokens(i)) + " is outside the vocabulary");
}

nb::tuple commit_pairs(HeadSession& session, Array1<int64_t> tokens, Matrix features, int k) {
  check_tokens(session, tokens);
  if (tokens.size() < 1 || features.shape(0) != tokens.size() || int(features.shape(1)) != session.head().feature_size())
    throw std::invalid_argument("n >= 1 tokens need features [n, " + std::to_string(session.head().feature_size()) + "]");
  Children children(1, k);
  {
    nb::gil_scoped_release released;
    session.commit(tokens.data(), features.data(), int(tokens.size()), k, children.ids.data, children.log_probs.data);
  }
  return children.tuple();
}

nb::tuple score_tip(HeadSession& session, int k) {
  Children children(1, k);
  {
    nb::gil_scoped_release released;
    session.score_tip(k, children.ids.data, children.log_probs.data);
  }
  return children.tuple();
}

nb::tuple expand(HeadSession& session, Array1<int64_t> tokens, Array1<int64_t> parents, int depth, int k) {
  check_tokens(session, tokens);
  if (tokens.size() < 1 || parents.size() != tokens.size()) throw std::invalid_argument("one parent per token is needed");
  Children children(int(tokens.size()), k);
  {
    nb::gil_scoped_release released;
    session.expand(tokens.data(), parents.data(), int(tokens.size()), depth, k, children.ids.data, children.log_probs.data);
  }
  return children.tuple();
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes per second that all threads together read from a buffer of `megabytes`, best of `repeats`.
double read_bandwidth(Pool& pool, int megabytes, int repeats) {
  const Kernels& kernels = kernels_named("");
  const size_t n = size_t(megabytes) << 18;
  Buffer<float> buffer(n);
  double best = 0;
  std::vector<float> sums(size_t(pool.threads()));
  auto job = [&](int thread) {
    const size_t begin = n / pool.threads() * thread / 64 * 64, end = n / pool.threads() * (thread + 1) / 64 * 64;
    sums[thread] += kernels.sum(buffer.get() + begin, end - begin);
  };
  for (int r = 0; r < repeats; ++r) {
    auto start = std::chrono::steady_clock::now();
    pool.run(job);
    best = std::max(best, double(n) * 4 / seconds_since(start));
  }
  return best;
}

// Floating-point operations per second of all threads together, best of `repeats`.
double peak_flops(Pool& pool, int64_t steps, int repeats) {
  const Kernels& kernels = kernels_named("");
  double best = 0;
  std::vector<double> done(size_t(pool.threads()));
  auto job = [&](int thread) { done[thread] = kernels.burn(steps); };
  for (int r = 0; r < repeats; ++r) {
    auto start = std::chrono::steady_clock::now();
    pool.run(job);
    double total = 0;
    for (double d : done) total += d;
    best = std::max(best, total / seconds_since(start));
  }
  return best;
}

}  // namespace

NB_MODULE(_core, m) {
  m.def("kernel_sets", [] {
    const char* names[8];
    int n = list_kernels(names, 8);
    return std::vector<std::string>(names, names + n);
  }, "Kernel sets this processor can run, best first.");

  m.def("packed_bytes", [](const std::string& type, int64_t rows, int64_t cols, const std::string& kernels) {
    if (std::min(rows, cols) < 0 || std::max(rows, cols) > std::numeric_limits<int>::max() / 2)
      throw std::invalid_argument("a matrix of " + std::to_string(rows) + " by " + std::to_string(cols) + " is too large");
    const Type packed = type[0] == 'Q' ? parse_block_type(type) : parse_type(type);
    return Linear::packed_bytes(kernels_named(kernels), packed, int(rows), int(cols));
  }, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("kernels") = "",
     "Bytes of one matrix in a weight type of the engine or a GGUF block type.");

  m.def("read_bandwidth", &read_bandwidth, nb::arg("pool"), nb::arg("megabytes") = 256, nb::arg("repeats") = 5,
        nb::call_guard<nb::gil_scoped_release>(), "Bytes per second read by all threads of the pool.");
  m.def("peak_flops", &peak_flops, nb::arg("pool"), nb::arg("steps") = 2000000, nb::arg("repeats") = 5,
        nb::call_guard<nb::gil_scoped_release>(), "Floating-point operations per second of all threads of the pool.");

  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &Pool::threads);

  nb::class_<Cache>(m, "Cache")
      .def_prop_ro("length", &Cache::length)
      .def_prop_ro("provisional", &Cache::provisional)
      .def_prop_ro("nbytes", &Cache::bytes)
      .def("commit", &Cache::commit, nb::arg("path"))
      .def("commit_all", [](Cache& c) {
        std::vector<int> path(c.provisional());
        for (int i = 0; i < int(path.size()); ++i) path[i] = i;
        c.commit(path);
      })
      .def("truncate", &Cache::truncate, nb::arg("length"))
      .def("fork", [](const Cache& c) { return std::make_shared<Cache>(c.fork()); });

  nb::class_<Model>(m, "Model")
      .def_static("load", &make_model, nb::arg("config"), nb::arg("weights"), nb::arg("type"), nb::arg("pool"),
                  nb::arg("feature_layers"), nb::arg("kernels") = "")
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("streamed_bytes", &Model::streamed_bytes)
      .def_prop_ro("multiplications", &Model::multiplications)
      .def_prop_ro("cache_token_bytes", [](const Model& model) { return model.decoder.cache_shape().page_floats() / kPageTokens * sizeof(float); })
      .def_prop_ro("kernels", [](const Model& model) { return model.decoder.kernels.name; })
      .def("new_cache", [](const Model& model) { return std::make_shared<Cache>(model.decoder.cache_shape()); })
      .def("forward", &forward, nb::arg("caches"), nb::arg("tokens"), nb::arg("parents").none(), nb::arg("counts"),
           nb::arg("logits") = "all", nb::arg("features") = true);

  nb::class_<Head>(m, "Head")
      .def_static("load", &make_head, nb::arg("target"), nb::arg("config"), nb::arg("weights"), nb::arg("type"),
                  nb::arg("token_ids").none())
      .def_prop_ro("weight_bytes", &Head::weight_bytes)
      .def_prop_ro("draft_vocab", &Head::draft_vocab)
      .def("new_session", [](std::shared_ptr<Head> head) { return std::make_shared<HeadSession>(head); });

  nb::class_<HeadSession>(m, "HeadSession")
      .def_prop_ro("length", &HeadSession::length)
      .def_prop_ro("has_tip", &HeadSession::has_tip)
      .def_prop_ro("tree_rows", &HeadSession::tree_rows)
      .def("commit", &commit_pairs, nb::arg("tokens"), nb::arg("features"), nb::arg("k"))
      .def("score_tip", &score_tip, nb::arg("k"))
      .def("expand", &expand, nb::arg("tokens"), nb::arg("parents"), nb::arg("depth"), nb::arg("k"))
      .def("truncate", &HeadSession::truncate, nb::arg("length"));
}
