"""Schemes: names and aliases, legal pairs, and the entries of checkpoint configurations."""

from __future__ import annotations

from typing import Any

import pytest

from int8moe_compile.checkpoint_schemes import compressed_tensors_keys, quark_keys
from int8moe_compile.ops import schema
from int8moe_compile.schemes import (
    ACTIVATION_WORDS,
    INT8_DYNAMIC_TENSOR,
    INT8_DYNAMIC_TOKEN,
    INT8_STATIC_CHANNEL,
    INT8_STATIC_TENSOR,
    SCHEMES,
    QuantKey,
    Scheme,
    parse_scheme,
    scheme_of,
)

CHANNEL, TENSOR = INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR


@pytest.mark.parametrize(
    ("name", "weight_key", "activation_key", "word"),
    [
        ("w8a8", CHANNEL, INT8_DYNAMIC_TOKEN, "token"),
        ("w8a8_tensor", TENSOR, INT8_DYNAMIC_TENSOR, "tensor"),
        ("w8a8_static", CHANNEL, INT8_STATIC_TENSOR, "static"),
        ("w8a16", CHANNEL, None, "none"),
        ("int8_per_channel_weight_only", CHANNEL, None, "none"),
        ("experts_int8", CHANNEL, None, "none"),
    ],
)
def test_a_name_means_these_keys(name, weight_key, activation_key, word):
    scheme = parse_scheme(name)
    assert (scheme.weight_key, scheme.activation_key) == (weight_key, activation_key)
    assert scheme.activation_quant == word


def test_the_four_values_are_what_they_say():
    assert QuantKey("channel", False, 8, True, None) == CHANNEL
    assert QuantKey("tensor", False, 8, True, None) == TENSOR
    assert QuantKey("token", True, 8, True, None) == INT8_DYNAMIC_TOKEN
    assert QuantKey("tensor", True, 8, True, None) == INT8_DYNAMIC_TENSOR


def test_every_word_of_the_operator_has_one_scheme():
    assert tuple(ACTIVATION_WORDS.values()) == schema.ACTIVATION_QUANTS
    assert [scheme.activation_quant for scheme in SCHEMES.values()] == [*schema.ACTIVATION_QUANTS]
    assert all(name == scheme.name for name, scheme in SCHEMES.items())


@pytest.mark.parametrize("name", ["", "W8A8", "w4a16", "fp8", None, 8, ["w8a8"]])
def test_an_unknown_name_lists_the_allowed_ones(name):
    with pytest.raises(ValueError) as caught:
        parse_scheme(name)
    allowed = (*SCHEMES, "int8_per_channel_weight_only", "experts_int8")
    assert all(repr(word) in str(caught.value) for word in (*allowed, name))


@pytest.mark.parametrize("weight_key", [CHANNEL, TENSOR])
@pytest.mark.parametrize("name", ["w8a8", "w8a8_tensor", "w8a8_static", "w8a16"])
def test_either_weight_key_goes_with_every_activation_key(name, weight_key):
    scheme = scheme_of(weight_key, SCHEMES[name].activation_key)
    assert (scheme.name, scheme.weight_key) == (name, weight_key)
    assert parse_scheme(scheme) == scheme
    assert parse_scheme(Scheme("mine", weight_key, scheme.activation_key)) == scheme
    plain = weight_key == SCHEMES[name].weight_key
    assert str(scheme) == f'"{name}"' + (
        "" if plain else f" with weights per {weight_key.granularity}"
    )


def test_an_illegal_scheme_is_refused():
    with pytest.raises(ValueError, match="asymmetric"):
        scheme_of(QuantKey("channel", symmetric=False), None)
    with pytest.raises(ValueError, match=r"'mine' .*grouped"):
        parse_scheme(Scheme("mine", QuantKey("group", group_size=64), None))


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
CT_WEIGHT = {**INT8, "strategy": "channel", "dynamic": False, "group_size": None}
CT_TOKEN = {**INT8, "strategy": "token", "dynamic": True, "group_size": None}
CT_STATIC = {**INT8, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("weights", "activations", "weight_key", "activation_key", "name"),
    [
        (CT_WEIGHT, CT_TOKEN, CHANNEL, INT8_DYNAMIC_TOKEN, "w8a8"),
        (CT_WEIGHT, None, CHANNEL, None, "w8a16"),
        (CT_WEIGHT, CT_STATIC, CHANNEL, INT8_STATIC_TENSOR, "w8a8_static"),
        (CT_STATIC, CT_STATIC, TENSOR, INT8_STATIC_TENSOR, "w8a8_static"),
        (CT_STATIC, CT_STATIC | {"dynamic": True}, TENSOR, INT8_DYNAMIC_TENSOR, "w8a8_tensor"),
        (CT_STATIC, CT_TOKEN, TENSOR, INT8_DYNAMIC_TOKEN, "w8a8"),
        (CT_WEIGHT | {"group_size": -1}, CT_TOKEN, CHANNEL, INT8_DYNAMIC_TOKEN, "w8a8"),
        (CT_WEIGHT | {"strategy": "CHANNEL"}, CT_TOKEN, CHANNEL, INT8_DYNAMIC_TOKEN, "w8a8"),
        ({"group_size": -1}, None, CHANNEL, None, "w8a16"),
        ({}, {"dynamic": True}, TENSOR, INT8_DYNAMIC_TENSOR, "w8a8_tensor"),
        (CT_WEIGHT | {"observer": "minmax", "actorder": None}, None, CHANNEL, None, "w8a16"),
    ],
)
def test_compressed_tensors_entries(weights, activations, weight_key, activation_key, name):
    keys = compressed_tensors_keys(weights, activations)
    assert (keys.weight_key, keys.activation_key, keys.reason) == (weight_key, activation_key, None)
    assert keys.scheme == Scheme(name, weight_key, activation_key)


@pytest.mark.parametrize(
    ("change", "key", "word"),
    [
        ({"symmetric": False}, QuantKey("channel", symmetric=False), "asymmetric"),
        ({"num_bits": 4}, QuantKey("channel", bits=4), "got 4"),
        ({"strategy": "group", "group_size": 128}, QuantKey("group", group_size=128), "128"),
        ({"strategy": "group"}, QuantKey("group"), "no group size"),
        ({"strategy": None, "group_size": 64}, QuantKey("group", group_size=64), "64"),
        ({"strategy": "group", "group_size": -1}, QuantKey("group", group_size=-1), "-1"),
        ({"strategy": "token"}, QuantKey("token"), "token"),
        ({"dynamic": True}, QuantKey("channel", dynamic=True), "static"),
    ],
)
def test_what_a_key_can_say_is_in_the_key_and_refused(change, key, word):
    keys = compressed_tensors_keys(CT_WEIGHT | change, CT_TOKEN)
    assert (keys.weight_key, keys.activation_key) == (key, INT8_DYNAMIC_TOKEN)
    assert keys.scheme is None and keys.reason is not None and word in keys.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "float"}, ["type", "'float'"]),
        ({"type": None}, ["type", "None"]),
        ({"num_bits": "8"}, ["num_bits", "'8'"]),
        ({"num_bits": None}, ["num_bits", "None"]),
        ({"num_bits": 8.0}, ["num_bits", "8.0"]),
        ({"num_bits": True}, ["num_bits", "True"]),
        ({"group_size": "128"}, ["group_size", "'128'"]),
        ({"group_size": [128]}, ["group_size", "128"]),
        ({"strategy": "block"}, ["strategy", "'block'"]),
        ({"strategy": 3}, ["strategy", "3"]),
        ({"strategy": ["channel"]}, ["strategy", "channel"]),
        ({"symmetric": None}, ["symmetric", "None"]),
        ({"symmetric": "true"}, ["symmetric", "'true'"]),
        ({"dynamic": "local"}, ["dynamic", "'local'"]),
    ],
)
@pytest.mark.parametrize("role", ["weights", "input_activations"])
def test_what_no_key_can_say_is_refused_by_role_and_field(change, words, role):
    entries: dict[str, Any] = {"weights": CT_WEIGHT, "input_activations": CT_TOKEN}
    entries[role] = entries[role] | change
    keys = compressed_tensors_keys(**entries)
    assert keys.scheme is None and keys.weight_key is None
    assert keys.reason is not None
    assert all(word in keys.reason for word in [role, *words]), keys.reason


@pytest.mark.parametrize("read", [compressed_tensors_keys, quark_keys])
@pytest.mark.parametrize("entry", ["int8", 8, True, [CT_WEIGHT], ("a",)])
def test_an_entry_that_is_no_mapping_is_refused(read, entry):
    assert "mapping" in read(entry).reason
    assert read(None, None).reason == "the weights are not quantised (weight key None)"


QUARK_CHANNEL = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": False, "symmetric": True}
QUARK_TENSOR = QUARK_CHANNEL | {"qscheme": "per_tensor"}
DYNAMIC = {"is_dynamic": True}


@pytest.mark.parametrize(
    ("weight", "inputs", "weight_key", "activation_key", "name"),
    [
        (QUARK_CHANNEL, QUARK_CHANNEL | DYNAMIC, CHANNEL, INT8_DYNAMIC_TOKEN, "w8a8"),
        (
            QUARK_CHANNEL | {"ch_axis": 0},
            QUARK_CHANNEL | DYNAMIC | {"ch_axis": 1},
            CHANNEL,
            INT8_DYNAMIC_TOKEN,
            "w8a8",
        ),
        (
            QUARK_CHANNEL,
            QUARK_CHANNEL | DYNAMIC | {"qscheme": "per_token"},
            CHANNEL,
            INT8_DYNAMIC_TOKEN,
            "w8a8",
        ),
        (QUARK_TENSOR, QUARK_TENSOR | DYNAMIC, TENSOR, INT8_DYNAMIC_TENSOR, "w8a8_tensor"),
        (QUARK_TENSOR, QUARK_TENSOR, TENSOR, INT8_STATIC_TENSOR, "w8a8_static"),
        (QUARK_CHANNEL, QUARK_TENSOR, CHANNEL, INT8_STATIC_TENSOR, "w8a8_static"),
        (QUARK_CHANNEL, None, CHANNEL, None, "w8a16"),
        ({"dtype": "int8", "qscheme": "per_channel"}, None, CHANNEL, None, "w8a16"),
    ],
)
def test_quark_entries(weight, inputs, weight_key, activation_key, name):
    keys = quark_keys(weight, inputs)
    assert keys.reason is None
    assert keys.scheme == Scheme(name, weight_key, activation_key)


@pytest.mark.parametrize(
    ("weight", "inputs", "words"),
    [
        ({"qscheme": "per_group", "group_size": 128}, None, ["weight", "per_group"]),
        ({"qscheme": "per_row"}, None, ["weight", "per_row"]),
        ({"qscheme": "per_token"}, None, ["weight", "per_token"]),
        ({"qscheme": None}, None, ["weight", "None"]),
        ({"dtype": "fp8_e4m3"}, None, ["weight", "fp8_e4m3"]),
        ({"dtype": "int4"}, None, ["weight", "int4"]),
        ({"dtype": None}, None, ["weight", "None"]),
        ({"symmetric": False}, None, ["weight", "asymmetric"]),
        ({"symmetric": "no"}, None, ["weight", "'no'"]),
        ({"is_dynamic": True}, None, ["weights", "static"]),
        ({"ch_axis": 1}, None, ["weight", "ch_axis", "1"]),
        ({}, {"qscheme": "per_group"}, ["input_tensors", "per_group"]),
        ({}, {"dtype": "uint8"}, ["input_tensors", "uint8"]),
        ({}, {"symmetric": False}, ["activation", "asymmetric"]),
        ({}, {"is_dynamic": "yes"}, ["input_tensors", "'yes'"]),
        ({}, {"is_dynamic": False}, ["activations", "token"]),
    ],
)
def test_quark_refusals_name_the_word(weight, inputs, words):
    if inputs is not None:
        inputs = QUARK_CHANNEL | DYNAMIC | inputs
    keys = quark_keys(QUARK_CHANNEL | weight, inputs)
    assert keys.scheme is None
    assert keys.reason is not None and all(word in keys.reason for word in words), keys.reason
