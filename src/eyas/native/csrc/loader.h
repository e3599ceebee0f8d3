// Packs the weights of models and heads by the names that checkpoints give them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "head.h"
#include "weights.h"

namespace eyas {

// The kernel set of that name, the best one for "". Throws std::invalid_argument where it does not run.
const Kernels& kernels_named(const std::string& name);

// Both throw std::invalid_argument for weights or a config that are missing or do not fit.
std::shared_ptr<Model> make_model(nb::dict config, nb::object weights, const std::string& type,
                                  std::shared_ptr<Pool> pool, std::vector<int> feature_layers,
                                  const std::string& kernel_set);
// `token_ids`: the target's id of each row of the draft vocabulary; none: the head scores every token.
std::shared_ptr<Head> make_head(std::shared_ptr<Model> target, nb::dict config, nb::object weights,
                                const std::string& type, std::optional<Array1<int64_t>> token_ids);

}  // namespace eyas
