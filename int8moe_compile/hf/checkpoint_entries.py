"""Register our configuration and quantizer with transformers, and wrap those of known formats.

transformers refuses a second registration of a name, so the entries of the formats are replaced
by ones that hand everything without int8 experts to what stood there before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from ..checkpoint_config import (
    COMPRESSED_TENSORS,
    GPTQ,
    OURS,
    QUARK,
    TORCHAO,
    concerns_us,
    read_config,
)
from ..checkpoint_fields import MalformedError
from ..checkpoint_files import read_headers
from ..checkpoint_names import parse_name
from ..errors import CheckpointError
from .checkpoint_judge import experts_of
from .config import CheckpointQuantization, Int8MoeConfig
from .discovery import find_experts
from .quantizer import Int8MoeQuantizer

WRAPPED: Final = (COMPRESSED_TENSORS, QUARK, GPTQ, TORCHAO)
_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


def claims(config: Mapping[str, Any]) -> bool:
    """Say whether a ``quantization_config`` could describe int8 experts.

    Whether a malformed one would have, is seen from the files once they are known.
    """
    try:
        return read_config(config).claims_experts()
    except MalformedError:
        return True
    except CheckpointError:
        return False


@functools.cache
def register() -> None:
    """Register with transformers, once a process."""
    register_quantization_config(OURS)(Int8MoeConfig)
    register_quantizer(OURS)(Int8MoeQuantizer)
    for method in WRAPPED:
        if method in AUTO_QUANTIZATION_CONFIG_MAPPING and method in AUTO_QUANTIZER_MAPPING:
            _wrap(method)


def _wrap(method: str) -> None:
    """Put our entries before those of one format."""
    former_config: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[method]
    former_quantizer: Any = AUTO_QUANTIZER_MAPPING[method]

    # A subclass of the former one, for transformers to put a user's loading options on it.
    class FoundConfig(CheckpointQuantization, former_config):  # type: ignore[misc]
        """Carry a configuration that may describe int8 experts."""

    # transformers compares the class names of a file's configuration and a user's.
    FoundConfig.__name__ = former_config.__name__

    class ConfigEntry(former_config):  # type: ignore[misc]
        """Read a configuration of this format."""

        @classmethod
        def from_dict(cls, config_dict: Any, *args: Any, **kwargs: Any) -> Any:
            """Keep what could be int8 experts; leave the rest to transformers."""
            wanted = FoundConfig if claims(config_dict) else former_config
            return wanted.from_dict(config_dict, *args, **kwargs)

    class QuantizerEntry(Int8MoeQuantizer):
        """Load a checkpoint of this format."""

        def __new__(cls, quantization_config: Any, **kwargs: Any) -> Any:
            if isinstance(quantization_config, FoundConfig):
                return super().__new__(cls)
            return former_quantizer(quantization_config, **kwargs)

        def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> Any:
            """Become transformers' own quantizer if the model has no int8 experts."""
            files = kwargs.get("checkpoint_files")
            config: Any = self.quantization_config
            if not has_int8_experts(model, config, files):
                former = former_config.from_dict(config.to_dict())
                for option, value in config.options().items():
                    setattr(former, option, value)
                own = former_quantizer(former, pre_quantized=self.pre_quantized)
                own.validate_environment(device_map=kwargs.get("device_map"))
                own.update_tp_plan(model.config)
                own.update_ep_plan(model.config)
                # The loader holds this object already; from here on it is the other one.
                self.__class__, self.__dict__ = type(own), own.__dict__
            else:
                self.__class__ = Int8MoeQuantizer  # type: ignore[assignment]
            return self.preprocess_model(model, dtype=dtype, **kwargs)

        def update_tp_plan(self, config: Any) -> Any:
            """Wait until it is known whose checkpoint it is."""
            return config

    AUTO_QUANTIZATION_CONFIG_MAPPING[method] = ConfigEntry
    AUTO_QUANTIZER_MAPPING[method] = QuantizerEntry


def has_int8_experts(
    model: Any, quantization: CheckpointQuantization, files: Sequence[str] | None
) -> bool:
    """Say whether experts of a model are int8, by the configuration or by the files' headers.

    Raises MalformedError if experts are quantised and the configuration cannot be read.
    """
    modules = dict(find_experts(model))
    if not modules:
        return False
    entries = read_headers(Path(file) for file in files or () if file.endswith(".safetensors"))
    try:
        config = read_config(quantization.to_dict())
    except MalformedError:
        names = filter(None, map(parse_name, entries))
        if any(name.part in ("scale", "packed", "qweight") for name in names):
            raise
        return False
    for path, module in modules.items():
        for expert, projection in itertools.product(range(experts_of(module)), _PROJECTIONS):
            keys = config.keys_of([f"{path}.{expert}.{projection}"], type(module).__name__)
            if keys is not None and concerns_us(keys):
                return True
    for key, entry in entries.items():
        name = parse_name(key)
        if name is not None and name.part == "weight" and entry.dtype == torch.int8:
            return True
    return False
