"""Load INT8 experts inside transformers' from_pretrained: quantised on disk, or on the way in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from ..checkpoint_config import read_config, with_headers
from ..checkpoint_files import read_headers
from ..errors import CheckpointError
from ..schemes import INT8_STATIC_TENSOR
from ..skip import warn_unmatched
from .checkpoint_online import plan_online
from .checkpoint_plan import LoadPlan, Planner
from .checkpoint_resolve import Names
from .checkpoint_save import state_dict_to_save
from .checkpoint_transforms import PlannedConverter, PlannedRenaming
from .checkpoint_values import check_rest, check_values
from .config import Int8MoeConfig
from .discovery import find_experts, weight_names
from .record import ExpertsRecord, keep_reason, keep_record, record_of
from .unsupported import find_unsupported
from .view import SCALE, install, is_complete, keep_without_gradient, put_weight

log = logging.getLogger(__name__)


class Int8MoeQuantizer(HfQuantizer):
    """Fill experts modules with int8 weights; everything else is transformers' own business."""

    requires_calibration = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._model: Any = None
        self._files: list[Path] = []
        self._device = torch.device("cpu")
        self._device_map: Any = None
        self._plan = LoadPlan()
        self._conversions: list[Any] = []

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be done while loading.

        transformers asks again once it has worked out a device map, when the plan stands.
        """
        self._refuse_disk(kwargs.get("device_map"))
        config = self.quantization_config
        if self.pre_quantized or not isinstance(config, Int8MoeConfig):
            return
        if config.scheme == "w8a8_static":
            raise ValueError(
                'scheme: "w8a8_static" wanted with calibration, got a load from float weights; '
                'load the model first, then int8moe_compile.quantize_(model, "w8a8_static", '
                "calibration=...)"
            )

    def _refuse_disk(self, device_map: Any) -> None:
        """Refuse a device map that puts int8 experts on disk: the loader fills no codes there."""
        if not isinstance(device_map, Mapping) or "disk" not in device_map.values():
            return
        for path, record in self._plan.records.items():
            for name in (record.structure.w13_name, record.structure.w2_name):
                if _placed(f"{path}.{name}", device_map) == "disk":
                    raise ValueError(
                        f"device_map: int8 experts on disk are not supported, got {path}.{name} "
                        "there; give the experts a device or the CPU (a larger max_memory, or a "
                        "device_map by hand); other modules may lie on disk"
                    )

    def update_tp_plan(self, config: Any) -> Any:
        """Refuse a parallel plan: it would split codes and scales that lie in our layout."""
        if getattr(config, "distributed_config", None) is not None:
            raise NotImplementedError(
                "tensor and expert parallel plans are not supported for int8 experts; load "
                "without distributed_config and tp_plan"
            )
        return config

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        device_map: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Keep what the plan needs; it is made once the family's conversions are known."""
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(
                f"wanted a checkpoint of safetensors files, got {[str(file) for file in files]}"
            )
        self._model, self._files, self._device = model, files, _first_device(device_map)
        self._device_map = device_map
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Plan the load, and put our own routes before the family's conversions.

        transformers 5.24 hands over the model as well, which is the one that is kept already.
        """
        model, self._conversions = self._model, weight_conversions
        if model is None:  # asked outside a load, when saving
            return weight_conversions
        entries = read_headers(self._files)
        names = Names(model, weight_conversions)
        directory = self._files[0].parent
        if self.pre_quantized:
            config = read_config(self.quantization_config.to_dict())
            config = with_headers(config, entries, self._files)
            dequantize = bool(getattr(self.quantization_config, "dequantize", False))
            planner = Planner(model, names, entries, config, directory, self._device, dequantize)
            self._plan = planner.run()
            check_values(self._plan.sources, self._plan.linears, entries, config.packed_zero)
            planned, blocks = self._plan.routes.targets, self._plan.blocks
            check_rest(model, names, entries, planned, blocks, directory)
        else:
            online: Any = self.quantization_config
            self._plan = plan_online(model, names, entries, online, directory, self._device)
            experts = [name for name, _ in (*find_experts(model), *find_unsupported(model))]
            warn_unmatched("skip, modules_to_not_convert", online.unmatched(experts))
        self._refuse_disk(self._device_map)
        self._prepare(model)
        routes = self._plan.routes
        return [PlannedRenaming(routes), PlannedConverter(routes), *weight_conversions]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Leave what goes to our builders in its own dtype: scales would be rounded to the model's.

        transformers asks from 5.24 on; before, it casts nothing that a quantised file holds.
        """
        if isinstance(converter, PlannedConverter):
            return None
        if isinstance(param, Tensor):
            return dtype if param.is_floating_point() else None
        return dtype if param.get_dtype().startswith(("F", "BF")) else None

    def _prepare(self, model: nn.Module) -> None:
        """Give every module that will be int8 the parameters and buffers that loading fills."""
        for path, record in self._plan.records.items():
            module = model.get_submodule(path)
            keep_record(module, record)
            for name, codes, scale, input_scale in _placeholders(module, record):
                if self.pre_quantized:
                    put_weight(module, name, codes, scale, input_scale)
                else:
                    # Loading casts to the placeholder's dtype before anything is quantised, and
                    # from transformers 5.24 on compares its shape with that of the codes.
                    held = getattr(module, name)
                    if held.shape != codes.shape:
                        setattr(module, name, nn.Parameter(held.new_empty(codes.shape), False))
                    module.register_buffer(name + SCALE, scale)
            install(module, record)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes that an element will take, for device maps."""
        path, _, name = param_name.rpartition(".")
        record = self._plan.records.get(path)
        if record is not None and name in (record.structure.w13_name, record.structure.w2_name):
            return 1.0
        return float(super().param_element_size(model, param_name, param))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Check that everything came, and finish the modules as quantize_ does."""
        from ..quantization import choose_implementation, warn_refused

        for path, record in self._plan.records.items():
            module = model.get_submodule(path)
            if not is_complete(module):
                raise CheckpointError(f"{path}: wanted int8 weights, got {_dtypes(module)}")
            for name in (record.structure.w13_name, record.structure.w2_name):
                keep_without_gradient(getattr(module, name))
        for path, reason in (self._plan.reasons | self._plan.skipped).items():
            keep_reason(model.get_submodule(path), reason)
        choose_implementation(model)
        warn_refused(self._plan.reasons)
        if self._plan.dequantised:
            kept = [name for name in self._plan.dequantised if name not in self._plan.reasons]
            log.warning(
                "dequantised to %s while loading, outside of int8 experts: %d modules (%s, ...)",
                model.dtype,
                len(self._plan.dequantised),
                (kept or self._plan.dequantised)[0],
            )
        # transformers keeps the conversions that it used; ours stand before them no more.
        model._weight_conversions = [c for c in self._conversions if c.was_used()]
        # It forbids half() and float() on quantised models; experts know how to keep their codes.
        model.is_quantized = False
        self._model, self._plan, self._conversions = None, LoadPlan(), []
        return model

    def is_serializable(self) -> bool:
        """Say that save_pretrained may be used."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Say that int8 codes take no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Say that generate may compile."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what save_pretrained writes, and put its description into the configuration."""
        return state_dict_to_save(model), {}


def attach(model: nn.Module) -> None:
    """Let save_pretrained write the int8 experts of quantize_; another quantizer stays."""
    saves = hasattr(model, "save_pretrained") and hasattr(model, "config")
    if not saves or getattr(model, "hf_quantizer", None) is not None:
        return
    records = [record_of(module) for _, module in find_experts(model)]
    found = next((record for record in records if record is not None), None)
    if found is not None:
        config = Int8MoeConfig(found.scheme.name)
        setattr(model, "hf_quantizer", Int8MoeQuantizer(config, pre_quantized=False))  # noqa: B010


def _placeholders(
    module: nn.Module, record: ExpertsRecord
) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Return name, codes, scale and input scale of both weights, on the meta device."""
    from .checkpoint_judge import need_of

    need = need_of("", module, record.structure)
    rows = need.intermediate * (2 if record.structure.gate.gated else 1)
    per_tensor = record.scheme.weight_key == INT8_STATIC_TENSOR
    halves = 2 if record.structure.gate.gated else 1
    sizes = ((rows, need.hidden, halves), (need.hidden, need.intermediate, 1))
    found: list[tuple[str, Tensor, Tensor, Tensor | None]] = []
    for name, (n, k, values) in zip(weight_names(module), sizes, strict=True):
        codes = torch.empty(need.experts, n, k, dtype=torch.int8, device="meta")
        scale = torch.empty(need.experts, values if per_tensor else n, device="meta").float()
        static = record.scheme.activation_quant == "static"
        input_scale = torch.empty(1, device="meta").float() if static else None
        found.append((name, codes, scale, input_scale))
    return found


def _first_device(device_map: Any) -> torch.device:
    """Return the device that most of a model goes to, as far as a device map says."""
    if isinstance(device_map, Mapping):
        devices = [device for device in device_map.values() if device not in ("cpu", "disk")]
        if not devices:
            return torch.device("cpu")
        first = devices[0]
        return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    if device_map is not None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _placed(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return where a parameter goes: the entry of the innermost module around it decides."""
    around = [key for key in device_map if not key or f"{name}.".startswith(f"{key}.")]
    return device_map[max(around, key=len)] if around else None


def _dtypes(module: nn.Module) -> str:
    """List the dtypes of a module's weights."""
    return ", ".join(str(getattr(module, name).dtype) for name in weight_names(module))
