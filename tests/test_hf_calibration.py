"""Static activation scales from calibration inputs."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor, nn

from int8moe_compile.hf import experts_arguments, find_experts, reason_of, record_of
from int8moe_compile.quantization import quantize_


def largest_by_hand(experts: nn.Module, calls: list[tuple[Tensor, ...]]) -> tuple[float, float]:
    """Return the largest |input| of both products over live contributions, one at a time."""
    first, second = [], []
    for hidden_states, ids, _ in calls:
        for row, chosen in zip(hidden_states, ids.tolist(), strict=True):
            for expert in chosen:
                if not 0 <= expert < experts.num_experts:
                    continue
                weight = (
                    experts.gate_up_proj[expert] if experts.has_gate else experts.up_proj[expert]
                )
                h = row @ weight if experts.is_transposed else weight @ row
                if experts.has_bias:
                    h = h + experts.gate_up_proj_bias[expert]
                h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
                first.append(row.abs().max())
                second.append(h.abs().max())
    return float(torch.stack(first).max()), float(torch.stack(second).max())


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_scales_are_those_of_live_contributions(name: str) -> None:
    experts = hf_models.build_experts(hf_models.experts_class(name), dtype=torch.float32)
    calls = []
    for seed in (1, 2):
        hidden_states, ids, weights = hf_models.routed(seed=seed, dtype=torch.float32)
        # Two tokens without any expert carry the largest values: they must not count.
        hidden_states[:2] *= 1000
        ids[0], ids[1] = hf_models.EXPERTS, hf_models.EXPERTS + 3
        ids[2, 1], weights[2, 1] = hf_models.EXPERTS, 0
        calls.append((hidden_states, ids, weights))
    a13, a2 = largest_by_hand(experts, calls)
    quantize_(experts, "w8a8_static", calibration=calls)
    arguments = experts_arguments(experts)
    for scale, wanted in ((arguments["a13_scale"], a13), (arguments["a2_scale"], a2)):
        assert scale.shape == (1,) and scale.dtype == torch.float32
        assert float(scale) == pytest.approx(wanted / 127, rel=1e-5)
    w13 = "gate_up_proj" if experts.has_gate else "up_proj"
    assert {f"{w13}_input_scale", "down_proj_input_scale"} < set(experts.state_dict())
    result = experts(*calls[0])
    assert not bool(result[:2].any())


class Rows:
    """A map-style dataset: items and a length, but no iterator, and no end by IndexError."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return hf_models.token_ids(seed=index)


class Unsized(torch.utils.data.IterableDataset[Tensor]):
    """A stream, whose DataLoader has a __len__ that raises."""

    def __iter__(self) -> Any:
        return iter([hf_models.token_ids()[0]])


@pytest.mark.parametrize("kind", ["tensor", "dict", "tuple", "generator", "dataset", "loader"])
def test_kinds_of_inputs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf_models.build_model("qwen3_moe").train()
    ids = hf_models.token_ids()
    inputs: dict[str, Any] = {
        "tensor": [ids],
        "dict": [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}],
        "tuple": [(ids, torch.ones_like(ids))],
        "generator": (hf_models.token_ids(seed=seed) for seed in range(3)),
        "dataset": Rows(),
        "loader": torch.utils.data.DataLoader(Unsized(), batch_size=2),
    }
    quantize_(model, "w8a8_static", calibration=inputs[kind])
    for _, experts in find_experts(model):
        record = record_of(experts)
        assert record is not None and record.scheme.name == "w8a8_static"
        assert float(experts.gate_up_proj_input_scale) > 0
        assert "forward" in experts.__dict__
    assert all(module.training for module in model.modules())
    assert "calibrating" in capsys.readouterr().err
    assert bool(torch.isfinite(model.eval()(ids).logits).all())


def test_calibration_leaves_what_is_not_quantised() -> None:
    model = hf_models.build_model("mixtral")
    ids = hf_models.token_ids()
    quantize_(model, "w8a8_static", calibration=[ids], skip="*.1.*")
    first, second = (module for _, module in find_experts(model))
    assert record_of(first) is not None and record_of(second) is None
    assert "forward" not in second.__dict__
    scale = first.gate_up_proj_input_scale.clone()
    quantize_(model, "w8a8_static", calibration=[hf_models.token_ids(seed=9)])
    assert record_of(second) is not None
    assert torch.equal(first.gate_up_proj_input_scale, scale)
    quantize_(model, "w8a8_static")  # nothing left to do, so nothing to calibrate


@pytest.mark.parametrize(
    ("scheme", "calibration", "message"),
    [
        ("w8a8_static", None, "calibration: wanted an iterable .* got None"),
        ("w8a8_static", [], "calibration: wanted an iterable .* got an empty one"),
        ("w8a8_static", torch.zeros(1, 4, dtype=torch.int64), "calibration: .* got Tensor"),
        ("w8a8_static", {"input_ids": 1}, "calibration: .* got dict"),
        ("w8a8_static", ["text"], "calibration: .* got an item str"),
        ("w8a8_static", 5, "calibration: .* got int"),
        ("w8a8_static", [5], "calibration: .* got an item int"),
        ("w8a8_static", [[1, 2, 3]], "calibration: .* got an item list without a tensor"),
        ("w8a8_static", [[[1, 2, 3]]], "calibration: .* got an item list without a tensor"),
        ("w8a8_static", [{"input_ids": [1]}], "calibration: .* got an item dict without a tensor"),
        ("w8a8_static", [()], "calibration: .* got an item tuple without a tensor"),
        ("w8a8", [torch.zeros(1, 4, dtype=torch.int64)], 'calibration: wanted None with .*"w8a8"'),
    ],
)
def test_wrong_calibration(scheme: str, calibration: Any, message: str) -> None:
    model = hf_models.build_model("mixtral")
    with pytest.raises(ValueError, match=message):
        quantize_(model, scheme, calibration=calibration)
    for _, experts in find_experts(model):
        assert record_of(experts) is None
        assert "forward" not in experts.__dict__


@pytest.mark.parametrize("calibration", [5, torch.zeros(1, 4, dtype=torch.int64), [], "text"])
def test_wrong_calibration_is_seen_where_nothing_is_left_to_do(calibration: Any) -> None:
    model = hf_models.build_model("mixtral")
    with pytest.raises(ValueError, match="calibration: wanted an iterable"):
        quantize_(model, "w8a8_static", calibration=calibration, skip="*")
    quantize_(model, "w8a8_static", calibration=[hf_models.token_ids()])
    with pytest.raises(ValueError, match="calibration: wanted an iterable"):
        quantize_(model, "w8a8_static", calibration=calibration)


def test_module_that_calibration_never_reaches() -> None:
    kind = hf_models.experts_class("MixtralExperts")
    model = nn.ModuleDict(
        {"used": hf_models.build_experts(kind), "idle": hf_models.build_experts(kind)}
    )
    model.forward = lambda *args: model["used"](*args)
    with pytest.warns(UserWarning, match="idle: no calibration input reached it"):
        quantize_(model, "w8a8_static", calibration=[hf_models.routed()])
    assert record_of(model["used"]) is not None
    assert reason_of(model["idle"]) == "no calibration input reached it"
    assert model["idle"].gate_up_proj.dtype == torch.bfloat16


def test_calibration_with_infinities() -> None:
    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    hidden_states, ids, weights = hf_models.routed()
    hidden_states[0, 0] = float("inf")
    with pytest.warns(UserWarning, match="not finite"):
        quantize_(experts, "w8a8_static", calibration=[(hidden_states, ids, weights)])
    assert record_of(experts) is None
