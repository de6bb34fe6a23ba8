"""Export an INT8 mixture-of-experts model into one .pt2 file that runs without transformers.

    python examples/export_package.py demo.pt2            # make the package from the shipped model
    python examples/export_package.py demo.pt2 --run      # run it: imports no model code

Any causal model of transformers goes the same way: put its path into --model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import int8moe_compile

DEMO = Path(int8moe_compile.__file__).parent / "demo_data"


class Logits(nn.Module):
    """A causal model as a function of token ids: no cache, no mask, a tensor as result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits [B, T, V] of token ids [B, T]."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def export(model: nn.Module, longest: int) -> Any:
    """Trace a model for any batch and any number of tokens up to longest."""
    batch, tokens = torch.export.Dim("batch", max=1024), torch.export.Dim("tokens", max=longest)
    device = next(model.parameters()).device
    example = torch.zeros(2, 16, dtype=torch.int64, device=device)
    with torch.no_grad():
        return torch.export.export(
            Logits(model),
            (example,),
            dynamic_shapes=({0: batch, 1: tokens},),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def package(model: nn.Module, path: Path, longest: int) -> None:
    """Compile a model ahead of time. The pass must be on here, not while tracing."""
    with int8moe_compile.enabled():
        torch._inductor.aoti_compile_and_package(export(model, longest), package_path=str(path))


def run(path: Path, ids: Tensor) -> Tensor:
    """Load a package, for which int8moe_compile must have been imported, and call it.

    A package takes its inputs for contiguous, as the example was, and does not check.
    """
    logits: Tensor = torch._inductor.aoti_load_package(str(path))(ids.contiguous())
    return logits


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the .pt2 file")
    parser.add_argument("--model", default=str(DEMO), help="a checkpoint's folder")
    parser.add_argument("--run", action="store_true", help="run the file instead of making it")
    parser.add_argument("--device", default="cpu", help="where the package runs: cpu or cuda")
    parser.add_argument("--longest", type=int, default=1024, help="most tokens in one call")
    options = parser.parse_args()
    if not options.run:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        model = model.to(options.device)
        package(int8moe_compile.quantize_(model), options.path, options.longest)
        print(f"wrote {options.path}: {options.path.stat().st_size:,} bytes")
        return
    ids = torch.tensor([list(b"def read_lines(path):")], device=options.device)
    print(f"next token: {run(options.path, ids)[0, -1].argmax().item()}")


if __name__ == "__main__":
    main()
