"""Time one experts layer on this machine: INT8 eager and compiled beside Hugging Face's in bf16.

Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .device import total_memory
from .ops.schema import ACTIVATION_QUANTS

MEASURING_SECONDS = 0.5  # a contestant and size, spread over ROUNDS that take turns
ROUNDS = 5


@dataclass(frozen=True)
class BenchOptions:
    """Choose the layer and what to time; the defaults are a small layer that any machine holds."""

    tokens: tuple[int, ...] = (1, 16, 128)
    hidden: int = 1024
    intermediate: int = 768
    experts: int = 32
    top_k: int = 4
    quants: tuple[str, ...] = ("token",)
    device: str = "cpu"
    max_autotune: bool = False


@dataclass(frozen=True)
class Layer:
    """Hold one layer's weights in INT8 and, for comparison, in bf16."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    @classmethod
    def random(cls, options: BenchOptions) -> Layer:
        """Draw codes and the scales that keep outputs of the order of 1."""
        E, H, I = options.experts, options.hidden, options.intermediate  # noqa: E741

        def codes(*shape: int) -> Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, device=options.device)

        def scales(rows: int, fan_in: int) -> Tensor:
            return torch.full((E, rows), 1 / (73 * math.sqrt(fan_in)), device=options.device)

        return cls(codes(E, 2 * I, H), scales(2 * I, H), codes(E, H, I), scales(H, I))

    def call(self, quant: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the operator on these weights."""
        scale = torch.full((1,), 0.03, device=self.w13.device) if quant == "static" else None

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            result: Tensor = torch.ops.int8moe.experts(
                x,
                self.w13,
                self.w13_scale,
                self.w2,
                self.w2_scale,
                weights,
                ids,
                activation_quant=quant,
                a13_scale=scale,
                a2_scale=scale,
            )
            return result

        return run


def hugging_face(options: BenchOptions) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return Mixtral's experts in bf16 as transformers runs them, None without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_local_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )
    config._experts_implementation = "grouped_mm"
    module = MixtralExperts(config).to(device=options.device, dtype=torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = module(x, ids, weights)
        return result

    return run


def inputs(options: BenchOptions, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, router weights and distinct experts for each token."""
    x = torch.randn(tokens, options.hidden, device=options.device, dtype=torch.bfloat16)
    logits = torch.randn(tokens, options.experts, device=options.device)
    weights, ids = torch.topk(torch.softmax(logits, -1), options.top_k)
    return x, weights.to(torch.bfloat16), ids


def microseconds(contestants: dict[str, Callable[[], Tensor]], device: str) -> dict[str, float]:
    """Return each contestant's median time; they take turns, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            end = time.perf_counter() + MEASURING_SECONDS / ROUNDS
            while True:
                _finish_work(device)
                begin = time.perf_counter()
                call()
                _finish_work(device)
                done = time.perf_counter()
                times[name].append(1e6 * (done - begin))
                if done > end:
                    break
    return {name: statistics.median(taken) for name, taken in times.items()}


def _finish_work(device: str) -> None:
    """Wait for what a GPU still has to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def run(options: BenchOptions) -> Iterator[str]:
    """Yield the lines of a table: one a size and activation_quant, microseconds a call."""
    if options.top_k > options.experts:
        raise ValueError(f"top_k: wanted at most {options.experts} experts, got {options.top_k}")
    for quant in options.quants:
        if quant not in ACTIVATION_QUANTS:
            raise ValueError(f"quant: wanted one of {list(ACTIVATION_QUANTS)}, got {quant!r}")
    _want_room(options)
    with _naming("hidden, intermediate, experts", options):
        layer, peer = Layer.random(options), hugging_face(options)
    mode = "max-autotune-no-cudagraphs" if options.max_autotune else None
    yield (
        f"E={options.experts} K={options.top_k} H={options.hidden} I={options.intermediate}, bf16 "
        f"hidden states, on {options.device}, "
        f"torch {importlib.metadata.version('torch')}; microseconds a call"
    )
    titles = ("int8", "compiled", "HF bf16", "compiled")
    yield f"{'tokens':>7} {'quant':>7} " + " ".join(f"{title:>10}" for title in titles)
    with torch.inference_mode():
        for quant in options.quants:
            for tokens in options.tokens:
                with _naming("tokens", options):
                    row = _row(options, layer.call(quant), peer, quant, tokens, mode)
                yield row


def _want_room(options: BenchOptions) -> None:
    """Refuse sizes of which the weights or the inputs alone exceed the device's memory."""
    E, H, I, K = options.experts, options.hidden, options.intermediate, options.top_k  # noqa: E741
    room = total_memory(options.device)
    # A layer in bf16 lies beside the one in INT8; inputs are hidden states, logits, weights, ids.
    weights = 3 * E * H * I * (1 if importlib.util.find_spec("transformers") is None else 3)
    if weights > room:
        raise ValueError(_no_room("hidden, intermediate, experts", f"{H}, {I}, {E}", options))
    for tokens in options.tokens:
        if tokens * (2 * H + 4 * E + 10 * K) > room:
            raise ValueError(_no_room("tokens", str(tokens), options))


def _no_room(names: str, got: str, options: BenchOptions) -> str:
    room = total_memory(options.device) / 2**30
    return f"{names}: wanted sizes that fit the {room:.0f} GiB of {options.device}, got {got}"


@contextlib.contextmanager
def _naming(names: str, options: BenchOptions) -> Iterator[None]:
    """Name the arguments that ask for more memory than there is."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(_no_room(names, "more", options)) from error
    except RuntimeError as error:
        # torch's allocator for the CPU (2.11-2.14) has no exception class of its own
        if "can't allocate memory" not in str(error):
            raise
        raise ValueError(_no_room(names, "more", options)) from error


def _row(
    options: BenchOptions,
    ours: Callable[[Tensor, Tensor, Tensor], Tensor],
    peer: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    quant: str,
    tokens: int,
    mode: str | None,
) -> str:
    """Time one size; a layer without its peer prints a dash."""
    # Every size shares its functions' code, and Dynamo keeps few compilations of one code.
    torch.compiler.reset()
    given = inputs(options, tokens)
    functions = {"int8": ours, "int8 compiled": torch.compile(ours, mode=mode, dynamic=False)}
    if peer is not None:
        functions |= {"peer": peer, "peer compiled": torch.compile(peer, mode=mode, dynamic=False)}
    contestants = {name: _bound(function, given) for name, function in functions.items()}
    taken = microseconds(contestants, options.device)
    names = ("int8", "int8 compiled", "peer", "peer compiled")
    cells = [f"{taken[name]:10.1f}" if name in taken else f"{'-':>10}" for name in names]
    return f"{tokens:7d} {quant:>7} " + " ".join(cells)


def _bound(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], given: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    return lambda: function(*given)
