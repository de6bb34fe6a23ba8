// int8moe::experts on CPU: quantise, product with w13 and gate, requantise, product with w2, combine.
//
// One parallel region of seven phases; inside a phase threads take the next piece of work from a
// counter, so one token spreads over columns and thousands over experts. Which thread does what
// changes no bit: integer sums are exact, and every floating sum has one fixed order.
//
//   x_q, s_x = quantise(x)                                   per row of x
//   h = round(gate((x_q @ w13.T) * (s_x * s_w13) + bias))    per (expert, block of columns)
//   h_q, s_h = quantise(h)                                   per contribution
//   y = round(((h_q @ w2.T) * (s_h * s_w2) + bias) * router) per (expert, block of columns)
//   out = round(sum of y over slots, in slot order)          per token
#include <algorithm>
#include <atomic>
#include <thread>
#include <type_traits>

#include "activation.h"
#include "call.h"
#include "lanes.h"
#include "numbers.h"
#include "product.h"
#include "routing.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace int8moe {
namespace {

// Blocks of 256 weight rows: memory gives up to a sixth more than with 32 or 64 (T 1 and 16).
constexpr int64_t ROW_BLOCK = 64, COLUMN_BLOCK = 256;
constexpr int64_t ROW_BLOCK_BYTES = 192 * 1024;  // activations of a row block stay in L2
constexpr int64_t WORK_PER_THREAD = 1 << 16;     // products that repay waking a thread

// Rows ready to be multiplied. With OFFSET lanes the sum of a row's codes undoes the offset.
template <class Lanes>
struct Rows {
  typename Lanes::Code* codes;
  float* scale;
  int32_t* sum;
  int64_t padded;

  Rows(Scratch& scratch, int64_t count, int64_t columns)
      : padded((columns + Lanes::STEP - 1) / Lanes::STEP * Lanes::STEP) {
    codes = scratch.take<typename Lanes::Code>(count * padded);
    scale = scratch.take<float>(count);
    sum = scratch.take<int32_t>(count);
  }

  void add_up(int64_t row) {
    sum[row] = Lanes::OFFSET == 0 ? 0 : sum_codes(codes + row * padded, padded);
  }
};

// Scales and biases of a block of one expert's weight rows.
struct Columns {
  float scale[COLUMN_BLOCK], bias[COLUMN_BLOCK];

  Columns(const Weight& weight, int64_t expert, int64_t first, int64_t count) {
    const float* scales = weight.scale + expert * weight.scale_expert_stride;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = first + j;
      const int64_t index = weight.scale_count == weight.rows ? row
                            : weight.scale_count == 1         ? 0
                                                              : row / (weight.rows / 2);
      scale[j] = scales[index * weight.scale_stride];
    }
    if (weight.bias == nullptr) {
      std::fill_n(bias, count, 0.0f);
    } else {
      const int64_t start = expert * weight.bias_expert_stride + first;
      load_row(offset(weight.bias, weight.bias_dtype, start), weight.bias_dtype, count, bias);
    }
  }

  template <class Sum>
  void dequantise(const Sum* total, float row_scale, Sum offset, int64_t count, float* out) const {
    for (int64_t j = 0; j < count; ++j) {
      out[j] = float(total[j] - offset) * (row_scale * scale[j]) + bias[j];
    }
  }
};

inline WeightRows weight_rows(const Weight& weight, int64_t expert, int64_t first, int64_t count) {
  const int8_t* base = weight.codes + expert * weight.expert_stride + first * weight.row_stride;
  return {base, weight.row_stride, count, weight.columns};
}

struct alignas(64) Phase {
  std::atomic<int64_t> next{0}, done{0};
};

// One chunk of tokens, [first, first + tokens).
template <class Lanes>
class Chunk {
  using Sum = typename Lanes::Sum;
  using Code = typename Lanes::Code;

 public:
  Chunk(const Call& call, int64_t first, int64_t tokens)
      : call_(call),
        first_(first),
        tokens_(tokens),
        routing_(call, first, tokens),
        live_(int64_t(routing_.order.size())),
        inputs_(scratch_, tokens, call.hidden_size()),
        middles_(scratch_, live_, call.intermediate_size()) {
    const int64_t hidden = call.hidden_size(), inner = call.intermediate_size();
    const int64_t work = live_ * hidden * inner;
    threads_ = std::max<int64_t>(1, std::min(call.threads, work / WORK_PER_THREAD));
    h_ = scratch_.take<char>(live_ * inner * size_of(call.out_dtype));
    contributions_ = scratch_.take<char>(tokens * call.top_k * hidden * size_of(call.out_dtype));
    lines_ = scratch_.take<float>(threads_ * line_size());
  }

  void run() {
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(threads_))
    phases(omp_get_thread_num());
#else
    phases(0);
#endif
  }

 private:
  // Run function(i) for every i below count, shared by the threads; then wait until all are done.
  // A thread that the system has not scheduled yet holds no work, so nobody waits for it, as they
  // would at a barrier.
  template <class Function>
  void share(int phase, int64_t count, const Function& function) {
    Phase& progress = progress_[phase];
    int64_t taken = 0;
    for (int64_t i; (i = progress.next.fetch_add(1, std::memory_order_relaxed)) < count; ++taken) {
      function(i);
    }
    progress.done.fetch_add(taken, std::memory_order_acq_rel);
    for (int tries = 0; progress.done.load(std::memory_order_acquire) < count; ++tries) {
      if (tries > 2000) std::this_thread::yield();
    }
  }

  int64_t line_size() const {
    return 2 * (std::max(call_.hidden_size(), call_.intermediate_size()) + 16);
  }

  void phases(int thread) {
    float* line = lines_ + thread * line_size();
    const int64_t inner = call_.intermediate_size(), hidden = call_.hidden_size();
    if (call_.quant == TENSOR && call_.hidden_dtype != INT8) {
      share(0, tokens_, [&](int64_t row) {
        load_input(row, line);
        raise_to(input_amax_, amax_bits(line, hidden));
      });
    }
    share(1, tokens_, [&](int64_t row) { prepare_input(row, line); });
    share_blocks(2, inner, [&](const Group& group, int64_t column, int64_t count) {
      first_product(group, column, count);
    });
    if (call_.quant == TENSOR) {
      share(3, live_, [&](int64_t row) {
        load_row(middle(row), call_.out_dtype, inner, line);
        raise_to(middle_amax_, amax_bits(line, inner));
      });
    }
    share(4, live_, [&](int64_t row) { prepare_middle(row, line); });
    share_blocks(5, hidden, [&](const Group& group, int64_t column, int64_t count) {
      second_product(group, column, count);
    });
    share(6, tokens_, [&](int64_t token) { combine(token, line); });
  }

  // Share (group, block of columns) pairs; blocks shrink until every thread gets several.
  template <class Function>
  void share_blocks(int phase, int64_t columns, const Function& function) {
    int64_t block = COLUMN_BLOCK;
    const int64_t groups = int64_t(routing_.groups.size());
    while (block > 8 && groups * ((columns + block - 1) / block) < 8 * threads_) block /= 2;
    const int64_t blocks = (columns + block - 1) / block;
    share(phase, groups * blocks, [&](int64_t item) {
      const int64_t column = item % blocks * block;
      function(routing_.groups[size_t(item / blocks)], column, std::min(block, columns - column));
    });
  }

  static void raise_to(std::atomic<uint32_t>& amax, uint32_t value) {
    uint32_t seen = amax.load(std::memory_order_relaxed);
    while (seen < value && !amax.compare_exchange_weak(seen, value)) {
    }
  }

  void load_input(int64_t row, float* line) const {
    const int64_t token = first_ + row, hidden = call_.hidden_size();
    const void* source = offset(call_.hidden, call_.hidden_dtype, token * call_.hidden_row_stride);
    load_row(source, call_.hidden_dtype, hidden, line);
    if (!call_.router_on_input) return;
    if (routing_.local[size_t(row)] < 0) {
      std::fill_n(line, hidden, 0.0f);  // selected: a skipped row and its weight may hold NaN
      return;
    }
    const float weight = router(row * call_.top_k);
    for (int64_t i = 0; i < hidden; ++i) line[i] *= weight;
  }

  void prepare_input(int64_t row, float* line) {
    const int64_t token = first_ + row, hidden = call_.hidden_size();
    if (call_.hidden_dtype == INT8) {
      const auto* codes = static_cast<const int8_t*>(call_.hidden) + token * call_.hidden_row_stride;
      inputs_.scale[row] = call_.a13_scale[token * call_.a13_scale_stride];
      copy_codes(codes, hidden, inputs_.padded, inputs_.codes + row * inputs_.padded);
      inputs_.add_up(row);
      return;
    }
    load_input(row, line);
    prepare(inputs_, row, line, hidden, call_.hidden_dtype, call_.a13_scale, input_amax_);
  }

  void prepare_middle(int64_t row, float* line) {
    load_row(middle(row), call_.out_dtype, call_.intermediate_size(), line);
    prepare(middles_, row, line, call_.intermediate_size(), call_.out_dtype, call_.a2_scale,
            middle_amax_);
  }

  // Turn a line of floats into a row to multiply. Weight-only rows keep their own dtype's values.
  void prepare(Rows<Lanes>& rows, int64_t row, float* line, int64_t count, int64_t dtype,
               const float* static_scale, const std::atomic<uint32_t>& tensor_amax) {
    Code* codes = rows.codes + row * rows.padded;
    rows.scale[row] = 1.0f;
    if constexpr (std::is_same<Code, float>::value) {
      float* rounded = line + line_size() / 2;
      store_row(line, dtype, count, rounded);
      load_row(rounded, dtype, count, codes);
      std::fill(codes + count, codes + rows.padded, 0.0f);
    } else {
      const float scale = call_.quant == STATIC   ? *static_scale
                          : call_.quant == TENSOR ? scale_of(tensor_amax.load())
                                                  : scale_of(amax_bits(line, count));
      rows.scale[row] = scale;
      encode_row(line, scale, count, rows.padded, codes);
    }
    rows.add_up(row);
  }

  void* middle(int64_t position) const {
    return offset(static_cast<void*>(h_), call_.out_dtype, position * call_.intermediate_size());
  }

  void* contribution(int64_t index) const {
    return offset(static_cast<void*>(contributions_), call_.out_dtype, index * call_.hidden_size());
  }

  float router(int64_t contribution) const {
    const int64_t token = first_ + contribution / call_.top_k, slot = contribution % call_.top_k;
    const int64_t index = token * call_.router_row_stride + slot * call_.router_column_stride;
    return load_one(call_.router, call_.router_dtype, index);
  }

  static int64_t row_block(const Rows<Lanes>& rows) {
    const int64_t fit = ROW_BLOCK_BYTES / (rows.padded * int64_t(sizeof(Code))) / 4 * 4;
    return std::max<int64_t>(8, std::min(ROW_BLOCK, fit));
  }

  static Sum correction(const Rows<Lanes>& rows, int64_t row) {
    return Sum(Lanes::OFFSET * rows.sum[row]);
  }

  void first_product(const Group& group, int64_t column, int64_t count) {
    const int64_t inner = call_.intermediate_size(), block = row_block(inputs_);
    const Columns gate(call_.w13, group.expert, column, count);
    const WeightRows gate_rows = weight_rows(call_.w13, group.expert, column, count);
    const int64_t up_column = call_.gated ? inner + column : column;
    const Columns up(call_.w13, group.expert, up_column, count);
    const WeightRows up_rows = weight_rows(call_.w13, group.expert, up_column, count);
    alignas(64) Sum g_total[ROW_BLOCK * COLUMN_BLOCK], u_total[ROW_BLOCK * COLUMN_BLOCK];
    alignas(64) float g[COLUMN_BLOCK], u[COLUMN_BLOCK];
    const Code* rows[ROW_BLOCK];
    for (int64_t begin = group.begin; begin < group.end; begin += block) {
      const int64_t size = std::min(block, group.end - begin);
      for (int64_t i = 0; i < size; ++i) {
        rows[i] = inputs_.codes + token_of(begin + i) * inputs_.padded;
      }
      product<Lanes>(rows, size, gate_rows, g_total, count);
      if (call_.gated) product<Lanes>(rows, size, up_rows, u_total, count);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t row = token_of(begin + i);
        const Sum undo = correction(inputs_, row);
        gate.dequantise(g_total + i * count, inputs_.scale[row], undo, count, g);
        if (call_.gated) up.dequantise(u_total + i * count, inputs_.scale[row], undo, count, u);
        apply_gate(call_, g, call_.gated ? u : nullptr, count);
        store_row(g, call_.out_dtype, count, offset(middle(begin + i), call_.out_dtype, column));
      }
    }
  }

  void second_product(const Group& group, int64_t column, int64_t count) {
    const int64_t block = row_block(middles_);
    const Columns down(call_.w2, group.expert, column, count);
    const WeightRows down_rows = weight_rows(call_.w2, group.expert, column, count);
    alignas(64) Sum total[ROW_BLOCK * COLUMN_BLOCK];
    alignas(64) float y[COLUMN_BLOCK];
    const Code* rows[ROW_BLOCK];
    for (int64_t begin = group.begin; begin < group.end; begin += block) {
      const int64_t size = std::min(block, group.end - begin);
      for (int64_t i = 0; i < size; ++i) rows[i] = middles_.codes + (begin + i) * middles_.padded;
      product<Lanes>(rows, size, down_rows, total, count);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t row = begin + i, index = routing_.order[size_t(row)];
        down.dequantise(total + i * count, middles_.scale[row], correction(middles_, row), count, y);
        if (!call_.router_on_input) {
          const float weight = router(index);
          for (int64_t j = 0; j < count; ++j) y[j] *= weight;
        }
        store_row(y, call_.out_dtype, count, offset(contribution(index), call_.out_dtype, column));
      }
    }
  }

  int64_t token_of(int64_t position) const {
    return routing_.order[size_t(position)] / call_.top_k;
  }

  void combine(int64_t token, float* line) const {
    const int64_t hidden = call_.hidden_size();
    float* term = line + line_size() / 2;
    std::fill_n(line, hidden, 0.0f);
    for (int64_t slot = 0; slot < call_.top_k; ++slot) {
      const int64_t index = token * call_.top_k + slot;
      if (routing_.local[size_t(index)] < 0) continue;
      load_row(contribution(index), call_.out_dtype, hidden, term);
      for (int64_t i = 0; i < hidden; ++i) line[i] += term[i];
    }
    void* target = offset(call_.out, call_.out_dtype, (first_ + token) * hidden);
    store_row(line, call_.out_dtype, hidden, target);
  }

  const Call& call_;
  int64_t first_, tokens_;
  Scratch scratch_;
  Routing routing_;
  int64_t live_;
  Rows<Lanes> inputs_, middles_;
  int64_t threads_;
  char *h_, *contributions_;
  float* lines_;
  Phase progress_[7];
  std::atomic<uint32_t> input_amax_{0}, middle_amax_{0};
};

template <class Lanes>
void run(const Call& call) {
  const int64_t per_row = call.intermediate_size() * int64_t(4 + sizeof(typename Lanes::Code)) +
                          call.hidden_size() * 4;
  const int64_t fit = call.scratch_bytes / (per_row * std::max<int64_t>(1, call.top_k));
  // one scale for the whole tensor needs every row at once
  const int64_t chunk = call.quant == TENSOR ? call.tokens : std::max<int64_t>(64, fit);
  for (int64_t first = 0; first < call.tokens; first += chunk) {
    Chunk<Lanes>(call, first, std::min(chunk, call.tokens - first)).run();
  }
}

}  // namespace
}  // namespace int8moe

#define INT8MOE_EXPORT __attribute__((visibility("default")))

extern "C" {

// Compute one call. Returns 0, or 1 where memory ran out.
INT8MOE_EXPORT int int8moe_experts(const int8moe::Call* call) {
  try {
    if (call->quant == int8moe::NONE) {
      int8moe::run<int8moe::FloatLanes>(*call);
    } else {
      int8moe::run<int8moe::IntegerLanes>(*call);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

INT8MOE_EXPORT const char* int8moe_lanes() { return LANES_NAME; }

INT8MOE_EXPORT int64_t int8moe_call_bytes() { return sizeof(int8moe::Call); }
}
