"""Score the demo's model through every kind of INT8 checkpoint: the table of docs/checkpoints.md.

    python scripts/checkpoint_perplexity.py               # needs compressed-tensors and torchao
    python scripts/checkpoint_perplexity.py --windows 8   # faster, less text

The experts alone are quantised, attention and lm_head stay bfloat16, so that rows of one scheme can
be compared. Static scales are those that quantize_ calibrates.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from hf_checkpoints import CHANNEL, DYNAMIC_TENSOR, STATIC_TENSOR, TENSOR, TOKEN, write  # noqa: E402
from hf_formats import gptq, quark, written_as_gptq  # noqa: E402
from hf_package import GROUPS, written_by_the_package  # noqa: E402
from torch import nn  # noqa: E402
from torchao.quantization import (  # noqa: E402
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerTensor,
)
from transformers import AutoModelForCausalLM, TorchAoConfig  # noqa: E402

from int8moe_compile import demo  # noqa: E402
from int8moe_compile.convert import convert_checkpoint  # noqa: E402
from int8moe_compile.hf import Int8MoeConfig, find_experts, record_of  # noqa: E402
from int8moe_compile.quantization import quantize_  # noqa: E402

IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*mlp.gate$")
QUARK = {
    "w8a8": (CHANNEL, TOKEN),
    "w8a8_tensor": (TENSOR, DYNAMIC_TENSOR),
    "w8a8_static": (CHANNEL, STATIC_TENSOR),
    "w8a16": (CHANNEL, None),
}
TORCHAO = {
    "w8a8": Int8DynamicActivationInt8WeightConfig,
    "w8a8_tensor": partial(Int8DynamicActivationInt8WeightConfig, granularity=PerTensor()),
    "w8a16": Int8WeightOnlyConfig,
}


@dataclass(frozen=True)
class Row:
    """Say what a checkpoint is, who writes it, and how to come by the model."""

    format: str
    writer: str
    scheme: str
    model: Callable[[Path], nn.Module]


def rows(static: dict[str, tuple[float, float]], calibrated: nn.Module) -> Iterator[Row]:
    """List every way to an INT8 model."""
    for scheme in ("w8a8", "w8a8_tensor", "w8a16"):
        yield Row("bf16", "quantised while loading", scheme, partial(online, scheme))
    for scheme in ("w8a8", "w8a8_tensor", "w8a16"):
        yield Row("compressed-tensors", "int8moe quantize", scheme, partial(converted, scheme))
    saved = partial(saved_and_loaded, calibrated)
    yield Row("compressed-tensors", "save_pretrained", "w8a8_static", saved)
    package = f"compressed-tensors {importlib.metadata.version('compressed-tensors')}"
    for scheme in GROUPS:
        how = partial(from_package, scheme, static)
        word = "pack-quantized" if scheme == "w8a16" else "int-quantized"
        yield Row(f"compressed-tensors {word}", package, scheme, how)
    for scheme in QUARK:
        yield Row("Quark", "the tests' writer", scheme, partial(from_quark, scheme, static))
    torchao = f"torchao {importlib.metadata.version('torchao')}"
    for scheme in TORCHAO:
        yield Row("torchao", torchao, scheme, partial(from_torchao, scheme))
    yield Row("GPTQ", "the tests' writer, to nearest", "w8a16", from_gptq)


def load(directory: Path, **options: Any) -> nn.Module:
    """Load a checkpoint as a user would."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, **options)
    return model.eval()


def online(scheme: str, directory: Path) -> nn.Module:
    """Quantise while loading."""
    return load(demo.FOLDER, quantization_config=Int8MoeConfig(scheme))


def converted(scheme: str, directory: Path) -> nn.Module:
    """Convert without loading, then load."""
    return load(convert_checkpoint(demo.FOLDER, directory / "int8", scheme, progress=False))


def saved_and_loaded(model: nn.Module, directory: Path) -> nn.Module:
    """Save a quantised model, then load it."""
    saver: Any = model
    saver.save_pretrained(directory)
    return load(directory)


def from_package(scheme: str, static: dict[str, tuple[float, float]], directory: Path) -> nn.Module:
    """Let the compressed-tensors package quantise and write."""
    written = written_by_the_package(
        demo.load(),
        directory,
        GROUPS[scheme],
        ignore=IGNORE,
        input_scale=lambda name: static_scale(static, name),
    )
    return load(written.save(directory / "int8"))


def static_scale(static: dict[str, tuple[float, float]], name: str) -> float:
    """Return the static scale of a projection of an expert, by its name."""
    path, _, rest = name.partition(".experts.")
    return static[f"{path}.experts"]["down_proj" in rest]


def from_quark(scheme: str, static: dict[str, tuple[float, float]], directory: Path) -> nn.Module:
    """Write in the words of Quark."""
    weights, inputs = QUARK[scheme]
    written = write(
        directory,
        model=demo.load(),
        config=quark(weights, inputs),
        per_tensor=weights is TENSOR,
        scale=lambda scale: scale.flatten(),
    )
    names = [name for name in written.tensors if name.endswith(".weight_scale")]
    for name in names if scheme == "w8a8_static" else ():
        value = torch.tensor(static_scale(static, name))
        written.tensors[name.replace("weight_scale", "input_scale")] = value
    return load(written.save(directory / "int8"))


def from_torchao(scheme: str, directory: Path) -> nn.Module:
    """Let torchao quantise and write."""
    entry = TORCHAO[scheme]()
    names = [rf"re:.*\.experts\.{name}" for name in ("gate_up_proj", "down_proj")]
    config = TorchAoConfig(quant_type=FqnToConfig(dict.fromkeys(names, entry)))
    return saved_and_loaded(load(demo.FOLDER, quantization_config=config), directory)


def from_gptq(directory: Path) -> nn.Module:
    """Pack round-to-nearest codes as GPTQ does."""
    written = written_as_gptq(directory, gptq(), model=demo.load())
    return load(written.save(directory / "int8"))


def static_scales(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the static scales of a calibrated model, by the path of its experts."""
    return {
        path: (
            module.get_buffer("gate_up_proj_input_scale").item(),
            module.get_buffer("down_proj_input_scale").item(),
        )
        for path, module in find_experts(model)
    }


def perplexity(model: Any, batches: list[torch.Tensor]) -> float:
    """Return the perplexity per byte of rows [B, S + 1]."""
    total = 0.0
    with torch.inference_mode():
        for rows in batches:
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            total += demo.negative_log_likelihood(logits, rows[:, 1:])
    return math.exp(total / sum(rows[:, 1:].numel() for rows in batches))


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=24, help="how many windows of 512 bytes")
    windows = parser.parse_args().windows
    warnings.filterwarnings("ignore")
    scored, spare = demo.split_windows(demo.held_out_windows(), windows)
    batches = list(scored.split(4))
    plain = demo.load()
    calibration = [{"input_ids": rows} for rows in spare.split(4)]
    calibrated = quantize_(copy.deepcopy(plain), "w8a8_static", calibration=calibration)
    base = perplexity(plain, batches)
    print("| format | written by | scheme | perplexity | against bf16 |\n|---|---|---|---|---|")
    print(f"| bf16 | the demo | - | {base:.4f} | |", flush=True)
    for row in rows(static_scales(calibrated), calibrated):
        with tempfile.TemporaryDirectory() as folder:
            model = row.model(Path(folder))
        schemes = {getattr(record_of(m), "scheme", None) for _, m in find_experts(model)}
        assert {scheme and scheme.name for scheme in schemes} == {row.scheme}, schemes
        value = perplexity(model, batches)
        print(
            f"| {row.format} | {row.writer} | `{row.scheme}` | {value:.4f} | "
            f"{100 * (value / base - 1):+.3f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
