// What one instruction set offers: packed weight formats, their products, and the row-wise arithmetic of a decoder.
//
// Every function here is batch-invariant: a row's result depends on that row alone, never on how many rows share the
// call or on how work is divided. Each sum has one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eyas {

enum class Type { f32, bf16, int8, q8_0, q4_0, q4_1 };

// One packed weight type. A matrix [N, K] is cut into panels of `Kernels::panel_cols` output columns; a panel is one
// contiguous run of memory, read once per pass and shared by all rows.
struct Format {
  Type type;
  size_t (*panel_bytes)(int k);
  size_t (*row_bytes)(int k);  // of a prepared row, a multiple of 64
  void (*prepare)(const float* x, int k, void* row);
  // out[r * panel_cols + c] = sum over k of row r times column c. `next` (may be null) is memory to fetch meanwhile,
  // panel_bytes long.
  void (*multiply)(const void* panel, const void* acts, size_t act_stride, int rows, int k, float* out,
                   const void* next);
  // From rows of floats; a null row is a column of zeros.
  void (*pack)(const float* const* rows, int k, void* panel);
  // From rows of GGUF blocks, bit for bit (null for the types that have none).
  void (*pack_blocks)(const uint8_t* const* rows, int k, void* panel);
  void (*unpack)(const void* panel, int column, int k, float* out);
};

constexpr int kKeyBlock = 16;   // keys that stand side by side in the transposed K store
constexpr int kPageTokens = 64; // tokens per cache page, a multiple of kKeyBlock

// Attention of some rows of one request over one K/V head, whose elements are floats or bf16. Keys of row r, in order: slots 0 .. prefix[r] - 1, then
// extra[extra_begin[r]] .. extra[extra_begin[r + 1] - 1], each of these >= prefix[r] and increasing.
struct Attention {
  const void* const* pages;   // K of a page: [kPageTokens / kKeyBlock][head_dim][kKeyBlock], V: [kPageTokens][v_stride]
  Type type;                  // of K and V: f32 or bf16
  size_t k_offset, v_offset;  // of this layer and head within a page, in elements
  int head_dim, v_stride;
  int rows, group;            // query heads per K/V head
  const float* const* queries;  // [rows]: [group, head_dim], scaled
  float* const* outputs;        // [rows]: [group, head_dim]
  const int* prefix;            // [rows]
  const int* extra_begin;       // [rows + 1]
  const int* extra;
  int slots;       // keys to score: all slots < slots are scored, in whole key blocks
  float* scratch;  // [rows * group, attend_stride(slots, v_stride)]
};

// Per query: its scores in whole key blocks, then the sums of values.
inline int attend_stride(int slots, int v_stride) { return (slots + kKeyBlock - 1) / kKeyBlock * kKeyBlock + v_stride; }

struct Kernels {
  const char* name;
  int panel_cols;
  const Format* (*format)(Type);
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*add)(const float* x, int n, float* out);  // out += x
  void (*swiglu)(const float* gate, const float* up, int n, float* out);  // silu(gate) * up
  // Turns the pairs (x[i], x[i + half]) by the angles that have these cosines and sines [half].
  void (*rotate)(float* x, const float* cosine, const float* sine, int half);
  void (*attend)(const Attention&);
  // Asks for memory to be brought near, without waiting for it.
  void (*fetch)(const void* at, size_t bytes);
  // log of the sum of exponentials of n floats.
  float (*log_sum_exp)(const float* x, int n);
  // exp(scale * (x - the largest x)) of n floats.
  void (*exponentials)(const float* x, float scale, int n, float* out);
  // For measuring the machine: the sum of n floats (reads as fast as memory gives), and `steps` rounds of independent
  // multiply-adds in registers (returns the number of floating-point operations done).
  float (*sum)(const float* x, size_t n);
  double (*burn)(int64_t steps);
};

// Each in a file of its own; a build has those of its processor's family.
extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512VnniKernels, kAvx512DotKernels, kAmxKernels;
extern const Kernels kNeonKernels, kNeonDotKernels;

// The kernel sets this build has and this processor can run, best first. `select("")` gives the best.
const Kernels* select_kernels(const char* name);
int list_kernels(const char** names, int capacity);

}  // namespace eyas
