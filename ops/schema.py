"""Names and schemas of the operators: the one place where their signatures stand."""

from __future__ import annotations

from typing import Final

NAMESPACE: Final = "int8moe"

EXPERTS: Final = (
    "experts(Tensor hidden_states, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
    'Tensor topk_weights, Tensor topk_ids, *, str activation_quant="token", '
    "Tensor? a13_scale=None, Tensor? a2_scale=None, Tensor? w13_bias=None, Tensor? w2_bias=None, "
    'str activation="silu", float alpha=1.0, float beta=0.0, float? limit=None, bool gated=True, '
    "Tensor? expert_map=None, bool apply_router_weight_on_input=False, "
    "ScalarType? out_dtype=None) -> Tensor"
)
DEQUANTIZE: Final = (
    "dequantize(Tensor codes, Tensor scale, *, ScalarType dtype, "
    'str activation_quant="token", Tensor? a_scale=None) -> Tensor'
)
# The same arguments and meaning, run by humming-kernels; see ops/humming.py for what it refuses.
HUMMING_EXPERTS: Final = f"humming_{EXPERTS}"
# Internal: products of lowerings/wgmma.py and stream.py, for graphs, which cannot hold kernels of
# their language.
WGMMA_UP: Final = (
    "_wgmma_up(Tensor(a!) out, Tensor rows, Tensor scale, Tensor w, Tensor w_scale, Tensor? bias, "
    "Tensor tiles, Tensor? code_scale, bool is_per_row, str dtype, str activation, float alpha, "
    "float beta, float? limit, bool gated, bool is_early, SymInt programs, int[] tile) -> ()"
)
WGMMA_DOWN: Final = (
    "_wgmma_down(Tensor(a!) out, Tensor rows, Tensor scale, Tensor w, Tensor w_scale, "
    "Tensor? bias, Tensor tiles, Tensor order, Tensor topk_weights, bool is_per_row, "
    "bool is_weighted, bool is_early, bool is_old, SymInt programs, int[] tile) -> ()"
)
STREAM: Final = (
    "_stream(Tensor(a!) out, Tensor(b!) middle, Tensor(c!) codes, Tensor(d!) code_scale, "
    "Tensor(e!) progress, Tensor rows, Tensor scale, Tensor w13, Tensor w13_scale, "
    "Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? w2_bias, Tensor tiles, Tensor order, "
    "Tensor topk_weights, Tensor? given_scale, bool is_per_row, str activation, float alpha, "
    "float beta, float? limit, bool is_weighted, bool is_early, bool is_old, SymInt programs, "
    "int[] tile) -> ()"
)
NO_BACKWARD: Final = "no_backward(Tensor grad) -> Tensor"

ACTIVATION_QUANTS: Final = ("token", "tensor", "static", "none")
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
