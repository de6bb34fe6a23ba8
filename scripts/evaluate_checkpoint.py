"""Evaluate a checkpoint with lm-eval: INT8, or float and quantised while it is loaded.

    pip install -e ".[eval,hf]"
    # a text file of one's own: perplexity per byte, and which of four continuations is the true one
    python scripts/evaluate_checkpoint.py CHECKPOINT --scheme w8a8 --text FILE
    # a task of lm-eval; 0.50 is what INT8 experts have to keep of this model's grade-school maths
    python scripts/evaluate_checkpoint.py Qwen/Qwen1.5-MoE-A2.7B --scheme w8a8 --task gsm8k \\
        --device cuda --batch-size 32 --compile --at-least gsm8k/exact_match,strict-match=0.50

--scheme none loads a checkpoint as it is: INT8 if its configuration says so, else float. The exit
status is 1 if a result is below an --at-least. --bytes is for models of bytes, as the demo's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402
from evaluation_tasks import byte_tokenizer, local_tasks  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import int8moe_compile  # noqa: E402
from int8moe_compile.hf import Int8MoeConfig, find_experts, record_of  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, compare with the thresholds."""
    options = parser().parse_args(arguments)
    if not options.task and options.text is None:
        parser().error("wanted --task or --text")
    thresholds = [threshold(text) for text in options.at_least]
    model = load(options)
    switch = int8moe_compile.enabled() if options.compile else contextlib.nullcontext()
    with switch, tempfile.TemporaryDirectory() as folder:
        if options.compile:
            model.compile()
        results = evaluate(model, options, Path(folder))
    width = max(map(len, results), default=0)
    for name, value in results.items():
        print(f"{name:<{width}}  {value:.4f}")
    missed = [(name, value) for name, value in thresholds if below(results, name, value)]
    for name, value in missed:
        print(f"{name}: wanted at least {value}, got {results.get(name)}", file=sys.stderr)
    return 1 if missed else 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("checkpoint", help="folder or hub name")
    top.add_argument("--scheme", default="none", help="of Int8MoeConfig; default: %(default)s")
    top.add_argument("--task", action="append", default=[], help="name of a task of lm-eval")
    top.add_argument("--text", type=Path, help="a text file, for the tasks of this script")
    top.add_argument("--choices", type=int, default=100, help="places of the text to ask about")
    top.add_argument("--num-fewshot", type=int, help="default: what the task says")
    top.add_argument("--limit", type=int, help="examples of each task; for a trial")
    top.add_argument("--bytes", action="store_true", help="the model's tokens are bytes")
    top.add_argument("--max-length", type=int, help="tokens; default: what the model says")
    top.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    top.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    top.add_argument("--compile", action="store_true", help="compile, with the pass enabled")
    top.add_argument(
        "--at-least",
        action="append",
        default=[],
        metavar="TASK/METRIC=VALUE",
        help="a result that has to be reached",
    )
    return top


def threshold(text: str) -> tuple[str, float]:
    """Read one --at-least; raises SystemExit for anything else."""
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if "/" in name:
            return name, float(value)
    raise SystemExit(f"--at-least: wanted TASK/METRIC=VALUE, got {text!r}")


def below(results: dict[str, float], name: str, value: float) -> bool:
    """Say whether a result is missing, below a value, or no number."""
    return not results.get(name, float("nan")) >= value


def load(options: argparse.Namespace) -> Any:
    """Load the model; say how its experts run."""
    wanted: dict[str, Any] = {"dtype": options.dtype}
    if options.scheme != "none":
        wanted["quantization_config"] = Int8MoeConfig(options.scheme)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, **wanted)
    records = [record_of(module) for _, module in find_experts(model)]
    schemes = sorted({"float" if found is None else found.scheme.name for found in records})
    print(f"{len(records)} experts modules: {', '.join(schemes)}", file=sys.stderr)
    return model.to(options.device).eval()


def evaluate(model: Any, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Let lm-eval ask the model; return the results by task and metric."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer() if options.bytes else None
    tasks: list[Any] = list(options.task)
    if options.text is not None:
        tasks += local_tasks(options.text, folder, options.choices)
    asked = HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer or AutoTokenizer.from_pretrained(options.checkpoint),
        batch_size=options.batch_size,
        max_length=options.max_length,
    )
    found = simple_evaluate(
        asked,
        tasks=tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, (int, float)) and "stderr" not in name and name != "sample_len"
    }


if __name__ == "__main__":
    sys.exit(main())
