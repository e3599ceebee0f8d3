// Single numbers: rounding up, bfloat16 and float16 to float and back.
namespace {

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float bf16_to_float(uint16_t h) { return from_bits(uint32_t(h) << 16); }
inline uint16_t float_to_bf16(float value) {  // nearest, ties to even
  uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 64);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return from_bits(sign) + (sign ? -1.0f : 1.0f) * float(mantissa) * from_bits(0x33800000u);  // 2^-24
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t load16(const uint8_t* p) {
  uint16_t value;
  memcpy(&value, p, 2);
  return value;
}

}  // namespace
