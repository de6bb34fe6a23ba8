"""Read a checkpoint's ``quantization_config``: which module is quantised how, in every dialect."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .checkpoint_fields import boolean, integer, malformed, mapping, strings
from .checkpoint_files import TensorEntry, read_metadata
from .checkpoint_names import layer_of, parse_name, place, torchao_parameter
from .checkpoint_schemes import CheckpointKeys, compressed_tensors_keys, quark_keys
from .checkpoint_torchao import config_entries, tensor_keys
from .errors import CheckpointError
from .schemes import INT8_STATIC_CHANNEL, QuantKey, pair_refusal, parse_scheme

COMPRESSED_TENSORS: Final = "compressed-tensors"
QUARK: Final = "quark"
GPTQ: Final = "gptq"
TORCHAO: Final = "torchao"
# Format of GPTQ's packed zero points -> what symmetric ones are stored as.
PACKED_ZEROS: Final = {"gptq": 127, "gptq_v2": 128}
OURS: Final = "int8moe"
_OUR_FIELDS: Final = ("quant_method", "scheme", "skip", "modules_to_not_convert")
# Names under which a configuration may mean several modules that were fused for speed.
_FUSED: Final[dict[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
_PRESETS: Final[dict[str, tuple[dict[str, Any], dict[str, Any] | None]]] = {
    "W8A8": ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    "INT8": ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    "W8A16": ({"strategy": "channel"}, None),
}


@dataclass(frozen=True)
class Group:
    """Hold what applies to the modules that some targets name; keys None: not quantised."""

    name: str
    targets: tuple[str, ...]
    keys: CheckpointKeys | None


@dataclass(frozen=True)
class CheckpointConfig:
    """Answer how a module of a checkpoint is quantised.

    by_component: entries match any run of name components (Quark) instead of a name or whatever
    lies below it (compressed-tensors). packed_zero: how a zero point of 0 is stored (GPTQ).
    """

    method: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    by_component: bool = False
    packed_zero: int = PACKED_ZEROS["gptq"]

    def keys_of(self, names: Sequence[str], class_name: str = "Linear") -> CheckpointKeys | None:
        """Return the keys of a module under any of its names; None where it is not quantised."""
        if self.ignored(names, class_name):
            return None
        matching = [
            (rank, -index, group)
            for index, group in enumerate(self.groups)
            for target in group.targets
            if (rank := self._rank(target, names, class_name)) > 0
        ]
        return max(matching, key=lambda item: item[:2])[2].keys if matching else None

    def ignored(self, names: Sequence[str], class_name: str = "Linear") -> bool:
        """Say whether the ignore list names a module or one that holds it."""
        return any(self._rank(entry, names, class_name) > 0 for entry in self.ignore)

    def _rank(self, entry: str, names: Sequence[str], class_name: str) -> int:
        """Return how exactly an entry names a module: 3 by name, 2 by pattern, 1 by class, 0."""
        if entry.startswith("re:"):
            return 2 * any(_matches(entry[3:], name) for full in names for name in _above(full))
        for spelling in _spellings(entry):
            if "*" in spelling or "?" in spelling:
                if any(fnmatch.fnmatchcase(name, spelling) for name in names):
                    return 2
            elif any(f"{name}.".startswith(f"{spelling}.") for name in names) or (
                self.by_component and any(f".{spelling}." in f".{name}." for name in names)
            ):
                return 3
        return int(entry in ("Linear", class_name))

    def claims_experts(self) -> bool:
        """Say whether some group could be int8 experts that this package runs, or must refuse."""
        return any(group.keys and concerns_us(group.keys) for group in self.groups)


def without_zero_points(keys: CheckpointKeys) -> CheckpointKeys:
    """Return asymmetric keys as the symmetric ones that they are once every zero point is 0.

    Dynamic activations have no stored zero points that could be 0; they stay what they are.
    """
    weight, activation = keys.weight_key, keys.activation_key
    if weight is not None:
        weight = replace(weight, symmetric=True)
    if activation is not None and not activation.dynamic:
        activation = replace(activation, symmetric=True)
    return CheckpointKeys(weight, activation, pair_refusal(weight, activation))


def concerns_us(keys: CheckpointKeys) -> bool:
    """Say whether keys are 8-bit integers without groups; a malformed entry counts as one."""
    weight = keys.weight_key
    if weight is None:
        return keys.malformed
    return weight.bits == 8 and weight.granularity in ("tensor", "channel")


def read_config(config: object) -> CheckpointConfig:
    """Read a ``quantization_config``.

    Raises CheckpointError for a method that is not known, and its MalformedError, naming the entry,
    for one of a type that it cannot have.
    """
    config = mapping("", config)
    method = config.get("quant_method")
    reader = _READERS.get(str(getattr(method, "value", method)))
    if reader is None:
        known = ", ".join(repr(name) for name in _READERS)
        raise CheckpointError(f"quantization_config: quant_method: wanted {known}, got {method!r}")
    return reader(config)


def _compressed_tensors(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read the dialect of compressed-tensors and llm-compressor."""
    read = []
    for name, group in mapping("config_groups", config.get("config_groups")).items():
        field = f"config_groups: {name}"
        if isinstance(group, (list, tuple)):
            weights, inputs = _PRESETS.get(str(name), ({"strategy": str(name)}, None))
            keys = compressed_tensors_keys(weights, inputs)
            read.append(Group(name, strings(field, group), keys))
        else:
            group = mapping(field, group)
            keys = compressed_tensors_keys(group.get("weights"), group.get("input_activations"))
            targets = strings(f"{field}: targets", group.get("targets"))
            read.append(Group(name, targets, keys))
    ignore = strings("ignore", config.get("ignore"))
    return CheckpointConfig(COMPRESSED_TENSORS, tuple(read), ignore)


def _quark(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read the dialect of AMD Quark; entries for single layers come before the global one."""
    groups = []
    for field in ("layer_quant_config", "layer_type_quant_config"):
        for target, entry in mapping(field, config.get(field)).items():
            groups.append(Group(f"{field}: {target}", (target,), _quark_entry(entry)))
    overall = config.get("global_quant_config")
    if overall is not None:
        groups.append(Group("global_quant_config", ("Linear",), _quark_entry(overall)))
    exclude = [name for f in ("exclude", "excludes") for name in strings(f, config.get(f))]
    return CheckpointConfig(QUARK, tuple(groups), tuple(exclude), by_component=True)


def _quark_entry(entry: object) -> CheckpointKeys:
    """Read the weight and the input of one Quark entry; newer exports wrap each in a list."""
    fields = entry if isinstance(entry, Mapping) else {"weight": entry}

    def one(value: object) -> object:
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    return quark_keys(one(fields.get("weight")), one(fields.get("input_tensors")))


def _gptq(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read the dialect of GPTQ: weight-only codes along the input, one scale a group of inputs.

    ``dynamic`` maps patterns to other settings, or leaves modules out; the first match counts, also
    where ``modules_in_block_to_quantize`` spells a module's name.
    """
    word = config.get("checkpoint_format") or "gptq"
    if not isinstance(word, str):
        raise malformed("checkpoint_format", "a word", word)
    if word.lower() not in PACKED_ZEROS:
        known = " or ".join(repr(name) for name in PACKED_ZEROS)
        raise CheckpointError(
            f"quantization_config: checkpoint_format: wanted {known}, got {word!r}"
        )
    groups = []
    for pattern, changes in mapping("dynamic", config.get("dynamic")).items():
        own = pattern[2:] if pattern.startswith(("-:", "+:")) else pattern
        fields = {**config, **mapping(f"dynamic: {pattern}", changes)}
        keys = None if pattern.startswith("-:") else _gptq_keys(fields)
        groups.append(Group(pattern, (f"re:{own}",), keys))
    named = _names_in_blocks(config.get("modules_in_block_to_quantize"))
    targets: tuple[str, ...] = ("Linear",)
    if named:
        # As patterns, which rank like those of ``dynamic``.
        words = [re.escape(word) for name in named for word in _spellings(name)]
        targets = tuple(rf"re:(?:.*\.)?{word}(?:\.|$)" for word in words)
    groups.append(Group(GPTQ, targets, _gptq_keys(config)))
    ignore = strings("modules_to_not_convert", config.get("modules_to_not_convert"))
    return CheckpointConfig(GPTQ, tuple(groups), ignore, True, PACKED_ZEROS[word.lower()])


def _names_in_blocks(blocks: object) -> list[str]:
    """Return the names of modules in a block, listed in groups that were quantised one by one."""
    field = "modules_in_block_to_quantize"
    if blocks is None:
        return []
    if not isinstance(blocks, (list, tuple)):
        raise malformed(field, "a list of lists of strings", blocks)
    return [name for block in blocks for name in strings(field, block)]


def _gptq_keys(fields: Mapping[str, Any]) -> CheckpointKeys:
    """Read the settings of GPTQ for some modules.

    With one group the order in which inputs were quantised (desc_act) leaves no trace.
    """
    bits, group_size = integer("bits", fields.get("bits")), fields.get("group_size")
    key = replace(INT8_STATIC_CHANNEL, bits=bits, symmetric=boolean("sym", fields.get("sym", True)))
    if group_size is not None and integer("group_size", group_size) != -1:
        key = QuantKey("group", bits=bits, symmetric=key.symmetric, group_size=group_size)
    return CheckpointKeys(key, None, pair_refusal(key, None))


def _torchao(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read the names that torchao's configuration spells out."""
    groups = tuple(
        Group(name, (name,), keys) for name, keys in config_entries(config.get("quant_type"))
    )
    return CheckpointConfig(TORCHAO, groups)


def with_headers(
    config: CheckpointConfig, entries: Mapping[str, TensorEntry], files: Iterable[Path]
) -> CheckpointConfig:
    """Return what torchao's headers say of the experts, if it is torchao's; else the same.

    files: those that hold the entries, whose headers are read again, for torchao only.
    Raises CheckpointError for int8 tensors that the headers do not describe, or describe
    differently than the configuration does.
    """
    if config.method != TORCHAO:
        return config
    metadata = read_metadata(files)
    groups = []
    for key, entry in entries.items():
        found, tensor = torchao_parameter(key), parse_name(key)
        if found is None or tensor is None or tensor.part not in ("weight", "scale"):
            continue
        name, codes = found
        if codes not in entries:
            raise CheckpointError(f"{entry.file}: {place(key)}: wanted {codes} beside it, got none")
        if codes != key:
            continue
        known = _described(name, metadata)
        if known is None:
            raise CheckpointError(
                f"{entry.file}: {place(key)}: wanted torchao's description of {name} in the "
                "file's header, got none"
            )
        keys, said = tensor_keys(metadata[known], entry.shape), config.keys_of([known])
        if said is not None and said != keys:
            raise CheckpointError(
                f"{entry.file}: {place(key)}: quantization_config says {said}, the file's header "
                f"{keys}"
            )
        groups.append(Group(known, (name,), keys))
    return replace(config, groups=tuple(groups))


def _described(name: str, metadata: Mapping[str, str]) -> str | None:
    """Return the name under which a header describes a parameter of experts.

    Some families rename their tensors as they save them, but not what describes them.
    """
    if name in metadata:
        return name
    ending = f".experts.{name.rpartition('.')[2]}"
    alike = [
        other
        for other in metadata
        if other.endswith(ending) and layer_of(other) == layer_of(name) != "?"
    ]
    return alike[0] if len(alike) == 1 else None


def _ours(config: Mapping[str, Any]) -> CheckpointConfig:
    """Read the fields of Int8MoeConfig, with the same meaning as where it quantises itself."""
    for field in config:
        if field not in _OUR_FIELDS:
            raise malformed(field, f"no field but {', '.join(_OUR_FIELDS)}", config[field])
    try:
        scheme = parse_scheme(config.get("scheme", "w8a8"))
    except ValueError as error:
        raise CheckpointError(f"quantization_config: {error}") from None
    keys = CheckpointKeys(scheme.weight_key, scheme.activation_key, None)
    skip = [f"re:{fnmatch.translate(text)}" for text in strings("skip", config.get("skip"))]
    for part in strings("modules_to_not_convert", config.get("modules_to_not_convert")):
        skip.append(rf"re:(?:.*\.)?{re.escape(part)}(?:\.|$)")
    group = Group(OURS, ("re:.*\\.experts(\\.|$)", "re:.*\\.(input|output)_linear$"), keys)
    return CheckpointConfig(OURS, (group,), tuple(skip))


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], CheckpointConfig]]] = {
    COMPRESSED_TENSORS: _compressed_tensors,
    QUARK: _quark,
    GPTQ: _gptq,
    TORCHAO: _torchao,
    OURS: _ours,
}


def _spellings(entry: str) -> list[str]:
    """Return an entry, and the names of the single modules where it names a fused one."""
    head, _, last = entry.rpartition(".")
    return [entry, *(f"{head}.{name}" if head else name for name in _FUSED.get(last, ()))]


def _above(name: str) -> list[str]:
    """Return a dotted name and the names of all that holds it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _matches(pattern: str, name: str) -> bool:
    """Apply a regular expression of a configuration, which is anchored at the beginning."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(
            f"quantization_config: wanted a regular expression, got {pattern!r}: {error}"
        ) from None
