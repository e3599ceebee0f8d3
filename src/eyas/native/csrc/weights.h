// A model as Python describes it: its config, and its weights by name.
#pragma once

#include <string>

#include "arrays.h"
#include "decoder.h"
#include "linear.h"

namespace eyas {

// Everything here throws std::invalid_argument, saying what, for names and weights that are missing or do not fit.

Type parse_type(const std::string& name);        // float32, bfloat16, int8 or q4
Type parse_block_type(const std::string& name);  // Q4_0, Q4_1 or Q8_0

Config read_config(const nb::dict& d, Type cache);

// A weight in the mapping: a float32 or uint16 (bf16) array of one or two dimensions, or GGUF blocks as a tuple
// (type name, uint8 array [rows, bytes], columns).
struct Held {
  nb::object keep;
  Anything array;
  Source source;
};

// A mapping from names to such arrays, each asked for only when it is packed.
class Weights {
 public:
  explicit Weights(nb::object mapping) : mapping_(std::move(mapping)) {}
  bool has(const std::string& name) const;
  Held get(const std::string& name, int rows, int cols) const;  // of exactly this shape
  Buffer<float> vector(const std::string& name, int n) const;

 private:
  nb::object mapping_;
};

}  // namespace eyas
