"""Install the graph pass into Inductor's configuration and remove it again.

The slot is torch._inductor.config.joint_custom_pre_pass. What stood there before is run first
and put back on removal. Nothing of Inductor is imported before it is needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .joint import ExpertsPass

AUTO: Final = "auto"


def asked_backend() -> str:
    """Return the backend of the pass that Inductor runs now, "auto" where there is none."""
    if "torch._inductor.config" not in sys.modules:
        return AUTO
    active = installed()
    return AUTO if active is None else active.backend


def installed() -> ExpertsPass | None:
    """Return the pass that Inductor runs now, None if it is not ours."""
    from torch._inductor import config

    from .joint import ExpertsPass, as_passes

    slot = as_passes(config.joint_custom_pre_pass)
    return next((entry for entry in slot if isinstance(entry, ExpertsPass)), None)


def chained(slot: Any, backend: str) -> ExpertsPass:
    """Return our pass with everything else that a slot holds run before it."""
    from .joint import ExpertsPass

    return ExpertsPass(backend, without_ours(slot))


def without_ours(slot: Any) -> Any:
    """Return what a slot holds beside our pass, in the form in which it held it."""
    from .joint import ExpertsPass

    if isinstance(slot, ExpertsPass):
        return slot.before
    if isinstance(slot, (list, tuple)):
        kept = []
        for entry in slot:
            if not isinstance(entry, ExpertsPass):
                kept.append(entry)
            elif entry.before is not None:
                kept.append(entry.before)
        return type(slot)(kept)
    return slot


def install(backend: str) -> None:
    """Put our pass into the slot, behind whatever is there; once only."""
    from torch._inductor import config

    config.joint_custom_pre_pass = chained(config.joint_custom_pre_pass, backend)


def remove() -> None:
    """Take our pass out of the slot and leave the rest."""
    from torch._inductor import config

    config.joint_custom_pre_pass = without_ours(config.joint_custom_pre_pass)
