// Conversions of rows between dtypes, and quantisation, in code that gives the same bits anywhere.
//
// Every loop is plain IEEE fp32 or integer arithmetic without contraction, so a vector body and its
// scalar tail cannot differ: an element's bits do not depend on its position.
#pragma once

#include <cstdint>
#include <cstring>

#include "call.h"

namespace int8moe {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline bool is_nan_bits(uint32_t magnitude) { return magnitude > 0x7f800000u; }

inline float from_bfloat16(uint16_t half) { return as_float(uint32_t(half) << 16); }

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(is_nan_bits(bits & 0x7fffffffu) ? 0x7fc0u : rounded);
}

// The exponent moves by 112 = 127 - 15; the product is exact, subnormals included.
inline float from_float16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const float value = as_float(magnitude << 13) * as_float(uint32_t(127 + 112) << 23);
  return as_float(as_bits(value) | special | (uint32_t(half & 0x8000u) << 16));
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
  // 0.5 has the unit in the last place of a float16 subnormal, 2**-24: adding it rounds there.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  uint32_t result = magnitude < (uint32_t(127 - 14) << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above round to infinity
  result = is_nan_bits(magnitude) ? 0x7e00u : result;
  return uint16_t(result | ((bits >> 16) & 0x8000u));
}

inline int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype == INT8 ? 1 : 2; }

inline const void* offset(const void* base, int64_t dtype, int64_t index) {
  return static_cast<const char*>(base) + index * size_of(dtype);
}

inline void* offset(void* base, int64_t dtype, int64_t index) {
  return static_cast<char*>(base) + index * size_of(dtype);
}

inline void load_row(const void* source, int64_t dtype, int64_t count, float* target) {
  const auto* halves = static_cast<const uint16_t*>(source);
  if (dtype == FLOAT32) {
    std::memcpy(target, source, size_t(count) * sizeof(float));
  } else if (dtype == BFLOAT16) {
    for (int64_t i = 0; i < count; ++i) target[i] = from_bfloat16(halves[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = from_float16(halves[i]);
  }
}

inline void store_row(const float* source, int64_t dtype, int64_t count, void* target) {
  auto* halves = static_cast<uint16_t*>(target);
  if (dtype == FLOAT32) {
    std::memcpy(target, source, size_t(count) * sizeof(float));
  } else if (dtype == BFLOAT16) {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bfloat16(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_float16(source[i]);
  }
}

inline float load_one(const void* source, int64_t dtype, int64_t index) {
  float value;
  load_row(offset(source, dtype, index), dtype, 1, &value);
  return value;
}

// Bits of amax(|x|). Non-negative floats order as their bits do, and a NaN is above infinity, so
// the maximum propagates NaN and needs no order.
inline uint32_t amax_bits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = int32_t(as_bits(x[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return uint32_t(largest);
}

inline float scale_of(uint32_t amax) {
  const float scale = as_float(amax) / 127.0f;
  return scale == 0.0f ? 1.0f : scale;
}

// codes = round_half_even(x / scale) clamped to [-128, 127], NaN as 0, then zeros up to `padded`.
// Clamping before rounding gives the same code; 1.5 * 2**23 has a unit in the last place of 1, so
// adding it rounds half to even.
template <class Code>
void encode_row(const float* x, float scale, int64_t count, int64_t padded, Code* codes) {
  constexpr float ROUNDER = 12582912.0f;
  for (int64_t i = 0; i < count; ++i) {
    float value = x[i] / scale;
    value = value > 127.0f ? 127.0f : value;
    value = value < -128.0f ? -128.0f : value;
    value = value == value ? value : 0.0f;
    codes[i] = Code(int32_t(as_bits(value + ROUNDER)) - int32_t(as_bits(ROUNDER)));
  }
  for (int64_t i = count; i < padded; ++i) codes[i] = Code(0);
}

template <class Code>
void copy_codes(const int8_t* source, int64_t count, int64_t padded, Code* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = Code(source[i]);
  for (int64_t i = count; i < padded; ++i) codes[i] = Code(0);
}

template <class Code>
int32_t sum_codes(const Code* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += int32_t(codes[i]);
  return sum;
}

}  // namespace int8moe
