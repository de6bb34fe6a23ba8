"""Read the quantisation entries of checkpoint configurations into keys, or into a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .schemes import QuantKey, Scheme, pair_refusal, scheme_of


@dataclass(frozen=True)
class CheckpointKeys:
    """Hold what two entries of a configuration say, and why that cannot be run (None: it can).

    A key is None where the entry is absent or says something that no key can express (floating
    point codes, say); ``reason`` then tells. Asymmetric, grouped or 4-bit entries are expressed.
    malformed: what it says has a type that it cannot have in its format.
    """

    weight_key: QuantKey | None
    activation_key: QuantKey | None
    reason: str | None
    malformed: bool = False

    @property
    def scheme(self) -> Scheme | None:
        """Return the scheme of the keys, None where ``reason`` says why there is none."""
        if self.weight_key is None or self.reason is not None:
            return None
        return scheme_of(self.weight_key, self.activation_key)


class _Unreadable(Exception):
    """Carry the reason why an entry has no key; never leaves this file."""

    def __init__(self, reason: str, malformed: bool = False) -> None:
        super().__init__(reason)
        self.malformed = malformed


# (name of the entry, its value, whether it describes activations) -> key
_Reader = Callable[[str, object, bool], QuantKey]


def compressed_tensors_keys(weights: object, input_activations: object = None) -> CheckpointKeys:
    """Read the ``weights`` and ``input_activations`` entries of a compressed-tensors group.

    Absent fields have that format's defaults: 8 bit "int", symmetric, static, and the strategy
    that the group size implies. Never raises, whatever the entries hold.
    """
    return _read(
        _compressed_tensors_key,
        ("weights", weights),
        ("input_activations", input_activations),
    )


def quark_keys(weight: object, input_tensors: object = None) -> CheckpointKeys:
    """Read the ``weight`` and ``input_tensors`` entries of an AMD Quark configuration.

    "per_channel" on activations means one scale per row, that is per token. Never raises,
    whatever the entries hold.
    """
    return _read(_quark_key, ("weight", weight), ("input_tensors", input_tensors))


def _read(
    reader: _Reader, weight: tuple[str, object], activation: tuple[str, object]
) -> CheckpointKeys:
    """Apply one format's reader to both entries and judge the pair."""
    try:
        weight_key = None if weight[1] is None else reader(*weight, False)
        activation_key = None if activation[1] is None else reader(*activation, True)
    except _Unreadable as reason:
        return CheckpointKeys(None, None, str(reason), reason.malformed)
    return CheckpointKeys(weight_key, activation_key, pair_refusal(weight_key, activation_key))


_STRATEGIES: Final = ("tensor", "channel", "token", "group")
_WEIGHT_QSCHEMES: Final = {"per_tensor": "tensor", "per_channel": "channel"}
_ACTIVATION_QSCHEMES: Final = {
    "per_tensor": "tensor",
    "per_channel": "token",
    "per_token": "token",
}


def _compressed_tensors_key(name: str, value: object, is_activation: bool) -> QuantKey:
    """Read one entry of a compressed-tensors group; its words mean the same for both roles."""
    entry = _fields(name, value)
    kind = entry.get("type", "int")
    if kind != "int":
        reason = f"{name}: type: wanted 'int', got {kind!r}"
        raise _Unreadable(reason, not isinstance(kind, str))
    group_size = entry.get("group_size")
    if group_size is not None:
        group_size = _integer(name, "group_size", group_size)
    strategy = entry.get("strategy")
    if strategy is None:
        strategy = {None: "tensor", -1: "channel"}.get(group_size, "group")
    return QuantKey(
        _word(name, "strategy", strategy, _STRATEGIES),
        dynamic=_boolean(name, "dynamic", entry.get("dynamic", False)),
        bits=_integer(name, "num_bits", entry.get("num_bits", 8)),
        symmetric=_boolean(name, "symmetric", entry.get("symmetric", True)),
        # -1 is that format's other word for one scale per channel.
        group_size=None if group_size == -1 and strategy != "group" else group_size,
    )


def _quark_key(name: str, value: object, is_activation: bool) -> QuantKey:
    """Read one tensor entry of an AMD Quark configuration."""
    entry = _fields(name, value)
    if entry.get("dtype") != "int8":
        reason = f"{name}: dtype: wanted 'int8', got {entry.get('dtype')!r}"
        raise _Unreadable(reason, not isinstance(entry.get("dtype"), (str, type(None))))
    words = _ACTIVATION_QSCHEMES if is_activation else _WEIGHT_QSCHEMES
    qscheme = _word(name, "qscheme", entry.get("qscheme"), tuple(words))
    axis = entry.get("ch_axis")
    # On activations the exporters write 0 or 1 for the same thing, on weights 0 is the output row.
    if qscheme == "per_channel" and not is_activation and axis not in (None, 0):
        reason = f"{name}: ch_axis: wanted 0 (one scale per output row), got {axis!r}"
        raise _Unreadable(reason, not isinstance(axis, int))
    dynamic, symmetric = entry.get("is_dynamic"), entry.get("symmetric")
    return QuantKey(
        words[qscheme],
        dynamic=False if dynamic is None else _boolean(name, "is_dynamic", dynamic),
        symmetric=True if symmetric is None else _boolean(name, "symmetric", symmetric),
    )


def _fields(name: str, value: object) -> Mapping[Any, Any]:
    """Return an entry as a mapping."""
    if not isinstance(value, Mapping):
        raise _Unreadable(f"{name}: wanted a mapping of fields, got {value!r}", True)
    return value


def _integer(name: str, field: str, value: object) -> int:
    """Return an integer field; a string of digits is as wrong as any other string."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _Unreadable(f"{name}: {field}: wanted an integer, got {value!r}", True)


def _boolean(name: str, field: str, value: object) -> bool:
    """Return a boolean field."""
    if isinstance(value, bool):
        return value
    # The newer formats have a third word.
    raise _Unreadable(f"{name}: {field}: wanted true or false, got {value!r}", value != "local")


def _word(name: str, field: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words, however it is capitalised."""
    if isinstance(value, str) and value.lower() in allowed:
        return value.lower()
    wanted = ", ".join(repr(word) for word in allowed)
    reason = f"{name}: {field}: wanted one of {wanted}, got {value!r}"
    raise _Unreadable(reason, not isinstance(value, (str, type(None))))
