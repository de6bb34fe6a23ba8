"""Read what torchao says about its tensors, in config.json and in the headers of its files.

Only text is read; torchao itself is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .checkpoint_fields import malformed, mapping
from .checkpoint_schemes import CheckpointKeys
from .schemes import INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR, QuantKey, pair_refusal

DEFAULT: Final = "_default"
_WEIGHT_ONLY: Final = "Int8WeightOnlyConfig"
_DYNAMIC: Final = "Int8DynamicActivationInt8WeightConfig"
_STATIC: Final = "Int8StaticActivationInt8WeightConfig"
_BY_NAME: Final = ("FqnToConfig", "ModuleFqnToConfig")
_TENSOR: Final = "Int8Tensor"
_ROWS: Final = "PerRow"
_WHOLE: Final = "PerTensor"


def config_entries(quant_type: object) -> Iterator[tuple[str, CheckpointKeys]]:
    """Yield the names of parameters or modules that a configuration spells out, and their keys.

    One configuration for all linear layers, and its default, say nothing of fused experts. Raises
    MalformedError for what is no such object.
    """
    fields = mapping("quant_type", quant_type)
    outer = mapping("quant_type: default", fields.get("default", fields))
    if not isinstance(outer.get("_type"), str):
        raise malformed("quant_type", "an object with its _type", quant_type)
    if outer["_type"] not in _BY_NAME:
        return
    data = mapping("quant_type: _data", outer.get("_data"))
    for field in ("fqn_to_config", "module_fqn_to_config"):
        named = mapping(f"quant_type: {field}", data.get(field))
        for name, entry in named.items():
            if name != DEFAULT:
                mapping(f"quant_type: {name}", entry)
                yield _anchored(str(name)), config_keys(entry)
        if named:
            return


def _anchored(name: str) -> str:
    """Return a name as it is, a pattern so that it has to match to the end."""
    return f"re:(?:{name[3:]})$" if name.startswith("re:") else name


def config_keys(entry: object) -> CheckpointKeys:
    """Read one configuration object as torchao writes it; never raises."""
    fields = _mapping(entry)
    kind, data = fields.get("_type"), _mapping(fields.get("_data"))
    if kind not in (_WEIGHT_ONLY, _DYNAMIC, _STATIC):
        return CheckpointKeys(None, None, f"quant_type: wanted an int8 one, got {kind!r}")
    granularity = data.get("granularity")
    pair = [granularity, granularity]
    if isinstance(granularity, list) and len(granularity) == 2:
        pair = granularity
    group_size = data.get("group_size")
    if group_size is not None and type(group_size) is not int:
        reason = f"quant_type: group_size: wanted an integer, got {group_size!r}"
        return CheckpointKeys(None, None, reason)
    weight = QuantKey("group", group_size=group_size) if group_size else _weight(_kind(pair[-1]))
    if kind == _WEIGHT_ONLY:
        return CheckpointKeys(weight, None, pair_refusal(weight, None))
    activation = _activation(pair[0], data.get("act_mapping_type"), kind == _DYNAMIC)
    return CheckpointKeys(weight, activation, pair_refusal(weight, activation))


def tensor_keys(text: str, shape: Sequence[int]) -> CheckpointKeys:
    """Read what a header says about one tensor of a shape; never raises."""
    try:
        fields = _mapping(json.loads(text))
    except ValueError as error:
        return CheckpointKeys(None, None, f"torchao's description is no JSON: {error}")
    if fields.get("_type") != _TENSOR:
        reason = f"torchao's description: wanted an {_TENSOR}, got {fields.get('_type')!r}"
        return CheckpointKeys(None, None, reason)
    data = _mapping(fields.get("_data"))
    wanted, names = data.get("act_quant_kwargs"), fields.get("_tensor_data_names")
    for name, value, kind in (
        ("act_quant_kwargs", wanted, dict),
        ("_tensor_data_names", names, list),
        ("block_size", data.get("block_size"), list),
    ):
        if value is not None and not isinstance(value, kind):
            reason = f"torchao's description: {name}: wanted a {kind.__name__}, got {value!r:.80}"
            return CheckpointKeys(None, None, reason)
    weight = _block_key(data.get("block_size"), list(shape))
    activation = None
    if wanted is not None:
        inner, is_static = _mapping(wanted.get("_data")), "act_quant_scale" in (names or ())
        activation = _activation(inner.get("granularity"), inner.get("mapping_type"), not is_static)
    return CheckpointKeys(weight, activation, pair_refusal(weight, activation))


def _block_key(block: object, shape: list[int]) -> QuantKey:
    """Return the key of weights [...,N,K] that share a scale in blocks of a size."""
    if block in (shape, [1, *shape[1:]]):
        return INT8_STATIC_TENSOR
    lead = [1] * (len(shape) - 2)
    if block in ([*lead, 1, shape[-1]], [*lead, shape[-2], 1]):
        # Along which of the two it has to be, the shape of the scale tells.
        return INT8_STATIC_CHANNEL
    size = block[-1] if isinstance(block, list) and block else None
    return QuantKey("group", group_size=size if isinstance(size, int) else None)


def _weight(granularity: str) -> QuantKey:
    """Return the key of weights."""
    words = {_ROWS: INT8_STATIC_CHANNEL, _WHOLE: INT8_STATIC_TENSOR}
    return words.get(granularity, QuantKey(granularity))


def _activation(granularity: object, mapping: object, dynamic: bool) -> QuantKey:
    """Return the key of activations."""
    kind = _kind(granularity)
    symmetric = mapping is None or str(_mapping(mapping).get("_data")).startswith("SYMMETRIC")
    word = {_ROWS: "token", _WHOLE: "tensor"}.get(kind, kind)
    return QuantKey(word, dynamic=dynamic, symmetric=symmetric)


def _kind(granularity: object) -> str:
    """Return the name of a granularity; rows are the default everywhere."""
    return _ROWS if granularity is None else str(_mapping(granularity).get("_type"))


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, anything else as an empty one."""
    return value if isinstance(value, Mapping) else {}
