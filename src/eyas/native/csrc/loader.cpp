#include "loader.h"

#include <algorithm>
#include <stdexcept>

namespace eyas {

namespace {

// Beside weights of a type, that of keys and values, and of matrices that integers with a scale per group cannot hold.
Type float_type(Type weights) { return weights == Type::f32 ? Type::f32 : Type::bf16; }

// Matrices and layers by name, into the memory of one model or head.
class Loader {
 public:
  Loader(const Kernels& kernels, Pool& pool, Arena& arena, nb::object weights, const std::string& type)
      : kernels_(kernels),
        pool_(pool),
        arena_(arena),
        weights_(std::move(weights)),
        type_(parse_type(type)),
        keep_blocks_(type == "q4") {}
  const Weights& weights() const { return weights_; }
  Type type() const { return type_; }

  struct Part {
    std::string name;
    int rows;
  };
  Linear linear(const std::vector<Part>& parts, int cols, bool interleave = false) const {
    return linear(parts, cols, type_, interleave);
  }
  Linear linear(const std::vector<Part>& parts, int cols, Type type, bool interleave) const;
  // Of weights at hand.
  Linear linear(const Source& source) const { return Linear(kernels_, pool_, arena_, {source}, type_, false); }
  // Bias of stacked parts, laid out like the outputs of their Linear; empty when the first part has none.
  Buffer<float> bias(const std::vector<Part>& parts) const;
  // `reads`: what queries, keys and values take in.
  Layer layer(const std::string& prefix, const Config& c, bool has_input_norm, int reads) const;

 private:
  const Kernels& kernels_;
  Pool& pool_;
  Arena& arena_;
  Weights weights_;
  Type type_;
  bool keep_blocks_;
};

Linear Loader::linear(const std::vector<Part>& parts, int cols, Type type, bool interleave) const {
  std::vector<Held> held;
  std::vector<Source> sources;
  for (const Part& part : parts) {
    held.push_back(weights_.get(part.name, part.rows, cols));
    sources.push_back(held.back().source);
  }
  nb::gil_scoped_release released;
  return Linear(kernels_, pool_, arena_, sources, type, keep_blocks_, interleave);
}

Buffer<float> Loader::bias(const std::vector<Part>& parts) const {
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

Layer Loader::layer(const std::string& prefix, const Config& c, bool has_input_norm, int reads) const {
  Layer layer;
  const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  if (has_input_norm) layer.input_norm = weights_.vector(prefix + "input_layernorm.weight", c.hidden);
  layer.post_norm = weights_.vector(prefix + "post_attention_layernorm.weight", c.hidden);
  if (weights_.has(attention + "q_norm.weight")) {
    layer.q_norm = weights_.vector(attention + "q_norm.weight", c.head_dim);
    layer.k_norm = weights_.vector(attention + "k_norm.weight", c.head_dim);
  }
  layer.qkv = linear(
      {{attention + "q_proj.weight", q}, {attention + "k_proj.weight", kv}, {attention + "v_proj.weight", kv}}, reads);
  layer.k_at = round_up(q, kernels_.panel_cols);
  layer.v_at = layer.k_at + round_up(kv, kernels_.panel_cols);
  layer.qkv_bias =
      bias({{attention + "q_proj.bias", q}, {attention + "k_proj.bias", kv}, {attention + "v_proj.bias", kv}});
  layer.o = linear({{attention + "o_proj.weight", c.hidden}}, q);
  layer.o_bias = bias({{attention + "o_proj.bias", c.hidden}});
  layer.gate_up = linear({{mlp + "gate_proj.weight", c.mlp}, {mlp + "up_proj.weight", c.mlp}}, c.hidden, true);
  layer.down = linear({{mlp + "down_proj.weight", c.hidden}}, c.mlp);
  return layer;
}

std::vector<int64_t> checked_ids(const Array1<int64_t>& token_ids, int vocab) {
  if (token_ids.size() < 1) throw std::invalid_argument("a draft vocabulary has at least one token");
  for (size_t i = 0; i < token_ids.size(); ++i)
    if (token_ids(i) < 0 || token_ids(i) >= vocab)
      throw std::invalid_argument("draft token " + std::to_string(token_ids(i)) + " is outside the vocabulary");
  return {token_ids.data(), token_ids.data() + token_ids.size()};
}

// The target's rows of a draft vocabulary; of the whole one the target's lm_head itself scores.
void take_target_rows(Head& head, const Loader& loader) {
  if (head.token_ids.empty()) return;
  const int hidden = head.decoder.config.hidden;
  std::vector<float> rows(head.token_ids.size() * hidden);
  for (size_t i = 0; i < head.token_ids.size(); ++i)
    head.target->lm_head.unpack(int(head.token_ids[i]), rows.data() + i * hidden);
  head.own_lm_head = loader.linear({Source::f32, Type::f32, rows.data(), head.draft_vocab(), hidden});
}

void load_eagle(Head& head, const Loader& loader) {
  const Config& c = head.decoder.config;
  head.fc = loader.linear({{"fc.weight", c.hidden}}, 2 * c.hidden);
  head.fc_bias = loader.bias({{"fc.bias", c.hidden}});
  for (int l = 0; l < c.layers; ++l)
    head.decoder.layers.push_back(loader.layer("layers." + std::to_string(l) + ".", c, l > 0, c.hidden));
  take_target_rows(head, loader);
}

void load_eagle3(Head& head, const Loader& loader) {
  const Config& c = head.decoder.config;
  // Hidden states of inner layers have few huge numbers among small ones, which one scale per row cannot hold.
  head.fc = loader.linear({{"fc.weight", c.hidden}}, 3 * c.hidden, float_type(loader.type()), false);
  Layer first = loader.layer("midlayer.", c, false, 2 * c.hidden);
  first.embedding_norm = loader.weights().vector("midlayer.input_layernorm.weight", c.hidden);
  first.input_norm = loader.weights().vector("midlayer.hidden_norm.weight", c.hidden);
  head.decoder.layers.push_back(std::move(first));
  for (int l = 1; l < c.layers; ++l)
    head.decoder.layers.push_back(loader.layer("layers." + std::to_string(l) + ".", c, true, c.hidden));
  head.norm = loader.weights().vector("norm.weight", c.hidden);
  if (loader.weights().has("lm_head.weight"))
    head.own_lm_head = loader.linear({{"lm_head.weight", head.draft_vocab()}}, c.hidden);
  else
    take_target_rows(head, loader);
}

}  // namespace

const Kernels& kernels_named(const std::string& name) {
  const Kernels* kernels = select_kernels(name.c_str());
  if (!kernels) throw std::invalid_argument("no kernel set '" + name + "' runs on this processor");
  return *kernels;
}

std::shared_ptr<Model> make_model(nb::dict config, nb::object weights, const std::string& type,
                                  std::shared_ptr<Pool> pool, std::vector<int> feature_layers,
                                  const std::string& kernel_set) {
  const Kernels& kernels = kernels_named(kernel_set);
  auto model = std::make_shared<Model>(kernels, pool, read_config(config, float_type(parse_type(type))));
  const Config& c = model->config();
  Loader loader(kernels, *pool, model->arena, weights, type);
  for (int l = 0; l < c.layers; ++l)
    model->decoder.layers.push_back(loader.layer("model.layers." + std::to_string(l) + ".", c, true, c.hidden));
  model->norm = loader.weights().vector("model.norm.weight", c.hidden);
  const bool untied = loader.weights().has("lm_head.weight");
  model->lm_head = loader.linear({{untied ? "lm_head.weight" : "model.embed_tokens.weight", c.vocab}}, c.hidden);
  if (untied)
    model->embedding = loader.linear({{"model.embed_tokens.weight", c.vocab}}, c.hidden, float_type(loader.type()), false);
  if (feature_layers.empty() || !std::is_sorted(feature_layers.begin(), feature_layers.end()))
    throw std::invalid_argument("feature layers are given in ascending order, at least one");
  for (int l : feature_layers)
    if (l < 0 || l > c.layers) throw std::invalid_argument("feature layer " + std::to_string(l) + " does not exist");
  model->feature_layers = std::move(feature_layers);
  return model;
}

std::shared_ptr<Head> make_head(std::shared_ptr<Model> target, nb::dict config, nb::object weights,
                                const std::string& type, std::optional<Array1<int64_t>> token_ids) {
  auto head = std::make_shared<Head>(target, read_config(config, target->config().cache));
  const Config& c = head->decoder.config;
  if (c.hidden != target->config().hidden || c.vocab != target->config().vocab)
    throw std::invalid_argument("the head's hidden and vocabulary sizes must be the target's");
  if (token_ids) head->token_ids = checked_ids(*token_ids, c.vocab);
  Loader loader(target->decoder.kernels, *target->pool, head->arena, weights, type);
  if (loader.weights().has("midlayer.hidden_norm.weight"))
    load_eagle3(*head, loader);
  else
    load_eagle(*head, loader);
  return head;
}

}  // namespace eyas
