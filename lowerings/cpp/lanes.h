// Instruction sets: how one step of a dot product between activations and int8 weights is taken.
//
// A Lanes type has STEP (products a step takes), Code (how activation codes are stored), Sum (the
// type of a dot product), EXACT (sums are integers, so their order is free), REGISTERS (vector
// registers the processor has) and five functions: zero, weights and codes (load one step),
// multiply_add and sum. Where the hardware wants one operand unsigned, the weights carry an offset
// of OFFSET, undone with OFFSET * (the sum of a row's codes). LANES_NAME says which was compiled in.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace int8moe {

#if defined(__AVX2__)
// Hold a value in a register at this point of the program. Without it gcc 12 adds up the sums of
// several steps in another order, for which registers are too few, and folds a load that several
// products share into each of them, which takes half as long again (benchmarks/cpu_parts.py). "v" is
// any vector register; "x" would be the first 16 of AVX512's 32.
template <class Vec>
inline Vec in_register(Vec value) {
  asm("" : "+v"(value));
  return value;
}
#endif

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)

#define LANES_NAME "avx512-vnni"
struct IntegerLanes {
  using Code = int8_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  using Vec = __m512i;
  static constexpr int64_t STEP = 64;
  static constexpr int REGISTERS = 32;
  static constexpr int32_t OFFSET = 128;  // weights become unsigned
  static Vec zero() { return _mm512_setzero_si512(); }
  static Vec weights(const int8_t* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  static Vec codes(const Code* p) { return _mm512_loadu_si512(p); }
  static Vec multiply_add(Vec total, Vec w, Vec a) { return _mm512_dpbusd_epi32(total, w, a); }
  static Sum sum(Vec v) { return _mm512_reduce_add_epi32(v); }
};

#elif defined(__AVX512BW__)

#define LANES_NAME "avx512"
struct IntegerLanes {
  using Code = int16_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  using Vec = __m512i;
  static constexpr int64_t STEP = 32;
  static constexpr int REGISTERS = 32;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return _mm512_setzero_si512(); }
  static Vec weights(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec codes(const Code* p) { return _mm512_loadu_si512(p); }
  static Vec multiply_add(Vec total, Vec w, Vec a) {
    return in_register(_mm512_add_epi32(total, _mm512_madd_epi16(w, a)));
  }
  static Sum sum(Vec v) { return _mm512_reduce_add_epi32(v); }
};

#elif defined(__AVX2__)

inline int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

#if defined(__AVXVNNI__)

#define LANES_NAME "avx-vnni"
struct IntegerLanes {
  using Code = int8_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  using Vec = __m256i;
  static constexpr int64_t STEP = 32;
  static constexpr int REGISTERS = 16;
  static constexpr int32_t OFFSET = 128;
  static Vec zero() { return _mm256_setzero_si256(); }
  static Vec weights(const int8_t* p) { return _mm256_xor_si256(codes(p), _mm256_set1_epi8(-128)); }
  static Vec codes(const Code* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Vec multiply_add(Vec total, Vec w, Vec a) { return _mm256_dpbusd_avx_epi32(total, w, a); }
  static Sum sum(Vec v) { return sum_lanes(v); }
};

#else

#define LANES_NAME "avx2"
// Codes wait as int16 and weights widen as they are loaded: vpmaddwd is exact for every pair,
// while vpmaddubsw saturates at 128 * 128 * 2.
struct IntegerLanes {
  using Code = int16_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  using Vec = __m256i;
  static constexpr int64_t STEP = 16;
  static constexpr int REGISTERS = 16;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return _mm256_setzero_si256(); }
  static Vec weights(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec codes(const Code* p) {
    return in_register(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec multiply_add(Vec total, Vec w, Vec a) {
    return in_register(_mm256_add_epi32(total, _mm256_madd_epi16(w, a)));
  }
  static Sum sum(Vec v) { return sum_lanes(v); }
};

#endif

#elif defined(__ARM_FEATURE_DOTPROD)

#define LANES_NAME "neon-dotprod"
struct IntegerLanes {
  using Code = int8_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  using Vec = int32x4_t;
  using Bytes = int8x16_t;
  static constexpr int64_t STEP = 16;
  static constexpr int REGISTERS = 32;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return vdupq_n_s32(0); }
  static Bytes weights(const int8_t* p) { return vld1q_s8(p); }
  static Bytes codes(const Code* p) { return vld1q_s8(p); }
  static Vec multiply_add(Vec total, Bytes w, Bytes a) { return vdotq_s32(total, w, a); }
  static Sum sum(Vec v) { return vaddvq_s32(v); }
};

#else

#define LANES_NAME "portable"
struct IntegerLanes {
  using Code = int16_t;
  using Sum = int32_t;
  static constexpr bool EXACT = true;
  struct Vec {
    int32_t lane[16];
  };
  static constexpr int64_t STEP = 16;
  static constexpr int REGISTERS = 16;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return Vec{}; }
  template <class T>
  static Vec widen(const T* p) {
    Vec v;
    for (int i = 0; i < 16; ++i) v.lane[i] = p[i];
    return v;
  }
  static Vec weights(const int8_t* p) { return widen(p); }
  static Vec codes(const Code* p) { return widen(p); }
  static Vec multiply_add(Vec total, Vec w, Vec a) {
    for (int i = 0; i < 16; ++i) total.lane[i] += w.lane[i] * a.lane[i];
    return total;
  }
  static Sum sum(Vec v) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += v.lane[i];
    return total;
  }
};

#endif

#if defined(__AVX2__) && defined(__FMA__)

// Weight-only: int8 weights times fp32 values. Lanes are summed in one fixed order.
struct FloatLanes {
  using Code = float;
  using Sum = float;
  static constexpr bool EXACT = false;
  using Vec = __m256;
  static constexpr int64_t STEP = 8;
  static constexpr int REGISTERS = 16;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec weights(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static Vec codes(const Code* p) { return _mm256_loadu_ps(p); }
  static Vec multiply_add(Vec total, Vec w, Vec a) { return _mm256_fmadd_ps(w, a, total); }
  static Sum sum(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
};

#else

struct FloatLanes {
  using Code = float;
  using Sum = float;
  static constexpr bool EXACT = false;
  struct Vec {
    float lane[8];
  };
  static constexpr int64_t STEP = 8;
  static constexpr int REGISTERS = 16;
  static constexpr int32_t OFFSET = 0;
  static Vec zero() { return Vec{}; }
  template <class T>
  static Vec widen(const T* p) {
    Vec v;
    for (int i = 0; i < 8; ++i) v.lane[i] = float(p[i]);
    return v;
  }
  static Vec weights(const int8_t* p) { return widen(p); }
  static Vec codes(const Code* p) { return widen(p); }
  static Vec multiply_add(Vec total, Vec w, Vec a) {
    for (int i = 0; i < 8; ++i) total.lane[i] += w.lane[i] * a.lane[i];
    return total;
  }
  static Sum sum(Vec v) {
    float total = 0.0f;
    for (int i = 0; i < 8; ++i) total += v.lane[i];
    return total;
  }
};

#endif

}  // namespace int8moe
