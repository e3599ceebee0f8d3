// Python's view of the engine: Pool, Cache, Model, Head. Arrays in, arrays out; the GIL is released while computing.
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "arrays.h"
#include "loader.h"
#include "measure.h"

using namespace eyas;

namespace {

// The beginning of numpy's bitgen_t (numpy/random/bitgen.h), part of its stable interface.
struct bitgen {
  void* state;
  uint64_t (*next_uint64)(void* state);
  uint32_t (*next_uint32)(void* state);
  double (*next_double)(void* state);
};

// Several trees in one pass. tokens and parents are concatenated, counts says how many nodes each cache's tree has;
// parents are indices within a tree; None means chains. logits: "all", "last" (of each tree) or "none" computes them
// for those rows and returns them; "argmax" computes all rows but keeps only the argmax.
nb::tuple forward(Model& model, const std::vector<std::shared_ptr<Cache>>& caches, Array1<int64_t> tokens,
                  std::optional<Array1<int64_t>> parents, Array1<int64_t> counts, const std::string& logits,
                  bool want_features) {
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
      throw std::invalid_argument("token " + std::to_string(tokens(i)) + " is outside the vocabulary of " +
                                  std::to_string(c.vocab));
  for (size_t i = 0; i < caches.size(); ++i) {
    if (!(caches[i]->shape() == model.decoder.cache_shape()))
      throw std::invalid_argument("a cache belongs to another model");
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
        throw std::invalid_argument("position " + std::to_string(rows.position[first + j]) +
                                    " is beyond the context of " + std::to_string(c.max_positions));
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

using DrawnChildren = std::tuple<int, Array1<float>, std::optional<Array1<int64_t>>, std::vector<int64_t>, std::vector<int64_t>>;

// Sampled verification of a tree: (path, next token, recovered). proposals: (node, weights, token ids or None, tokens,
// places) of each node whose children were drawn. bits: a numpy bit generator's capsule, which nobody else uses meanwhile.
nb::tuple verify_sampled_tree(Model& model, Matrix logits, Array1<int64_t> tokens, Array1<int64_t> parents,
                              const std::vector<DrawnChildren>& proposals, float temperature, nb::capsule bits) {
  const int64_t vocab = model.config().vocab;
  const size_t nodes = tokens.size();
  if (logits.shape(0) != nodes || parents.size() != nodes || int64_t(logits.shape(1)) != vocab || !(temperature > 0))
    throw std::invalid_argument("a sampled tree needs a row of logits and a parent per token, and a temperature above 0");
  auto within = [](const int64_t* values, size_t count, int64_t end) {
    return std::all_of(values, values + count, [&](int64_t value) { return value >= 0 && value < end; });
  };
  std::map<int, Proposal> drawn;
  const int64_t* known = nullptr;  // ids already looked at: mostly those of all proposals
  for (const auto& [node, weights, ids, drawn_tokens, places] : proposals) {
    const int64_t* own = ids ? ids->data() : nullptr;
    if (drawn_tokens.size() != places.size() || !within(places.data(), places.size(), int64_t(weights.size())) ||
        (ids ? ids->size() != weights.size() || (own != known && !within(own, ids->size(), vocab))
             : int64_t(weights.size()) > vocab))
      throw std::invalid_argument("a proposal's tokens do not fit its weights");
    known = own;
    drawn[node] = {weights.data(), own, int(weights.size()), drawn_tokens, places};
  }
  if (!within(tokens.data(), nodes, vocab)) throw std::invalid_argument("a token is outside the vocabulary");
  const auto* generator = static_cast<const bitgen*>(bits.data("BitGenerator"));
  Acceptance result;
  {
    nb::gil_scoped_release released;
    result = model.verify_sampled(logits.data(), tokens.data(), parents.data(), int(nodes), drawn, temperature,
                                  {generator->next_double, generator->state});
  }
  return nb::make_tuple(result.path, result.next_token, result.recovered);
}

using Uniforms = std::optional<nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

// Scores on their way to Python: ([n, k] ids, [n, k] log-probabilities); of draws ([n, k] places, [n, draft vocab]
// weights, [n, 1] probabilities of the likeliest); [n, draft vocab] raw scores where k is 0.
class ScoresOut {
 public:
  ScoresOut(const Head& head, int n, int k, const Uniforms& uniforms, float temperature)
      : n_(n), k_(k), vocab_(head.draft_vocab()), drawn_(uniforms && k), temperature_(temperature),
        uniforms_(drawn_ ? uniforms->data() : nullptr), tokens_(size_t(n) * positive(k)), log_probs_(drawn_ ? size_t(n) : size_t(n) * k),
        all_(k && !drawn_ ? 0 : size_t(n) * vocab_) {
    if (drawn_ && (int(uniforms->shape(0)) != n || int(uniforms->shape(1)) != k || !(temperature > 0)))
      throw std::invalid_argument("draws need uniforms [rows, k] and a temperature above 0");
  }
  Scores scores() { return {k_, tokens_.data, log_probs_.data, all_.data, uniforms_, temperature_}; }
  nb::object object() {
    if (drawn_) return nb::make_tuple(tokens_.array(n_, k_), all_.array(n_, vocab_), log_probs_.array(n_, 1));
    if (k_) return nb::make_tuple(tokens_.array(n_, k_), log_probs_.array(n_, k_));
    return nb::cast(all_.array(n_, vocab_));
  }

 private:
  static int positive(int k) {
    if (k < 0) throw std::invalid_argument("k must be at least 0");
    return k;
  }
  int n_, k_, vocab_;
  bool drawn_;
  float temperature_;
  const double* uniforms_;
  Owned<int64_t> tokens_;
  Owned<float> log_probs_, all_;
};

void check_tokens(const HeadSession& session, Array1<int64_t> tokens) {
  const int vocab = session.head().decoder.config.vocab;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens(i) < 0 || tokens(i) >= vocab)
      throw std::invalid_argument("token " + std::to_string(tokens(i)) + " is outside the vocabulary");
}

void check_pairs(const HeadSession& session, Array1<int64_t> tokens, const std::optional<Matrix>& features) {
  check_tokens(session, tokens);
  const int size = session.head().feature_size();
  if (tokens.size() < 1 || !features || features->shape(0) != tokens.size() || int(features->shape(1)) != size)
    throw std::invalid_argument("n >= 1 tokens need features [n, " + std::to_string(size) + "]");
}

nb::object commit_pairs(HeadSession& session, Array1<int64_t> tokens, Matrix features, int k, const Uniforms& uniforms,
                        float temperature) {
  check_pairs(session, tokens, features);
  ScoresOut out(session.head(), 1, k, uniforms, temperature);
  {
    nb::gil_scoped_release released;
    session.commit(tokens.data(), features.data(), int(tokens.size()), out.scores());
  }
  return out.object();
}

nb::object score_tip(HeadSession& session, int k, const Uniforms& uniforms, float temperature) {
  ScoresOut out(session.head(), 1, k, uniforms, temperature);
  {
    nb::gil_scoped_release released;
    session.score_tip(out.scores());
  }
  return out.object();
}

nb::object expand(HeadSession& session, Array1<int64_t> tokens, Array1<int64_t> parents, int depth, int k,
                  const Uniforms& uniforms, float temperature) {
  check_tokens(session, tokens);
  if (tokens.size() < 1 || parents.size() != tokens.size())
    throw std::invalid_argument("one parent per token is needed");
  ScoresOut out(session.head(), int(tokens.size()), k, uniforms, temperature);
  {
    nb::gil_scoped_release released;
    session.expand(tokens.data(), parents.data(), int(tokens.size()), depth, out.scores());
  }
  return out.object();
}

template <class T>
nb::ndarray<nb::numpy, T> array(const std::vector<T>& values) {
  Owned<T> copy(values.size());
  std::copy(values.begin(), values.end(), copy.data);
  return copy.array(values.size());
}

// A tree below `root`, grown by the rule: its candidates as (tokens, parents, log_probs, log_values, ranks, levels), their
// calibrated values, and of drawn ones the nodes that have children, [nodes, topk] places, [nodes, draft vocab] weights.
// No tokens: no pair waits, the tip is scored again. With uniforms [max_depth, topk, topk] children are drawn.
nb::tuple grow(HeadSession& session, int64_t root, Array1<int64_t> tokens, std::optional<Matrix> features,
               const Rule& rule, int max_depth,
               std::optional<nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>> uniforms,
               float temperature, const std::vector<double>& confidence) {
  if (tokens.size()) check_pairs(session, tokens, features);
  const size_t k = size_t(rule.topk), vocab = size_t(session.head().draft_vocab());
  if (uniforms && (int(uniforms->shape(0)) < max_depth || uniforms->shape(1) != k || uniforms->shape(2) != k || !(temperature > 0) || confidence.size() != 3))
    throw std::invalid_argument("draws need uniforms [max_depth, topk, topk], a temperature above 0, and confidence [3]");
  const size_t room = uniforms && max_depth > 0 ? 1 + size_t(max_depth - 1) * k : 0;
  Owned<float> weights(room * vocab);
  Drawing drawing{uniforms ? uniforms->data() : nullptr, temperature, confidence.data(), weights.data};
  Candidates grown(root);
  std::vector<double> values;
  {
    nb::gil_scoped_release released;
    session.grow(tokens.data(), tokens.size() ? features->data() : nullptr, int(tokens.size()), rule, max_depth, grown,
                 values, uniforms ? &drawing : nullptr);
  }
  const size_t drawn = drawing.nodes.size();
  return nb::make_tuple(nb::make_tuple(array(grown.tokens), array(grown.parents), array(grown.log_probs),
                                       array(grown.log_values), array(grown.ranks), nb::tuple(nb::cast(grown.levels))),
                        array(values),
                        uniforms ? nb::cast(nb::make_tuple(array(drawing.nodes), array(drawing.places), weights.array(drawn, vocab)))
                                 : nb::none());
}

using Levels = std::vector<std::pair<std::vector<double>, std::vector<double>>>;  // (promised, observed) of each map

Calibration make_calibration(const Levels& levels) {
  std::vector<Calibration::Map> maps;
  for (const auto& [promised, observed] : levels) {
    if (promised.empty() || promised.size() != observed.size())
      throw std::invalid_argument("a calibration map needs as many acceptances as values, one at least");
    maps.push_back({promised, observed});
  }
  return Calibration(std::move(maps));
}

int checked_topk(int topk) {
  if (topk < 1) throw std::invalid_argument("topk must be at least 1");
  return topk;
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
      .def_prop_ro("cache_token_bytes", [](const Model& model) { return model.decoder.cache_shape().token_bytes(); })
      .def_prop_ro("kernels", [](const Model& model) { return model.decoder.kernels.name; })
      .def("new_cache", [](const Model& model) { return std::make_shared<Cache>(model.decoder.cache_shape()); })
      .def("forward", &forward, nb::arg("caches"), nb::arg("tokens"), nb::arg("parents").none(), nb::arg("counts"),
           nb::arg("logits") = "all", nb::arg("features") = true)
      .def("verify_sampled", &verify_sampled_tree, nb::arg("logits"), nb::arg("tokens"), nb::arg("parents"),
           nb::arg("proposals"), nb::arg("temperature"), nb::arg("bits"));

  nb::class_<Head>(m, "Head")
      .def_static("load", &make_head, nb::arg("target"), nb::arg("config"), nb::arg("weights"), nb::arg("type"),
                  nb::arg("token_ids").none())
      .def_prop_ro("weight_bytes", &Head::weight_bytes)
      .def_prop_ro("draft_vocab", &Head::draft_vocab)
      .def("new_session", [](std::shared_ptr<Head> head) { return std::make_shared<HeadSession>(head); });

  nb::class_<Rule>(m, "Rule");
  nb::class_<DynamicRule, Rule>(m, "DynamicRule")
      .def("__init__", [](DynamicRule* self, int topk, bool by_value, const Levels& calibration) {
        new (self) DynamicRule(checked_topk(topk), by_value, make_calibration(calibration));
      }, nb::arg("topk"), nb::arg("by_value"), nb::arg("calibration"));
  nb::class_<BudgetedRule, Rule>(m, "BudgetedRule")
      .def("__init__", [](BudgetedRule* self, int topk, const Levels& calibration,
                          const std::vector<std::vector<double>>& acceptance, const std::vector<double>& closing,
                          const std::vector<double>& level_ms, double first_ms, double floor, std::optional<double> rate,
                          bool drafts) {
        if (acceptance.empty() || closing.empty() || level_ms.size() != size_t(checked_topk(topk)) + 1)
          throw std::invalid_argument("a budgeted rule needs acceptance, closing costs, and topk + 1 costs of a level");
        new (self) BudgetedRule(topk, {acceptance, closing, level_ms, first_ms, floor, rate, drafts},
                                make_calibration(calibration));
      }, nb::arg("topk"), nb::arg("calibration"), nb::arg("acceptance"), nb::arg("closing"), nb::arg("level_ms"),
           nb::arg("first_ms"), nb::arg("floor"), nb::arg("rate").none(), nb::arg("drafts"));

  nb::class_<HeadSession>(m, "HeadSession")
      .def_prop_ro("length", &HeadSession::length)
      .def_prop_ro("has_tip", &HeadSession::has_tip)
      .def_prop_ro("tree_rows", &HeadSession::tree_rows)
      .def("commit", &commit_pairs, nb::arg("tokens"), nb::arg("features"), nb::arg("k"),
           nb::arg("uniforms") = nb::none(), nb::arg("temperature") = 1.0f)
      .def("score_tip", &score_tip, nb::arg("k"), nb::arg("uniforms") = nb::none(), nb::arg("temperature") = 1.0f)
      .def("expand", &expand, nb::arg("tokens"), nb::arg("parents"), nb::arg("depth"), nb::arg("k"),
           nb::arg("uniforms") = nb::none(), nb::arg("temperature") = 1.0f)
      .def("grow", &grow, nb::arg("root"), nb::arg("tokens"), nb::arg("features").none(), nb::arg("rule"), nb::arg("max_depth"),
           nb::arg("uniforms") = nb::none(), nb::arg("temperature") = 1.0f, nb::arg("confidence") = std::vector<double>{})
      .def("truncate", &HeadSession::truncate, nb::arg("length"));
}
