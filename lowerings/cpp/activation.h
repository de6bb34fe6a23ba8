// exp, erf, tanh and the gate: the same bits wherever an element sits.
//
// Libraries use another formula in a vector's body than in its tail. These functions have one
// branchless formula each, which the compiler may vectorise as it likes without changing a bit.
// They work in fp64 and round once, so nearly every result is the correctly rounded one: then our
// codes agree with those of any other accurate library. (With fp32 inside, 17 of 405 small
// problems differed from the plain kernel somewhere; now one does.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "numbers.h"

namespace int8moe {

// Keep value in [low, high]; NaN passes.
template <class T>
inline T clamp(T value, T low, T high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

template <size_t N>
inline double polynomial(const double (&coefficients)[N], double x) {
  double value = coefficients[N - 1];
  for (size_t i = N - 1; i-- > 0;) value = value * x + coefficients[i];
  return value;
}

inline uint64_t as_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline double as_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// exp for what becomes fp32: relative error below 1e-11 from -104 to 89, beyond which fp32 has 0 and
// infinity. 2**n comes from n's place in the bits of a double that has a unit in the last place of 1.
inline double exp_wide(double x) {
  constexpr double ROUNDER = 6755399441055744.0, LOG2_E = 1.4426950408889634;
  constexpr double LN2 = 0.6931471805599453;
  constexpr double TAYLOR[] = {1.0,       1.0,       1.0 / 2,    1.0 / 6,     1.0 / 24,
                               1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880};
  x = clamp(x, -104.0, 89.0);
  const double shifted = x * LOG2_E + ROUNDER;
  const double power = as_double((as_bits(shifted) - as_bits(ROUNDER) + 1023) << 52);
  return polynomial(TAYLOR, x - (shifted - ROUNDER) * LN2) * power;
}

inline float exp_fp32(float x) { return float(exp_wide(x)); }

inline float tanh_fp32(float x) {
  const double e = exp_wide(2.0 * clamp(double(x), -10.0, 10.0));
  return float((e - 1.0) / (e + 1.0));
}

// A polynomial up to 1, and log(erfc) as one up to 4, where erf rounds to 1; minimax fits of our
// own, with errors below 4e-11.
inline float erf_fp32(float x) {
  constexpr double INNER[] = {1.128379167058108,     -0.3761263843498095,    0.1128378197767722,
                              -0.02686540021199433,  5.220945847012763e-03,  -8.482834253194988e-04,
                              1.125698386925361e-04, -9.641611750485534e-06};
  constexpr double LOG_ERFC[] = {1.880402255824794e-04, -1.129578424251203,    -0.6332198931101890,
                                 -0.1084185773136584,   2.520825672769944e-02, -4.204561870902700e-03,
                                 4.413363766208336e-04, -2.168684992442036e-05};
  const double wide = double(x), magnitude = wide < 0.0 ? -wide : wide;
  const double outer = 1.0 - exp_wide(polynomial(LOG_ERFC, clamp(magnitude, 0.0, 4.0)));
  const double inner = wide * polynomial(INNER, wide * wide);
  return float(magnitude < 1.0 ? inner : wide < 0.0 ? -outer : outer);
}

inline float silu(float x, float alpha) { return x / (1.0f + exp_fp32(-alpha * x)); }

inline float gelu(float x) { return 0.5f * x * (1.0f + erf_fp32(x * 0.707106781f)); }

inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh_fp32(0.797884561f * (x + 0.044715f * x * x * x)));
}

inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

// h = f(min(g, limit)) * (clamp(u, -limit, limit) + beta), in place of g; without u, h = f(g).
inline void apply_gate(const Call& call, float* g, const float* u, int64_t count) {
  const float alpha = float(call.alpha), beta = float(call.beta), limit = float(call.limit);
  if (call.has_limit) {
    for (int64_t i = 0; i < count; ++i) g[i] = g[i] > limit ? limit : g[i];
  }
  switch (call.activation) {
    case SILU:
      for (int64_t i = 0; i < count; ++i) g[i] = silu(g[i], alpha);
      break;
    case GELU:
      for (int64_t i = 0; i < count; ++i) g[i] = gelu(g[i]);
      break;
    case GELU_TANH:
      for (int64_t i = 0; i < count; ++i) g[i] = gelu_tanh(g[i]);
      break;
    case RELU:
      for (int64_t i = 0; i < count; ++i) g[i] = relu(g[i]);
      break;
    default:
      for (int64_t i = 0; i < count; ++i) g[i] = relu(g[i]) * relu(g[i]);
  }
  if (u == nullptr) return;
  if (call.has_limit) {
    for (int64_t i = 0; i < count; ++i) g[i] *= clamp(u[i], -limit, limit) + beta;
  } else {
    for (int64_t i = 0; i < count; ++i) g[i] *= u[i] + beta;
  }
}

}  // namespace int8moe
