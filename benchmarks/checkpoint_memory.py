"""Measure peak memory of quantising a model while it is loaded, and of converting its files.

    python benchmarks/checkpoint_memory.py                 # 2.6 GB of random weights, on the CPU
    python benchmarks/checkpoint_memory.py --device cuda   # the GPU's allocator beside it

A random Qwen3-MoE is written to a temporary folder (--folder says where), layer by layer. Each
figure comes from a process of its own: resident memory at its highest, above what it was before,
when everything had been imported and a tiny model loaded. While loading, the limit is the INT8
model, one fused tensor and 10 % of both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from int8moe_compile.convert import convert_checkpoint  # noqa: E402
from int8moe_compile.hf import Int8MoeConfig  # noqa: E402

MIB = 2**20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Sizes:
    """Hold what decides how large a model is."""

    layers: int = 4
    experts: int = 64
    hidden: int = 2048
    intermediate: int = 768
    vocabulary: int = 32000

    @property
    def fused(self) -> int:
        """Return the bytes of the largest fused tensor, in bfloat16."""
        return self.experts * 2 * self.intermediate * self.hidden * 2

    def config(self) -> Qwen3MoeConfig:
        """Return the configuration of a model of these sizes."""
        return Qwen3MoeConfig(
            num_hidden_layers=self.layers,
            num_experts=self.experts,
            hidden_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=self.hidden // 16,
            num_experts_per_tok=8,
            dtype="bfloat16",
        )


def write_model(sizes: Sizes, folder: Path) -> int:
    """Write random weights, a file a layer, in the names of the family; return their bytes."""
    folder.mkdir(parents=True)
    config = sizes.config()
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, value in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(layer, {}).update(single_experts(name, value.shape))
    places, total = {}, 0
    for number, shapes in parts.items():
        file = f"model-{number}.safetensors"
        tensors = {
            name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return total


def single_experts(name: str, shape: torch.Size) -> dict[str, torch.Size]:
    """Return names and shapes under which a parameter stands in the family's checkpoints."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        half = torch.Size([shape[1] // 2, shape[2]])
        words, size = ("gate_proj", "up_proj"), half
    elif last == "down_proj" and len(shape) == 3:
        words, size = ("down_proj",), shape[1:]
    else:
        return {name: shape}
    return {f"{stem}.{e}.{word}.weight": size for e in range(shape[0]) for word in words}


def resident(field: str) -> int:
    """Return this process's resident memory in bytes: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def load(folder: Path, device: str) -> Any:
    """Quantise while loading."""
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, quantization_config=Int8MoeConfig(), device_map=device
    )


def child(path: str, folder: Path, device: str) -> None:
    """Do one thing in this process and print its figures."""
    tiny = Sizes(layers=1, experts=4, hidden=64, intermediate=32, vocabulary=128)
    with tempfile.TemporaryDirectory() as spare:
        write_model(tiny, Path(spare, "float"))
        load(Path(spare, "float"), device)
        convert_checkpoint(Path(spare, "float"), Path(spare, "int8"), progress=False)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
    found: dict[str, int] = {}
    if path == "load":
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        model = load(folder, device)
        state = model.state_dict().values()
        found["int8"] = sum(value.nbytes for value in state)
        if on_gpu:
            found["allocated"] = torch.cuda.max_memory_allocated()
    else:
        target = folder.with_name("int8")
        convert_checkpoint(folder, target, device=device, progress=False)
        found["int8"] = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(json.dumps({**found, "peak": resident("VmHWM") - before}))


def measured(path: str, folder: Path, device: str) -> dict[str, int]:
    """Run one child."""
    command = [sys.executable, __file__, "--child", path, "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--device", device], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Write the model, measure both ways, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write the models; default: temporary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=("load", "convert"), help=argparse.SUPPRESS)
    for name in ("layers", "experts", "hidden", "intermediate"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.device)
        return 0
    sizes = Sizes(options.layers, options.experts, options.hidden, options.intermediate)
    with tempfile.TemporaryDirectory(dir=options.folder) as spare:
        folder = Path(spare, "float")
        total = write_model(sizes, folder)
        loaded = measured("load", folder, options.device)
        converted = measured("convert", folder, options.device)
    limit = 1.1 * (loaded["int8"] + sizes.fused)
    key = "allocated" if "allocated" in loaded else "peak"
    print(f"{total / MIB:.0f} MiB of bfloat16, {loaded['int8'] / MIB:.0f} MiB of INT8 model")
    print(f"while loading ({key}): {loaded[key] / MIB:.0f} MiB, limit {limit / MIB:.0f} MiB")
    print(f"while loading, host: {loaded['peak'] / MIB:.0f} MiB")
    print(f"converting, host: {converted['peak'] / MIB:.0f} MiB")
    return int(loaded[key] > limit)


if __name__ == "__main__":
    sys.exit(main())
