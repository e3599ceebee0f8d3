#include "weights.h"

#include <stdexcept>

namespace eyas {

namespace {

template <class T>
T setting(const nb::dict& config, const char* name) {
  if (!config.contains(name)) throw std::invalid_argument(std::string("config lacks '") + name + "'");
  return nb::cast<T>(config[name]);
}

}  // namespace

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

Config read_config(const nb::dict& d, Type cache) {
  Config c;
  c.cache = cache;
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

bool Weights::has(const std::string& name) const { return nb::cast<bool>(mapping_.attr("__contains__")(name)); }

Held Weights::get(const std::string& name, int rows, int cols) const {
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

Buffer<float> Weights::vector(const std::string& name, int n) const {
  Held held = get(name, 1, n);
  if (held.source.kind == Source::blocks) throw std::invalid_argument("weight '" + name + "' cannot be quantised");
  Buffer<float> out(n);
  held.source.read_row(0, out.get());
  return out;
}

}  // namespace eyas
