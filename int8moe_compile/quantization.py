"""Quantise the experts of a Hugging Face model in place: the implementation behind quantize_."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .compat import require_transformers
from .ops.checks import FLOATS
from .ops.quantize import quantize_weight
from .oracle import MoeProblem, select_int8_moe_backend
from .passes.layouts import Which, from_hf_bias, from_hf_layout
from .schemes import INT8_STATIC_TENSOR, Scheme, parse_scheme
from .skip import matching_pattern, patterns_of, warn_unmatched
from .structure import ExpertsStructure, Layout

if TYPE_CHECKING:
    from .hf.record import ExpertsRecord


@dataclass(frozen=True)
class _Job:
    """Name one module that is to be quantised, and how."""

    name: str
    module: nn.Module
    record: ExpertsRecord
    input_scales: tuple[Tensor, Tensor] | None = None


def quantize_(
    model: nn.Module,
    scheme: str | Scheme = "w8a8",
    *,
    skip: str | Iterable[str] | None = (),
    calibration: Iterable[Any] | None = None,
) -> nn.Module:
    """Quantise every experts module of a Hugging Face model to int8, in place; return the model.

    Weights go expert by expert, from bf16, fp16 or fp32. skip: fnmatch patterns of the names of
    experts modules, or of modules around them; one warning names those that match nothing.
    calibration: an iterable of model inputs (tensor, dict or tuple), or a dataset with a length and
    items, for "w8a8_static". A module that is quantised already stays as it is. One that cannot be
    quantised is left as it was, with one warning, and the reason is kept for explain.

    Raises ValueError: no experts module in the model, an unknown scheme, a weight on the meta
    device, another scheme than the one a module has, calibration missing, superfluous or of a wrong
    kind. TypeError: no module, no patterns. ImportError: transformers is missing or too old.
    """
    require_transformers()
    # Importing it imports transformers, which a bare import of the package must not do.
    from .hf import attach_quantizer, find_experts
    from .hf.unsupported import find_unsupported

    if not isinstance(model, nn.Module):
        raise TypeError(f"model: wanted a torch.nn.Module, got {type(model).__name__}")
    wanted = parse_scheme(scheme)
    patterns = patterns_of(skip)
    is_static = wanted.activation_quant == "static"
    if calibration is not None:
        _check_calibration(calibration, wanted)
    found, others = list(find_experts(model)), list(find_unsupported(model))
    if not found and not others:
        raise ValueError(
            f"model: wanted one with experts modules of transformers, got {type(model).__name__} "
            "without any"
        )
    names = [name for name, _ in (*found, *others)]
    unmatched = [p for p in patterns if all(matching_pattern(n, [p]) is None for n in names)]
    jobs, refused = _plan(found, wanted, patterns, exact=isinstance(scheme, Scheme))
    refused |= _refuse(others, patterns)
    if jobs and is_static:
        jobs, unmeasured = _calibrated(model, jobs, calibration, wanted)
        refused |= unmeasured
    for job in jobs:
        _quantise_module(job)
    choose_implementation(model)
    attach_quantizer(model)
    warn_refused(refused)
    warn_unmatched("skip", unmatched)
    return model


def _plan(
    found: Sequence[tuple[str, nn.Module]],
    wanted: Scheme,
    patterns: Sequence[str],
    *,
    exact: bool,
) -> tuple[list[_Job], dict[str, str]]:
    """Decide about every module before any is changed; return jobs, and reasons by module name.

    exact: a module quantised already has to agree in its keys, not in the scheme's name alone.
    """
    from .hf.record import keep_reason, record_of
    from .hf.view import is_complete

    jobs: list[_Job] = []
    refused: dict[str, str] = {}
    for name, module in found:
        record = record_of(module)
        pattern = matching_pattern(name, patterns)
        if pattern is not None:
            if record is None:
                keep_reason(module, f"skipped: its name matches {pattern!r}")
            continue
        if record is not None and not _agree(record.scheme, wanted, exact):
            raise ValueError(
                f'scheme: module "{name}" wanted as {wanted}, got one quantised as '
                f"{record.scheme} already"
            )
        if record is not None and is_complete(module):
            continue
        planned = record if record is not None else _judge(name, module, wanted)
        if isinstance(planned, str):
            keep_reason(module, planned)
            refused[name] = planned
        else:
            jobs.append(_Job(name, module, planned))
    return jobs, refused


def _agree(found: Scheme, wanted: Scheme, exact: bool) -> bool:
    """Say whether a module needs nothing more; a name stands for either weight granularity."""
    return found == wanted if exact else found.name == wanted.name


def _refuse(others: Sequence[tuple[str, nn.Module]], patterns: Sequence[str]) -> dict[str, str]:
    """Keep on experts of unsupported kinds why they stay; return reasons by module name."""
    from .hf.record import keep_reason
    from .hf.unsupported import reason_unsupported

    refused: dict[str, str] = {}
    for name, module in others:
        reason = reason_unsupported(module)
        keep_reason(module, reason)
        if matching_pattern(name, patterns) is None:
            refused[name] = reason
    return refused


def _judge(name: str, module: nn.Module, wanted: Scheme) -> ExpertsRecord | str:
    """Return what quantising a module will make of it, or why it cannot be done.

    Raises ValueError for a weight on the meta device, which a user can mend.
    """
    from .hf.discovery import weight_names
    from .hf.gates import UnknownGateError, recognise_gate
    from .hf.record import ExpertsRecord

    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        return "its forward was replaced on the instance; the class's own is needed"
    w13_name, w2_name = weight_names(module)
    for weight_name in (w13_name, w2_name):
        weight = getattr(module, weight_name)
        if weight.device.type == "meta":
            parameter = f"{name}.{weight_name}" if name else weight_name
            raise ValueError(
                f"model: parameter {parameter} wanted with data, got one on the meta device; load "
                "the weights first, or quantise while loading with Int8MoeConfig"
            )
        refusal = _weight_refusal(module, weight_name, weight)
        if refusal is not None:
            return refusal
    try:
        found = recognise_gate(module)
    except UnknownGateError as error:
        return str(error)
    layout = Layout(bool(module.is_transposed), found.interleaved, bool(module.has_bias))
    structure = ExpertsStructure(found.gate, layout, w13_name, w2_name)
    record = ExpertsRecord(wanted, structure, getattr(module, w13_name).dtype, found.reads)
    return shape_refusal(module, structure) or oracle_refusal(module, record) or record


def _weight_refusal(module: nn.Module, name: str, weight: Tensor) -> str | None:
    """Say what about one weight is not plain floating point."""
    if type(weight) not in (nn.Parameter, Tensor):
        return f"{name} is a {type(weight).__name__}; plain tensors only (no parallel plan)"
    if weight.dtype not in FLOATS:
        return f"{name} has dtype {weight.dtype}; bfloat16, float16 or float32 can be quantised"
    if name not in module._parameters:
        return f"{name} is no parameter of the module"
    if weight.numel() == 0:
        return f"{name} has shape {list(weight.shape)}, without values"
    low, high = torch.aminmax(weight.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return f"{name} has values that are not finite"
    return None


def shape_refusal(module: nn.Module, structure: ExpertsStructure) -> str | None:
    """Say why the two weights, brought into our layout, do not belong together."""
    w13 = from_hf_layout(getattr(module, structure.w13_name), structure.layout, "w13")
    w2 = from_hf_layout(getattr(module, structure.w2_name), structure.layout, "w2")
    experts, hidden, intermediate = w2.shape
    rows = 2 * intermediate if structure.gate.gated else intermediate
    if tuple(w13.shape) != (experts, rows, hidden):
        return (
            f"{structure.w13_name}: wanted shape {[experts, rows, hidden]} beside "
            f"{structure.w2_name}, got {list(w13.shape)}"
        )
    if structure.layout.has_bias:
        for name, size in ((structure.w13_name, rows), (structure.w2_name, hidden)):
            bias = getattr(module, name + "_bias", None)
            if not isinstance(bias, Tensor) or tuple(bias.shape) != (experts, size):
                return f"{name}_bias: wanted a tensor of shape {[experts, size]}"
    return None


def problem_of(module: nn.Module, record: ExpertsRecord, w2: Tensor) -> MoeProblem:
    """Describe a module to the oracle; w2: its second weight in our layout [E,H,I]."""
    structure = record.structure
    top_k = getattr(module.config, "num_experts_per_tok", None)
    return MoeProblem(
        num_experts=w2.shape[0],
        top_k=top_k if isinstance(top_k, int) and top_k > 0 else 1,
        hidden_size=w2.shape[1],
        intermediate_size=w2.shape[2],
        dtype=record.dtype,
        gated=structure.gate.gated,
        activation=structure.gate.activation,
        has_bias=structure.layout.has_bias,
    )


def oracle_refusal(
    module: nn.Module, record: ExpertsRecord, device: torch.device | None = None
) -> str | None:
    """Ask whether any backend would run the module on a device, by default where it is now."""
    structure = record.structure
    w2 = from_hf_layout(getattr(module, structure.w2_name), structure.layout, "w2")
    problem = problem_of(module, record, w2)
    scheme = record.scheme
    try:
        select_int8_moe_backend(
            problem, scheme.weight_key, scheme.activation_key, device=device or w2.device
        )
    except NotImplementedError as error:
        return str(error)
    return None


def _check_calibration(calibration: object, wanted: Scheme) -> None:
    """Refuse what no model input can come from, also where nothing is left to calibrate."""
    from .hf.calibration import check_calibration

    if wanted.activation_quant != "static":
        raise ValueError(f'calibration: wanted None with scheme "{wanted.name}", got one')
    check_calibration(calibration)


def _calibrated(
    model: nn.Module, jobs: Sequence[_Job], calibration: Iterable[Any] | None, wanted: Scheme
) -> tuple[list[_Job], dict[str, str]]:
    """Measure the activations; return the jobs with their scales, and reasons by module name."""
    from .hf.calibration import WANTED, measure
    from .hf.record import keep_reason

    if calibration is None:
        raise ValueError(f'calibration: wanted {WANTED} with scheme "{wanted.name}", got None')
    ranges = measure(model, {job.name: job.module for job in jobs}, calibration)
    ready: list[_Job] = []
    refused: dict[str, str] = {}
    for job in jobs:
        scales = ranges[job.name].scales()
        if isinstance(scales, str):
            keep_reason(job.module, scales)
            refused[job.name] = scales
        else:
            ready.append(_Job(job.name, job.module, job.record, scales))
    return ready, refused


def _quantise_module(job: _Job) -> None:
    """Exchange the weights of one module; it can run at any moment in between."""
    from .hf.record import keep_record
    from .hf.view import install, put_weight

    module, structure = job.module, job.record.structure
    keep_record(module, job.record)
    install(module, job.record)
    scales = job.input_scales or (None, None)
    pairs: tuple[tuple[Which, str, Tensor | None], ...] = (
        ("w13", structure.w13_name, scales[0]),
        ("w2", structure.w2_name, scales[1]),
    )
    for which, name, input_scale in pairs:
        if getattr(module, name).dtype == torch.int8:
            continue
        codes, scale = _encoded(module, job.record, which, name)
        if structure.layout.has_bias and which == "w13":
            bias = getattr(module, name + "_bias")
            bias.data = from_hf_bias(bias.data, structure.layout, which)
        put_weight(module, name, codes, scale, input_scale)


@torch.no_grad()
def _encoded(
    module: nn.Module, record: ExpertsRecord, which: Which, name: str
) -> tuple[Tensor, Tensor]:
    """Quantise one weight, with no more than one expert in float beside the codes."""
    weight = getattr(module, name)
    layout = record.structure.layout
    granularity = "channel"
    if record.scheme.weight_key == INT8_STATIC_TENSOR:
        granularity = "halves" if which == "w13" and record.structure.gate.gated else "tensor"
    codes: Tensor | None = None
    scales: list[Tensor] = []
    for expert in range(weight.shape[0]):
        ours = from_hf_layout(weight[expert : expert + 1], layout, which)
        expert_codes, scale = quantize_weight(ours, granularity)
        if codes is None:
            shape = (weight.shape[0], *expert_codes.shape[1:])
            codes = torch.empty(shape, dtype=torch.int8, device=weight.device)
        codes[expert] = expert_codes[0]
        scales.append(scale)
    assert codes is not None, "a weight without experts passed the checks"
    return codes, torch.cat(scales)


def choose_implementation(model: nn.Module) -> None:
    """Put "int8moe" where transformers' default stood and experts are quantised now."""
    from .compat import choose_experts_implementation
    from .hf.experts import DEFAULT_IMPLEMENTATION, IMPLEMENTATION
    from .hf.record import record_of

    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) != DEFAULT_IMPLEMENTATION:
            continue
        if any(record_of(inner) is not None for inner in module.modules()):
            choose_experts_implementation(config, IMPLEMENTATION)


def warn_refused(refused: Mapping[str, str]) -> None:
    """Warn once a reason, naming the modules that were left as they were."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name or "(the model itself)")
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(f"left as it was: {shown}: {reason}", UserWarning, stacklevel=3)
