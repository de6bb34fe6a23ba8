"""The switches: install and remove the pass, chain others, backend="int8moe", warnings, explain."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import int8moe_compile
from int8moe_compile import api, passes
from int8moe_compile.explain import NOT_QUANTISED
from int8moe_compile.passes import notices
from int8moe_compile.passes.joint import ExpertsPass


@pytest.fixture(autouse=True)
def clean_slot() -> Iterator[None]:
    with config.patch(joint_custom_pre_pass=None):
        yield
    torch.compiler.reset()


class Other(CustomGraphPass):
    """Somebody else's pass."""

    def __init__(self, identity: Any = "other") -> None:
        self.identity = identity
        self.seen: list[int] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(sum(node.target is MARKER for node in graph.nodes))

    def uuid(self) -> Any:
        return self.identity


def quantised(name: str = "MixtralExperts") -> Any:
    experts = hf_models.build_experts(hf_models.experts_class(name))
    return int8moe_compile.quantize_(experts)


def test_enable_and_disable() -> None:
    assert passes.installed() is None
    int8moe_compile.enable()
    first = passes.installed()
    assert isinstance(config.joint_custom_pre_pass, ExpertsPass)
    int8moe_compile.enable("cpu")
    second = passes.installed()
    assert second is not None and second is not first
    assert (second.backend, second.before) == ("cpu", None)
    int8moe_compile.disable()
    assert config.joint_custom_pre_pass is None
    int8moe_compile.disable()
    assert config.joint_custom_pre_pass is None


def test_both_forget_what_was_compiled() -> None:
    compilations = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compilations.append(gm)
        return gm.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    int8moe_compile.enable()
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    int8moe_compile.disable()
    compiled(torch.ones(2))
    assert len(compilations) == 3


@pytest.mark.parametrize("backend", ["cuda", "", None, "Auto"])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="backend: wanted one of 'auto', 'triton', 'humming'"):
        int8moe_compile.enable(backend)
    assert config.joint_custom_pre_pass is None


def test_enabled_nests_and_survives_exceptions() -> None:
    with int8moe_compile.enabled():
        outer = passes.installed()
        with pytest.raises(KeyError), int8moe_compile.enabled("cpu"):
            assert passes.installed().backend == "cpu"
            raise KeyError
        assert passes.installed().backend == outer.backend == "auto"
    assert config.joint_custom_pre_pass is None


def test_enabled_inside_enable_goes_back_to_it() -> None:
    int8moe_compile.enable("cpu")
    with int8moe_compile.enabled():
        assert passes.installed().backend == "auto"
    assert passes.installed().backend == "cpu"


@pytest.mark.parametrize("as_list", [False, True])
def test_another_pass_runs_and_is_back_afterwards(as_list: bool) -> None:
    other = Other()
    slot = [other] if as_list else other
    config.joint_custom_pre_pass = slot
    int8moe_compile.enable()
    int8moe_compile.enable()
    experts_pass = passes.installed()
    got = run(quantised(), *hf_models.routed(), experts_pass=experts_pass)
    assert other.seen == [2]  # once, and before ours
    assert len(got.calls(EXPERTS)) == 1
    int8moe_compile.disable()
    assert config.joint_custom_pre_pass == slot


def test_a_pass_added_beside_ours_stays() -> None:
    int8moe_compile.enable()
    other = Other()
    config.joint_custom_pre_pass = [config.joint_custom_pre_pass, other]
    int8moe_compile.disable()
    assert config.joint_custom_pre_pass == [other]


def test_the_identity_has_everything_in_it() -> None:
    identities = {
        str(ExpertsPass(backend, before).uuid())
        for backend in ("auto", "cpu")
        for before in (None, Other("a"), Other("b"), [Other("a"), Other("b")])
    }
    assert len(identities) == 8
    assert str(ExpertsPass().uuid()) == str(ExpertsPass().uuid())


@pytest.mark.parametrize("other", [lambda graph: None, Other(None), [Other(), lambda graph: None]])
def test_a_pass_without_identity_turns_caches_off(other: Any) -> None:
    assert ExpertsPass("auto", other).uuid() is None


def test_backend_by_name_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is looked up by torch from the installed package; here it is called."""
    seen: dict[str, Any] = {}

    def fake_compile_fx(gm: fx.GraphModule, inputs: Any, *, config_patches: Any) -> Any:
        seen.update(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fake_compile_fx)
    other = Other()
    config.joint_custom_pre_pass = other
    compiled = torch.compile(
        lambda x: x + 1,
        backend=api.int8moe_backend,
        mode="max-autotune-no-cudagraphs",
    )
    compiled(torch.ones(2))
    assert seen["max_autotune"] is True
    assert seen["joint_custom_pre_pass"].before is other
    assert config.joint_custom_pre_pass is other

    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: x + 1,
        backend=api.int8moe_backend,
        options={"epilogue-fusion": False, "joint_custom_pre_pass": None},
    )
    compiled(torch.ones(2))
    assert seen["epilogue_fusion"] is False
    assert seen["joint_custom_pre_pass"].before is None


def test_backend_by_name_refuses_an_unknown_option() -> None:
    compiled = torch.compile(
        lambda x: x + 1, backend=api.int8moe_backend, options={"no_such_option": 1}
    )
    with pytest.raises(Exception, match="no_such_option"):
        compiled(torch.ones(2))


@pytest.mark.parametrize("off", [True, False])
def test_compiling_with_the_pass_off_warns_once(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: gm.forward)
    notices.forget()
    if not off:
        int8moe_compile.enable()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for name in ("MixtralExperts", "GptOssExperts"):
            torch.compile(quantised(name))(*hf_models.routed())
    ours = [w for w in caught if str(w.message) == notices.PASS_OFF]
    assert len(ours) == (1 if off else 0)


def test_other_backends_do_not_warn() -> None:
    notices.forget()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.compile(quantised(), backend="eager")(*hf_models.routed())
        torch.export.export(quantised(), hf_models.routed())
        run(quantised(), *hf_models.routed())
    assert not [w for w in caught if str(w.message) == notices.PASS_OFF]


def test_explain_from_the_modules_alone() -> None:
    model = hf_models.build_model("qwen3_moe")
    before = int8moe_compile.explain(model)
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert [layer.name for layer in before] == names
    assert {(layer.accepted, layer.backend, layer.reason) for layer in before} == {
        (False, None, NOT_QUANTISED)
    }
    assert all(layer.bytes_before == layer.bytes_after > 0 for layer in before)
    int8moe_compile.quantize_(model, skip="*.1.*")
    int8, skipped = int8moe_compile.explain(model)
    experts = model.get_submodule(names[0])
    elements = experts.gate_up_proj.numel() + experts.down_proj.numel()
    scales = experts.gate_up_proj_scale.numel() + experts.down_proj_scale.numel()
    assert (int8.kind, int8.scheme) == ("Qwen3MoeExperts", "w8a8")
    assert (int8.accepted, int8.backend, int8.reason) == (True, "cpu", None)
    assert (int8.bytes_before, int8.bytes_after) == (2 * elements, elements + 4 * scales)
    assert not skipped.accepted and "'*.1.*'" in str(skipped.reason)


def test_explain_is_a_table() -> None:
    model = int8moe_compile.quantize_(hf_models.build_model("qwen3_moe"), skip="*.1.*")
    lines = str(int8moe_compile.explain(model)).splitlines()
    assert lines[0].split() == [
        "name",
        "kind",
        "scheme",
        "accepted",
        "backend",
        "reason",
        "bytes_before",
        "bytes_after",
    ]
    assert len(lines) == 4
    assert lines[2].split()[:5] == [
        "model.layers.0.mlp.experts",
        "Qwen3MoeExperts",
        "w8a8",
        "yes",
        "cpu",
    ]
    assert str(int8moe_compile.explain(torch.nn.Linear(2, 2))) == "no experts layers"


def test_explain_with_inputs_says_what_the_pass_did() -> None:
    model = int8moe_compile.quantize_(hf_models.build_model("qwen3_moe"), skip="*.1.*")
    ids = hf_models.token_ids()
    int8, skipped = int8moe_compile.explain(torch.compile(model), ids, use_cache=False)
    assert (int8.accepted, int8.backend, int8.reason) == (True, "cpu", None)
    assert not skipped.accepted and "'*.1.*'" in str(skipped.reason)
    assert config.joint_custom_pre_pass is None


def test_explain_shows_the_reason_of_the_pass() -> None:
    experts = quantised()
    experts.config._experts_implementation = "eager"
    (layer,) = int8moe_compile.explain(experts, *hf_models.routed())
    assert not layer.accepted and layer.backend is None
    assert "set_experts_implementation('grouped_mm')" in str(layer.reason)


def test_explain_says_that_weights_are_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = int8moe_compile.quantize_(hf_models.build_model("qwen3_moe"))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for layer in int8moe_compile.explain(model):
        assert layer.scheme == "w8a8" and not layer.accepted and layer.backend is None
        assert "its weights are offloaded or not loaded" in str(layer.reason)


@pytest.mark.parametrize("model", [None, "mixtral", 5])
def test_explain_wants_a_module(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model: wanted a torch\.nn\.Module, got "):
        int8moe_compile.explain(model)


def test_explain_shows_a_named_backend_that_refuses() -> None:
    experts = quantised()
    with int8moe_compile.enabled("triton"):
        for inputs in ((), hf_models.routed()):
            (layer,) = int8moe_compile.explain(experts, *inputs)
            assert not layer.accepted and "needs a CUDA or ROCm device" in str(layer.reason)


def test_explain_runs_the_passes_that_were_there_and_does_not_warn() -> None:
    notices.forget()
    experts, other = quantised(), Other()
    experts.config._experts_implementation = "eager"
    config.joint_custom_pre_pass = other
    with int8moe_compile.enabled(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        int8moe_compile.explain(experts, *hf_models.routed())
    assert sum(other.seen) > 0
    assert not [w for w in caught if "run dequantised" in str(w.message)]


def test_a_pass_derived_from_ours_is_installed() -> None:
    class Derived(ExpertsPass):
        """Somebody's version of our pass."""

    config.joint_custom_pre_pass = Derived("cpu")
    active = passes.installed()
    assert active is config.joint_custom_pre_pass
    int8moe_compile.disable()
    assert config.joint_custom_pre_pass is None
