"""What was done to an experts module, or why nothing was, kept on the module itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import nn

from ..schemes import Scheme
from ..structure import ExpertsStructure
from .gates import Reads, UnknownGateError, recognise_gate, still_reads_the_same

RECORD: Final = "_int8moe"
REASON: Final = "_int8moe_reason"


@dataclass(frozen=True)
class ExpertsRecord:
    """Describe a quantised module.

    dtype: of the weights that its own code sees, the original one until ``.to(dtype)``.
    reads: attributes of the module that decided ``structure.gate``, with the values they had.
    """

    scheme: Scheme
    structure: ExpertsStructure
    dtype: torch.dtype
    reads: Reads = ()


def record_of(module: nn.Module) -> ExpertsRecord | None:
    """Return the record of a quantised module, None for any other."""
    return cast("ExpertsRecord | None", getattr(module, RECORD, None))


def keep_record(module: nn.Module, record: ExpertsRecord) -> None:
    """Put a record on a module; an earlier reason for leaving it alone goes."""
    setattr(module, RECORD, record)
    module.__dict__.pop(REASON, None)


def reason_of(module: nn.Module) -> str | None:
    """Return why quantize_ left a module as it was, None if it did not."""
    return cast("str | None", getattr(module, REASON, None))


def keep_reason(module: nn.Module, reason: str) -> None:
    """Remember why a module was left as it was."""
    setattr(module, REASON, reason)


def live_record(module: nn.Module) -> ExpertsRecord:
    """Return the record, its gate read anew if an attribute behind it was changed.

    Raises UnknownGateError if the gate is none of the operator's any more.
    """
    record = record_of(module)
    assert record is not None, f"{type(module).__name__} is not quantised"
    if still_reads_the_same(module, record.reads):
        return record
    found = recognise_gate(module)
    if found.interleaved != record.structure.layout.interleaved:
        raise UnknownGateError("its gate pairs other rows than when it was quantised")
    structure = replace(record.structure, gate=found.gate)
    record = replace(record, structure=structure, reads=found.reads)
    setattr(module, RECORD, record)
    return record
