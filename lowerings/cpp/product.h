// The matrix product: rows of activations against rows of int8 weights, both read along K.
//
//   out[i, j] = sum over k of rows[i][k] * weights[j][k]
//
// Weights stay as the model stores them: no packing was measured faster than streaming them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "lanes.h"

namespace int8moe {

constexpr int64_t LINE = 64;  // bytes that memory moves at once

// One expert's weight rows from `first` on, of `columns` codes each.
struct WeightRows {
  const int8_t* first;
  int64_t stride, count, columns;
};

// Where a tile's weights are: COLUMNS rows `stride` apart, `columns` codes each, of which those
// beyond the last whole step stand again in `tail` (null if there are none), padded with zeros.
struct Operand {
  const int8_t* first;
  int64_t stride, columns;
  const int8_t* tail;

  Operand skip(int64_t rows, int64_t step) const {
    return {first + rows * stride, stride, columns, tail == nullptr ? tail : tail + rows * step};
  }
};

inline void prefetch(const int8_t* address) {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#endif
}

#if defined(__GNUC__)
#define INT8MOE_INLINE __attribute__((always_inline)) inline
#else
#define INT8MOE_INLINE inline
#endif

// Call function(0), ..., function(COUNT - 1) with constants, so that an array indexed by them lives
// in registers. gcc 12 leaves the accumulators of unrolled loops in memory, and of calls that it
// does not inline early; either halves the speed (benchmarks/cpu_parts.py).
template <int... INDEX, class Function>
INT8MOE_INLINE void repeat(std::integer_sequence<int, INDEX...>, const Function& function) {
  (function(std::integral_constant<int, INDEX>()), ...);
}

template <int COUNT, class Function>
INT8MOE_INLINE void repeat(const Function& function) {
  repeat(std::make_integer_sequence<int, COUNT>(), function);
}

// ROWS x COLUMNS dot products at once. The first tile to read its weights (AHEAD) fetches those of
// the next tile line after line: several interleaved streams alone reach half of the memory's
// bandwidth.
template <class Lanes, int ROWS, int COLUMNS, bool AHEAD>
inline void dot_tile(const typename Lanes::Code* const* rows, const Operand& weights,
                     typename Lanes::Sum* out, int64_t out_stride) {
  constexpr int64_t STEP = Lanes::STEP;
  typename Lanes::Vec total[ROWS * COLUMNS];
  repeat<ROWS * COLUMNS>([&](auto i) { total[i] = Lanes::zero(); });
  const typename Lanes::Code* row[ROWS];
  repeat<ROWS>([&](auto i) { row[i] = rows[i]; });
  const auto step = [&](int64_t k, const int8_t* base, int64_t base_stride) {
    decltype(Lanes::weights(base)) w[COLUMNS];
    repeat<COLUMNS>([&](auto j) { w[j] = Lanes::weights(base + j * base_stride); });
    repeat<ROWS>([&](auto i) {
      const auto a = Lanes::codes(row[i] + k);
      repeat<COLUMNS>([&](auto j) {
        total[i * COLUMNS + j] = Lanes::multiply_add(total[i * COLUMNS + j], w[j], a);
      });
    });
  };
  const int8_t* next = weights.first + COLUMNS * weights.stride;
  int64_t k = 0;
  for (; k + LINE <= weights.columns; k += LINE) {
    if constexpr (AHEAD) {
      for (int j = 0; j < COLUMNS; ++j) prefetch(next + k * COLUMNS + j * LINE);
    }
    for (int64_t s = 0; s < LINE; s += STEP) step(k + s, weights.first + k + s, weights.stride);
  }
  for (; k + STEP <= weights.columns; k += STEP) step(k, weights.first + k, weights.stride);
  if (weights.tail != nullptr) step(k, weights.tail, STEP);
  repeat<ROWS * COLUMNS>([&](auto i) {
    out[i / COLUMNS * out_stride + i % COLUMNS] = Lanes::sum(total[i]);
  });
}

// One row against one weight row, whose accumulators split K: only for sums that are exact. Reading
// one weight row after the other is the fastest way through memory (benchmarks/cpu_parts.py).
template <class Lanes>
inline typename Lanes::Sum dot_row(const typename Lanes::Code* row, const Operand& weights) {
  constexpr int64_t STEP = Lanes::STEP, AHEAD = 1536;
  constexpr int SPLIT = LINE / STEP;
  typename Lanes::Vec total[SPLIT];
  repeat<SPLIT>([&](auto s) { total[s] = Lanes::zero(); });
  const auto step = [&](auto s, int64_t k, const int8_t* base) {
    total[s] = Lanes::multiply_add(total[s], Lanes::weights(base), Lanes::codes(row + k));
  };
  const std::integral_constant<int, 0> first{};
  int64_t k = 0;
  for (; k + LINE <= weights.columns; k += LINE) {
    prefetch(weights.first + k + AHEAD);
    repeat<SPLIT>([&](auto s) { step(s, k + s * STEP, weights.first + k + s * STEP); });
  }
  for (; k + STEP <= weights.columns; k += STEP) step(first, k, weights.first + k);
  if (weights.tail != nullptr) step(first, k, weights.tail);
  typename Lanes::Sum sum = 0;
  repeat<SPLIT>([&](auto s) { sum += Lanes::sum(total[s]); });
  return sum;
}

// Four weight rows against one to four rows, with eight accumulators where there are 16 registers:
// with twelve, gcc spills and AVX2 loses a third of its speed. Where there are 32, sixteen hide the
// longer latency of the dot product instructions.
template <class Lanes, bool AHEAD>
inline void dot_four(int64_t count, const typename Lanes::Code* const* rows,
                     const Operand& weights, typename Lanes::Sum* out, int64_t out_stride) {
  constexpr int COLUMNS = Lanes::REGISTERS >= 32 ? 4 : 2;
  if (count == 1) {
    if constexpr (Lanes::EXACT) {
      for (int j = 0; j < 4; ++j) out[j] = dot_row<Lanes>(rows[0], weights.skip(j, Lanes::STEP));
    } else {
      dot_tile<Lanes, 1, 4, AHEAD>(rows, weights, out, out_stride);
    }
    return;
  }
  if (count == 2) return dot_tile<Lanes, 2, 4, AHEAD>(rows, weights, out, out_stride);
  for (int j = 0; j < 4; j += COLUMNS) {
    const Operand part = weights.skip(j, Lanes::STEP);
    if (count == 3) {
      dot_tile<Lanes, 3, COLUMNS, AHEAD>(rows, part, out + j, out_stride);
    } else {
      dot_tile<Lanes, 4, COLUMNS, AHEAD>(rows, part, out + j, out_stride);
    }
  }
}

template <class Lanes>
inline void dot_one(int64_t count, const typename Lanes::Code* const* rows, const Operand& weights,
                    typename Lanes::Sum* out, int64_t out_stride) {
  for (int64_t i = 0; i < count; ++i) {
    dot_tile<Lanes, 1, 1, false>(rows + i, weights, out + i * out_stride, out_stride);
  }
}

// out[i, j] for all rows and all of the weights' rows. Rows are padded with zeros to a whole step.
// Four rows stay in L1 while all weights pass by: the other order streams twice the bytes from L2.
template <class Lanes>
void product(const typename Lanes::Code* const* rows, int64_t row_count, const WeightRows& weights,
             typename Lanes::Sum* out, int64_t out_stride) {
  constexpr int64_t STEP = Lanes::STEP;
  const int64_t whole = weights.columns / STEP * STEP, rest = weights.columns - whole;
  alignas(64) int8_t padded[4 * STEP] = {};
  for (int64_t i = 0; i < row_count; i += 4) {
    const int64_t count = row_count - i < 4 ? row_count - i : 4;
    for (int64_t j = 0; j < weights.count;) {
      const int64_t taken = weights.count - j >= 4 ? 4 : 1;
      Operand operand{weights.first + j * weights.stride, weights.stride, weights.columns, nullptr};
      if (rest != 0) {
        for (int64_t c = 0; c < taken; ++c) {
          const int8_t* end = operand.first + c * weights.stride + whole;
          std::memcpy(padded + c * STEP, end, size_t(rest));
        }
        operand.tail = padded;
      }
      typename Lanes::Sum* target = out + i * out_stride + j;
      if (taken == 1) {
        dot_one<Lanes>(count, rows + i, operand, target, out_stride);
      } else if (i == 0) {
        dot_four<Lanes, true>(count, rows, operand, target, out_stride);
      } else {
        dot_four<Lanes, false>(count, rows + i, operand, target, out_stride);
      }
      j += taken;
    }
  }
}

}  // namespace int8moe
