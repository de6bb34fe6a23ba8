"""The pass over Inductor's joint graph: every experts call it proves becomes int8moe.experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..compat import compilation_error, computes_gradients, retrace_with_literals
from ..fingerprint import package_hash
from . import AUTO
from .checks import Accepted, NamedBackendError, RefusedError, check_region
from .notices import DEQUANTISED, GRADIENTS, warn_once
from .numbers import hidden_number
from .outcome import Outcome
from .region import Region, Unmatched, failure, find_regions, is_marker
from .rewrite import Rewriter

log = logging.getLogger(__name__)

Pass = Callable[[fx.Graph], None]


class ExpertsPass(CustomGraphPass):
    """Run the passes that stood in the same place before, then rewrite experts calls.

    backend: "auto" or the name of the one that must run them; if that one refuses, a ValueError,
    or with raises=False, for those who only ask, a reason like any other and no warnings.
    ``outcomes`` grows by one entry a layer and graph. A second run over a graph finds nothing
    left to do.
    """

    def __init__(self, backend: str = AUTO, before: Any = None, *, raises: bool = True) -> None:
        self.backend = backend
        self.before = before
        self.raises = raises
        self.outcomes: list[Outcome] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place, or leave it alone and keep the reasons."""
        for earlier in as_passes(self.before):
            earlier(graph)
        if not any(is_marker(node) for node in graph.nodes):
            return
        if computes_gradients(graph):
            if self.raises:
                warn_once(GRADIENTS)
            self._keep([Outcome("", rewritten=False, reason="the graph computes gradients")])
            return
        order = {node: index for index, node in enumerate(graph.nodes)}
        regions = find_regions(graph)
        _retrace_hidden_numbers(graph, regions)
        checked = [self._check(found, order) for found in regions]
        rewriter = Rewriter(graph)
        outcomes = [self._rewrite(rewriter, verdict) for verdict in checked]
        self._keep(outcomes)
        if self.raises:
            _warn(outcomes)
        rewriter.finish()
        graph.lint()

    def uuid(self) -> Any:
        """Identify the package's files, the options and the passes before; None turns caches off.

        A pass before that has no identity, such as a plain function, turns them off as it would
        alone.
        """
        identities = []
        for earlier in as_passes(self.before):
            identity = earlier.uuid() if isinstance(earlier, CustomGraphPass) else None
            if not identity:
                return None
            identities.append(identity)
        return ("int8moe_compile", package_hash(), self.backend, tuple(identities))

    def _check(self, found: Region | Unmatched, order: Mapping[fx.Node, int]) -> Accepted | Outcome:
        """Decide about every region before the first is rewritten."""
        if isinstance(found, Unmatched):
            return Outcome(found.name, rewritten=False, reason=found.reason)
        try:
            return check_region(found, self.backend, order)
        except RefusedError as refused:
            return Outcome(found.name, rewritten=False, reason=str(refused))
        except NamedBackendError as error:
            if not self.raises:
                return Outcome(found.name, rewritten=False, reason=str(error))
            raise compilation_error(str(error)) from error
        except Exception as error:
            # Hugging Face's code is traced to compare with it, and may raise anything.
            return Outcome(found.name, rewritten=False, reason=failure(error))

    def _rewrite(self, rewriter: Rewriter, verdict: Accepted | Outcome) -> Outcome:
        """Rewrite what was accepted, and say so."""
        if isinstance(verdict, Outcome):
            return verdict
        name = verdict.region.name
        try:
            rewriter.rewrite(verdict)
        except RefusedError as refused:
            return Outcome(name, rewritten=False, reason=str(refused))
        except NamedBackendError as error:
            if not self.raises or self.backend == AUTO:
                return Outcome(name, rewritten=False, reason=str(error))
            raise compilation_error(str(error)) from error
        return Outcome(name, rewritten=True, backend=verdict.backend)

    def _keep(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            name = outcome.name or "experts"
            if outcome.rewritten:
                log.info("%s: rewritten for backend %s", name, outcome.backend)
            else:
                log.info("%s: left alone: %s", name, outcome.reason)
            if outcome not in self.outcomes:
                self.outcomes.append(outcome)


def _retrace_hidden_numbers(graph: fx.Graph, regions: list[Region | Unmatched]) -> None:
    """Ask for another trace where numbers that are inputs may be why a layer was not recognised."""
    missed = [found.name for found in regions if isinstance(found, Unmatched)]
    number = hidden_number(graph, missed) if missed else None
    if number is not None:
        retrace_with_literals(number)


def _warn(outcomes: list[Outcome]) -> None:
    """Warn about layers that stay slow, once a reason."""
    for outcome in outcomes:
        if not outcome.rewritten:
            name, reason = outcome.name or "experts", str(outcome.reason)
            warn_once(DEQUANTISED.format(name=name, reason=reason), about=reason)


def as_passes(slot: Any) -> tuple[Pass, ...]:
    """Return the passes in a slot of Inductor's configuration, which may hold none or several."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, (list, tuple)) else (slot,)
