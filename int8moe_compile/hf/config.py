"""Configurations that transformers hands to our quantizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint_config import OURS, read_config
from ..checkpoint_fields import patterns
from ..schemes import SCHEMES, Scheme, parse_scheme
from ..skip import matching_part, matching_pattern


class Int8MoeConfig(QuantizationConfigMixin):
    """Ask for INT8 experts while a float checkpoint is being loaded.

    scheme: as for quantize_, but "w8a8_static", which needs calibration on a loaded model.
    skip: fnmatch patterns of the names of experts modules, or of modules around them.
    modules_to_not_convert: names, or parts of names between dots, in transformers' own manner. Both
    leave experts modules in float; one warning names what matches nothing.

    One string means one pattern, None none.

    Raises ValueError for a scheme that is not known, or that its name alone does not describe,
    TypeError for patterns that are no strings.
    """

    def __init__(
        self,
        scheme: str | Scheme = "w8a8",
        *,
        skip: str | Sequence[str] | None = (),
        modules_to_not_convert: str | Sequence[str] | None = None,
        quant_method: str = OURS,
    ) -> None:
        if quant_method != OURS:
            raise ValueError(f"quant_method: wanted {OURS!r}, got {quant_method!r}")
        self.quant_method: Any = OURS
        wanted = parse_scheme(scheme)
        if wanted != SCHEMES[wanted.name]:
            raise ValueError(
                f"scheme: wanted one that its name describes, got {wanted}, which config.json has "
                "no word for; load the model first, then int8moe_compile.quantize_(model, scheme)"
            )
        self.scheme = wanted.name
        self.skip = list(patterns("skip", skip))
        self.modules_to_not_convert = list(
            patterns("modules_to_not_convert", modules_to_not_convert)
        )

    def skips(self, name: str) -> str | None:
        """Return the pattern that leaves a module out, None if none does."""
        return matching_pattern(name, self.skip) or matching_part(name, self.modules_to_not_convert)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns of either argument that leave out none of some modules."""
        return [
            *(p for p in self.skip if all(matching_pattern(n, [p]) is None for n in names)),
            *(
                part
                for part in self.modules_to_not_convert
                if all(matching_part(n, [part]) is None for n in names)
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in a config.json."""
        return copy.deepcopy(self.__dict__)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Take the fields of a config.json; raises CheckpointError for those it cannot have."""
        read_config({"quant_method": OURS, **config_dict})
        parent: Any = super()
        return parent.from_dict(config_dict, return_unused_kwargs, **kwargs)


class CheckpointQuantization(QuantizationConfigMixin):
    """Carry a checkpoint's own ``quantization_config`` as it is."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = copy.deepcopy(dict(fields))
        method = fields.get("quant_method")
        self.quant_method: Any = getattr(method, "value", method)

    def options(self) -> dict[str, Any]:
        """Return the loading options that transformers put here for a user."""
        return {k: v for k, v in vars(self).items() if k not in ("fields", "quant_method")}

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping as it was read."""
        return copy.deepcopy(self.fields)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Take a mapping; other arguments go back unused."""
        config = cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config
