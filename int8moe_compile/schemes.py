"""Say what can be quantised how: keys, named schemes and which pairs of keys are legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class QuantKey:
    """Describe how one tensor is quantised to integers.

    granularity: "tensor", "channel" (one scale per output row of a weight), "token" (one scale per
    row of activations) or "group" (one scale per ``group_size`` elements). dynamic: the scale is
    computed while running instead of being stored. Any value is accepted, whatever a checkpoint's
    configuration says; the oracle refuses what no backend can run, with a reason.
    """

    granularity: str
    dynamic: bool = False
    bits: int = 8
    symmetric: bool = True
    group_size: int | None = None


INT8_STATIC_CHANNEL: Final = QuantKey("channel")
INT8_STATIC_TENSOR: Final = QuantKey("tensor")
INT8_DYNAMIC_TOKEN: Final = QuantKey("token", dynamic=True)
INT8_DYNAMIC_TENSOR: Final = QuantKey("tensor", dynamic=True)

WEIGHT_KEYS: Final = (INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR)
# The operator's activation_quant word of each activation key; None is weight-only.
ACTIVATION_WORDS: Final[dict[QuantKey | None, str]] = {
    INT8_DYNAMIC_TOKEN: "token",
    INT8_DYNAMIC_TENSOR: "tensor",
    INT8_STATIC_TENSOR: "static",
    None: "none",
}


@dataclass(frozen=True)
class Scheme:
    """Pair the key of the weights with that of the activations (None: weight-only)."""

    name: str
    weight_key: QuantKey
    activation_key: QuantKey | None

    def __str__(self) -> str:
        """Write the name, and the weights' granularity where it is not that of the name."""
        if SCHEMES.get(self.name) == self:
            return f'"{self.name}"'
        return f'"{self.name}" with weights per {self.weight_key.granularity}'

    @property
    def activation_quant(self) -> str:
        """Return the operator's own word for the activation key."""
        return ACTIVATION_WORDS[self.activation_key]


SCHEMES: Final[dict[str, Scheme]] = {
    "w8a8": Scheme("w8a8", INT8_STATIC_CHANNEL, INT8_DYNAMIC_TOKEN),
    "w8a8_tensor": Scheme("w8a8_tensor", INT8_STATIC_TENSOR, INT8_DYNAMIC_TENSOR),
    "w8a8_static": Scheme("w8a8_static", INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR),
    "w8a16": Scheme("w8a16", INT8_STATIC_CHANNEL, None),
}
ALIASES: Final[dict[str, str]] = {
    "int8_per_channel_weight_only": "w8a16",
    "experts_int8": "w8a16",
}


def scheme_names() -> tuple[str, ...]:
    """List every name that ``parse_scheme`` accepts."""
    return (*SCHEMES, *ALIASES)


def parse_scheme(scheme: str | Scheme) -> Scheme:
    """Return the scheme of a name or alias; a ``Scheme`` whose keys are legal, by its own name.

    Its own name is that of ``scheme_of``, whatever the caller named it.

    Raises ValueError that lists the allowed names, or says which key of the scheme is refused.
    """
    if isinstance(scheme, Scheme):
        refusal = pair_refusal(scheme.weight_key, scheme.activation_key)
        if refusal is not None:
            raise ValueError(f"scheme: {scheme.name!r} cannot be run: {refusal}")
        return scheme_of(scheme.weight_key, scheme.activation_key)
    if isinstance(scheme, str):
        found = SCHEMES.get(ALIASES.get(scheme, scheme))
        if found is not None:
            return found
    allowed = ", ".join(repr(name) for name in scheme_names())
    raise ValueError(f"scheme: wanted one of {allowed}, got {scheme!r}")


def scheme_of(weight_key: QuantKey, activation_key: QuantKey | None) -> Scheme:
    """Return the scheme of two keys, named after its activations.

    Weights of either legal granularity go with every kind of activations, so that the name alone
    does not tell the weight key. Raises ValueError with the reason for an illegal pair.
    """
    refusal = pair_refusal(weight_key, activation_key)
    if refusal is not None:
        raise ValueError(refusal)
    named = next(known for known in SCHEMES.values() if known.activation_key == activation_key)
    return Scheme(named.name, weight_key, activation_key)


def pair_refusal(weight_key: object, activation_key: object) -> str | None:
    """Say why no kernel can exist for two keys, None where one can; never raises on any key."""
    return _weight_refusal(weight_key) or _activation_refusal(activation_key)


def _weight_refusal(key: object) -> str | None:
    """Say why weights with this key cannot be run."""
    if key is None:
        return "the weights are not quantised (weight key None)"
    refusal = _integer_refusal(key, "weight")
    if refusal is not None:
        return refusal
    if key not in WEIGHT_KEYS:
        return f"weights are wanted static, per channel or per tensor, got {key!r}"
    return None


def _activation_refusal(key: object) -> str | None:
    """Say why activations with this key cannot be run."""
    if key is None:
        return None
    refusal = _integer_refusal(key, "activation")
    if refusal is not None:
        return refusal
    if all(key != legal for legal in ACTIVATION_WORDS):
        return (
            "activations are wanted dynamic per token, dynamic per tensor, static per tensor or "
            f"unquantised, got {key!r}"
        )
    return None


def _integer_refusal(key: object, role: str) -> str | None:
    """Say what makes a key of either role something else than plain symmetric int8."""
    if not isinstance(key, QuantKey):
        return f"{role} key: wanted a QuantKey, got {key!r}"
    if type(key.bits) is not int or key.bits != 8:
        return f"{role} key: wanted 8 bits, got {key.bits!r}"
    if type(key.symmetric) is not bool or type(key.dynamic) is not bool:
        return f"{role} key: symmetric and dynamic are wanted as booleans, got {key!r}"
    if not key.symmetric:
        return f"{role} key: asymmetric (a zero point); only symmetric int8 is supported"
    if key.granularity == "group" or key.group_size is not None:
        size = "no group size given" if key.group_size is None else f"group size {key.group_size!r}"
        return f"{role} key: grouped scales are not supported ({size})"
    if key.granularity not in ("tensor", "channel", "token"):
        return (
            f"{role} key: granularity {key.granularity!r} is not known; "
            "wanted 'tensor', 'channel' or 'token'"
        )
    return None
