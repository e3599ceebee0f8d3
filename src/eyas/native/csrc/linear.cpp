#include "linear.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace eyas {
namespace {

float half(const uint8_t* p) {
  const int h = p[0] | p[1] << 8, exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -size : size;
}

}  // namespace

size_t Source::row_bytes() const {
  if (kind == f32) return size_t(cols) * 4;
  if (kind == bf16) return size_t(cols) * 2;
  size_t block = type == Type::q8_0 ? 34 : type == Type::q4_1 ? 20 : 18;
  return size_t(cols) / 32 * block;
}

void Source::read_row(int row, float* out) const {
  const char* p = static_cast<const char*>(data) + row * row_bytes();
  if (kind == f32) {
    std::memcpy(out, p, size_t(cols) * 4);
    return;
  }
  if (kind == bf16) {
    for (int i = 0; i < cols; ++i) {
      uint16_t high;
      std::memcpy(&high, p + size_t(i) * 2, 2);
      uint32_t bits = uint32_t(high) << 16;
      std::memcpy(out + i, &bits, 4);
    }
    return;
  }
  const auto* block = reinterpret_cast<const uint8_t*>(p);
  for (float* end = out + cols; out < end; out += 32) {
    const float d = half(block);
    if (type == Type::q8_0) {
      for (int i = 0; i < 32; ++i) out[i] = float(int8_t(block[2 + i])) * d;
      block += 34;
      continue;
    }
    const bool has_min = type == Type::q4_1;
    const float m = has_min ? half(block + 2) : 0.0f;
    block += has_min ? 4 : 2;
    for (int i = 0; i < 16; ++i) {
      const int low = block[i] & 15, high = block[i] >> 4;
      out[i] = has_min ? float(low) * d + m : float(low - 8) * d;
      out[i + 16] = has_min ? float(high) * d + m : float(high - 8) * d;
    }
    block += 16;
  }
}

Linear::Linear(const Kernels& kernels, Pool& pool, Arena& arena, const std::vector<Source>& sources, Type type,
               bool keep_blocks, bool interleave) {
  cols_ = kernels.panel_cols;
  k_ = sources.at(0).cols;
  struct Job {
    const Source* source;
    int first_row;
    const Format* format;
    size_t offset;
  };
  std::vector<Job> jobs;
  auto add = [&](const Source& source, int panel) {
    const Format* format = kernels.format(keep_blocks && source.kind == Source::blocks ? source.type : type);
    jobs.push_back({&source, panel * cols_, format, 0});
  };
  for (const Source& source : sources)
    if (source.cols != k_) throw std::invalid_argument("stacked matrices must have one number of columns");
  auto count = [&](const Source& source) { return (source.rows + cols_ - 1) / cols_; };
  if (interleave) {
    if (sources.size() != 2 || sources[0].rows != sources[1].rows)
      throw std::invalid_argument("interleaved matrices must have one shape");
    for (int panel = 0; panel < count(sources[0]); ++panel)
      for (const Source& source : sources) add(source, panel);
  } else {
    for (const Source& source : sources)
      for (int panel = 0; panel < count(source); ++panel) add(source, panel);
  }
  for (Job& job : jobs) {
    job.offset = bytes_;
    bytes_ += panel_bytes(*job.format, k_);
    if (job.format->prepare != jobs[0].format->prepare)
      throw std::invalid_argument("stacked matrices must be all quantised or all not");
  }
  char* storage = arena.take(bytes_);
  for (const Job& job : jobs) panels_.push_back({job.format, storage + job.offset});

  auto pack = [&](int thread) {
    std::vector<float> values(size_t(cols_) * k_);
    std::vector<const float*> rows(cols_);
    std::vector<const uint8_t*> blocks(cols_);
    const int begin = int(int64_t(jobs.size()) * thread / pool.threads());
    const int end = int(int64_t(jobs.size()) * (thread + 1) / pool.threads());
    for (int j = begin; j < end; ++j) {
      const Job& job = jobs[j];
      char* panel = storage + job.offset;
      for (int c = 0; c < cols_; ++c) {
        int row = job.first_row + c;
        bool real = row < job.source->rows;
        if (keep_blocks && job.source->kind == Source::blocks) {
          blocks[c] = real ? static_cast<const uint8_t*>(job.source->data) + row * job.source->row_bytes() : nullptr;
        } else {
          rows[c] = real ? &values[size_t(c) * k_] : nullptr;
          if (real) job.source->read_row(row, &values[size_t(c) * k_]);
        }
      }
      if (keep_blocks && job.source->kind == Source::blocks)
        job.format->pack_blocks(blocks.data(), k_, panel);
      else
        job.format->pack(rows.data(), k_, panel);
    }
  };
  pool.run(pack);
}

}  // namespace eyas
