// One call of int8moe::experts as plain data: the interface between lowerings/cpu.py and this code.
//
// Every field is eight bytes wide, in the order of FIELDS in lowerings/cpu.py, so no padding rule of
// any compiler matters. Strides count elements. Shapes by letter: T tokens, H hidden,
// I intermediate, E local experts, K experts per token, N = 2*I when gated, else I.
#pragma once

#include <cstdint>

namespace int8moe {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };
enum Quant : int64_t { TOKEN = 0, TENSOR = 1, STATIC = 2, NONE = 3 };
enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

// w13 [E,N,H] or w2 [E,H,I]: codes, scales [E,rows], [E,1] or [E,2], and an optional bias [E,rows].
struct Weight {
  const int8_t* codes;
  int64_t expert_stride, row_stride, rows, columns;
  const float* scale;
  int64_t scale_expert_stride, scale_stride, scale_count;
  const void* bias;
  int64_t bias_dtype, bias_expert_stride;
};

struct Ids {
  const void* values;
  int64_t is_int64, row_stride, column_stride;

  int64_t at(int64_t row, int64_t column) const {
    const int64_t index = row * row_stride + column * column_stride;
    if (is_int64) return static_cast<const int64_t*>(values)[index];
    return static_cast<const int32_t*>(values)[index];
  }
};

struct Call {
  void* out;  // [T,H] contiguous
  int64_t out_dtype;
  const void* hidden;  // rows of H contiguous values
  int64_t hidden_dtype, hidden_row_stride;
  Weight w13, w2;
  const void* router;
  int64_t router_dtype, router_row_stride, router_column_stride;
  Ids ids;
  Ids expert_map;  // values null without a map
  int64_t expert_map_size;
  const float* a13_scale;  // null, or one value every a13_scale_stride
  int64_t a13_scale_stride;
  const float* a2_scale;
  int64_t tokens, experts, top_k;
  int64_t quant, activation, gated, router_on_input, has_limit;
  double alpha, beta, limit;
  int64_t threads, scratch_bytes;

  int64_t hidden_size() const { return w13.columns; }
  int64_t intermediate_size() const { return w2.columns; }
};

}  // namespace int8moe
