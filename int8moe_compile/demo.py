"""Show the shipped model in bfloat16 and in INT8: perplexity, bytes, time, text (`int8moe demo`).

The model (demo_data/) was trained on the Python standard library by scripts/train_demo_model.py, a
token a byte; it is scored on text it never saw. Everything goes through the public API.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .api import enabled, explain, quantize_
from .schemes import SCHEMES

FOLDER = Path(__file__).parent / "demo_data"
CONTEXT = 512  # bytes; what the model was trained with
PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
CALIBRATION_WINDOWS = 16


@dataclass(frozen=True)
class Options:
    """Choose how much the demo shows."""

    every_scheme: bool = False
    device: str = "cpu"
    windows: int = 24
    batch: int = 4
    new_tokens: int = 120

    @property
    def schemes(self) -> tuple[str, ...]:
        """Name the schemes to show."""
        return tuple(SCHEMES) if self.every_scheme else ("w8a8",)


@dataclass(frozen=True)
class Score:
    """One row of the table: a model that read the held-out text."""

    scheme: str
    mode: str
    perplexity: float
    seconds_per_token: float


@dataclass(frozen=True)
class Continuation:
    """What one model wrote after the prompt, and how long a token took."""

    scheme: str
    text: str
    seconds_per_token: float


def load(device: str = "cpu") -> nn.Module:
    """Load the shipped checkpoint in bfloat16, as a user would."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)
    return model.to(device).eval()


def held_out_windows() -> Tensor:
    """Return the held-out text as rows [W, CONTEXT + 1] of token ids.

    A row shares its first byte with the end of the row before, so each byte is predicted once.
    """
    text = (FOLDER / "held_out.txt").read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens.unfold(0, CONTEXT + 1, CONTEXT)


def split_windows(windows: Tensor, scored: int) -> tuple[Tensor, Tensor]:
    """Return rows to score, spread over the whole text, and other rows to calibrate with."""
    if not 1 <= scored <= len(windows) - CALIBRATION_WINDOWS:
        most = len(windows) - CALIBRATION_WINDOWS
        raise ValueError(f"windows: wanted 1 to {most}, got {scored}")
    chosen = torch.arange(scored) * len(windows) // scored
    others = torch.ones(len(windows), dtype=torch.bool)
    others[chosen] = False
    rest = windows[others]
    spare = torch.arange(CALIBRATION_WINDOWS) * len(rest) // CALIBRATION_WINDOWS
    return windows[chosen], rest[spare]


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Return the summed -log p of targets [B, S] under logits [B, S, V], in nats."""
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    return -log_probabilities.gather(-1, targets.unsqueeze(-1)).sum().item()


def score(model: Any, batches: Sequence[Tensor], *, scheme: str, mode: str) -> Score:
    """Let a model read batches [B, S + 1] of one shape; return perplexity and the best time.

    The model's time alone counts, of the fastest batch: what else runs on the machine slows the
    others. Its first call, which compiles a compiled model, is made once more and not timed.
    """
    total = 0.0
    seconds: list[float] = []
    bar = tqdm(batches, desc=f"{scheme} {mode}", file=sys.stderr, leave=False)
    with torch.inference_mode():
        for index, rows in enumerate(bar):
            inputs, targets = rows[:, :-1], rows[:, 1:]
            if index == 0:
                bar.set_postfix_str("compiling" if mode == "compiled" else "warming up")
                model(input_ids=inputs, use_cache=False)
                bar.set_postfix_str("")
            start = time.perf_counter()
            logits = model(input_ids=inputs, use_cache=False).logits
            if logits.device.type != "cpu":
                torch.accelerator.synchronize(logits.device)
            seconds.append((time.perf_counter() - start) / targets.numel())
            total += negative_log_likelihood(logits, targets)
    count = sum(rows[:, 1:].numel() for rows in batches)
    return Score(scheme, mode, math.exp(total / count), min(seconds))


def compiled(model: nn.Module) -> Any:
    """Compile for one shape, in one graph."""
    return torch.compile(model, fullgraph=True, dynamic=False)


def continue_prompt(model: Any, *, scheme: str, new_tokens: int) -> Continuation:
    """Sample a continuation of PROMPT, with the same seed for every model."""
    ids = torch.tensor([list(PROMPT.encode())], device=model.device)
    torch.manual_seed(0)
    start = time.perf_counter()
    with torch.inference_mode():
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.6,
            top_k=20,
        )[0, ids.shape[1] :].tolist()
    elapsed = time.perf_counter() - start
    text = bytes(written).decode(errors="replace")
    return Continuation(scheme, text, elapsed / len(written))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return what tensors occupy."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_bytes(model: nn.Module) -> int:
    """Return the size of a model's parameters and buffers."""
    return bytes_of([*model.parameters(), *model.buffers()])


def missing_for_compiling(device: str) -> str | None:
    """Say what torch.compile lacks on this machine; None where it can be tried."""
    if device != "cpu":
        return None
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX") or default
    if shutil.which(compiler.split()[0]) is None:
        return f"a C++ compiler ({compiler} is not on the PATH; CXX names another)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Python's headers ({header} does not exist)"
    return None


def table_heading() -> str:
    """Return the heading of the scores' table."""
    return (
        f"{'model':<12} {'mode':<9} {'perplexity':>10} {'change':>9} {'us/token':>9} "
        f"{'tokens/s':>9} {'speed':>8}"
    )


def table_row(row: Score, *, perplexity: float, seconds_per_token: float) -> str:
    """Return one line of the scores' table, beside the perplexity and the speed of bf16."""
    change = 100 * (row.perplexity / perplexity - 1)
    return (
        f"{row.scheme:<12} {row.mode:<9} {row.perplexity:>10.4f} {change:>+8.3f}% "
        f"{1e6 * row.seconds_per_token:>9.1f} {1 / row.seconds_per_token:>9,.0f} "
        f"{seconds_per_token / row.seconds_per_token:>7.2f}x"
    )


def size_row(scheme: str, part: str, before: int, after: int) -> str:
    """Return one line of the table of sizes."""
    return f"{scheme:<12} {part:<12} {before:>10,} {after:>10,}  {after / before:>4.0%}"


def indented(text: str) -> str:
    """Set a text off from the demo's own."""
    return "\n".join(f"    | {line}" for line in text.splitlines())


@dataclass
class Demo:
    """Hold what the steps of one run share, and print the scores as they come."""

    options: Options
    model: nn.Module
    batches: Sequence[Tensor]
    calibration: Sequence[dict[str, Tensor]]
    missing: str | None
    baselines: dict[str, Score] = field(default_factory=dict)

    @classmethod
    def prepare(cls, options: Options) -> Demo:
        """Load the model and the text."""
        scored, spare = split_windows(held_out_windows(), options.windows)
        return cls(
            options,
            load(options.device),
            scored.to(options.device).split(options.batch),
            [{"input_ids": rows} for rows in spare.to(options.device).split(options.batch)],
            missing_for_compiling(options.device),
        )

    def measure(self, model: nn.Module, scheme: str) -> Continuation:
        """Score a model eager and compiled, print both rows, and let it write."""
        self._print(score(model, self.batches, scheme=scheme, mode="eager"))
        if self.missing is None:
            switch = contextlib.nullcontext() if scheme == "bf16" else enabled()
            with switch:
                self._print(score(compiled(model), self.batches, scheme=scheme, mode="compiled"))
        return continue_prompt(model, scheme=scheme, new_tokens=self.options.new_tokens)

    def quantised(self, scheme: str) -> nn.Module:
        """Return a quantised copy of the model."""
        calibration = self.calibration if scheme == "w8a8_static" else None
        return quantize_(copy.deepcopy(self.model), scheme, calibration=calibration)

    def _print(self, row: Score) -> None:
        """Print a row beside the bf16 ones, which come first: eager quality, the mode's speed."""
        base = self.baselines.setdefault(row.mode, row)
        quality = self.baselines["eager"]
        line = table_row(
            row, perplexity=quality.perplexity, seconds_per_token=base.seconds_per_token
        )
        print(line, flush=True)


def run(options: Options) -> None:
    """Run the demo; the report goes to stdout, progress to stderr."""
    demo = Demo.prepare(options)
    parameters = sum(weight.numel() for weight in demo.model.parameters())
    count = sum(rows[:, 1:].numel() for rows in demo.batches)
    print(
        f"{type(demo.model).__name__}, {parameters:,} parameters, on {options.device}; "
        f"{count:,} bytes of text it never saw, a token a byte\n\n{table_heading()}",
        flush=True,
    )
    before = model_bytes(demo.model)
    continuations = [demo.measure(demo.model, "bf16")]
    sizes: list[str] = []
    tables: list[str] = []
    for scheme in options.schemes:
        quantised = demo.quantised(scheme)
        continuations.append(demo.measure(quantised, scheme))
        layers = explain(quantised, demo.batches[0][:1, :-1])
        experts_before = sum(layer.bytes_before for layer in layers)
        experts_after = sum(layer.bytes_after for layer in layers)
        sizes.append(size_row(scheme, "experts", experts_before, experts_after))
        sizes.append(size_row(scheme, "whole model", before, model_bytes(quantised)))
        tables.append(f"explain(model), {scheme}\n{layers}")
    if demo.missing is not None:
        print(f"no compiled rows: torch.compile needs {demo.missing}")
    print(f"\n{'bytes':<25} {'bf16':>10} {'int8':>10}\n" + "\n".join(sizes))
    for table in tables:
        print(f"\n{table}")
    print("\nchange: from bf16 eager; speed: beside bf16 in the same mode, in large batches")
    print(f"\nContinuations, sampled from one seed, one token at a time, of\n{indented(PROMPT)}")
    for written in continuations:
        print(f"{written.scheme}, eager, {1e3 * written.seconds_per_token:.1f} ms/token")
        print(indented(written.text))
