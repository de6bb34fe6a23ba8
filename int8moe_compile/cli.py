"""The command int8moe (also python -m int8moe_compile)."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cli_source import load_model, want_apart, want_float, want_some_left, want_source
from .compat import require_transformers
from .device import unusable
from .ops.schema import ACTIVATION_QUANTS
from .schemes import parse_scheme, scheme_names

CALIBRATION_TOKENS = 512  # a row
CALIBRATION_ROWS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; return the process's exit status.

    A fault of the user's, or a missing package, is one line on stderr and status 1; anything else
    is a traceback.
    """
    parsed = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            # transformers caches its version checks; harmless, and ten lines each.
            warnings.filterwarnings("ignore", message=".*functools.lru_cache")
            parsed.run(parsed)
    except (ValueError, OSError, ImportError) as error:
        print(f"int8moe: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(prog="int8moe", description="INT8 experts under torch.compile")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_demo, _add_explain, _add_quantize, _add_bench):
        add(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo", help="score a small trained model in bf16 and INT8, eager and compiled"
    )
    demo.add_argument("--all", action="store_true", help="every scheme, not w8a8 alone")
    demo.add_argument("--windows", type=_positive, help="how many 512-byte windows to score")
    demo.add_argument(
        "--device", type=_device, default=_default_device(), help="default: %(default)s"
    )
    demo.set_defaults(run=_demo)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain", help="list a model's experts layers: what would run them, or why not"
    )
    explain.add_argument("model", help="checkpoint folder or hub name")
    explain.add_argument("--scheme", choices=scheme_names(), default="w8a8", metavar="SCHEME")
    explain.add_argument("--skip", action="append", default=[], metavar="PATTERN")
    explain.add_argument(
        "--load",
        action="store_true",
        help="load the model and trace it; a folder is else judged by its headers alone",
    )
    explain.add_argument(
        "--device", type=_device, default=_default_device(), help="default: %(default)s"
    )
    explain.set_defaults(run=_explain)


def _add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    quantize = commands.add_parser("quantize", help="write a checkpoint with INT8 experts")
    quantize.add_argument("source", help="checkpoint folder or hub name", metavar="SRC")
    quantize.add_argument("target", type=Path, help="folder to write", metavar="DST")
    quantize.add_argument(
        "--scheme",
        choices=scheme_names(),
        default="w8a8",
        metavar="SCHEME",
        help=f"one of {', '.join(scheme_names())}; default: %(default)s",
    )
    quantize.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave experts modules with such names as they are (fnmatch; may be repeated)",
    )
    quantize.add_argument(
        "--calibration", type=Path, metavar="FILE", help="a text, for w8a8_static"
    )
    quantize.add_argument("--verify", action="store_true", help="read everything back and compare")
    quantize.add_argument(
        "--in-memory",
        action="store_true",
        help="load the whole model instead of going file by file; so it is for w8a8_static and "
        "hub names in any case",
    )
    quantize.add_argument("--device", type=_device, default="cpu", help="default: %(default)s")
    quantize.set_defaults(run=_quantize)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench", help="time one experts layer in INT8 and bf16, eager and compiled"
    )
    bench.add_argument("--tokens", type=_positive, nargs="+", default=[1, 16, 128], metavar="T")
    for name, size in (("hidden", 1024), ("intermediate", 768), ("experts", 32), ("top-k", 4)):
        bench.add_argument(f"--{name}", type=_positive, default=size, help="default: %(default)s")
    bench.add_argument(
        "--quant",
        choices=ACTIVATION_QUANTS,
        nargs="+",
        default=["token"],
        help="how activations are quantised; default: token",
    )
    bench.add_argument("--max-autotune", action="store_true", help="compare tiles while compiling")
    bench.add_argument(
        "--device", type=_device, default=_default_device(), help="default: %(default)s"
    )
    bench.set_defaults(run=_bench)


def _bench(parsed: argparse.Namespace) -> None:
    from .bench import BenchOptions, run

    _want_usable(parsed.device)
    options = BenchOptions(
        tokens=tuple(parsed.tokens),
        hidden=parsed.hidden,
        intermediate=parsed.intermediate,
        experts=parsed.experts,
        top_k=parsed.top_k,
        quants=tuple(parsed.quant),
        device=parsed.device,
        max_autotune=parsed.max_autotune,
    )
    for line in run(options):
        print(line, flush=True)


def _demo(parsed: argparse.Namespace) -> None:
    from .demo import Options, run

    _want_usable(parsed.device)
    chosen = {} if parsed.windows is None else {"windows": parsed.windows}
    run(Options(every_scheme=parsed.all, device=parsed.device, **chosen))


def _explain(parsed: argparse.Namespace) -> None:
    is_quantised = want_source(parsed.model)
    _want_no_skip(parsed, is_quantised=is_quantised)
    if Path(parsed.model).is_dir() and not parsed.load and not parsed.skip:
        from .checkpoint_explain import explain_directory

        print(explain_directory(parsed.model, parsed.scheme, parsed.device))
        return
    from .api import explain, quantize_

    _want_usable(parsed.device)
    model = load_model(parsed.model, parsed.device)
    is_quantised = getattr(model, "hf_quantizer", None) is not None
    _want_no_skip(parsed, is_quantised=is_quantised)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(16, device=parsed.device).remainder(vocabulary).unsqueeze(0)
    if not is_quantised:
        # What static scales are worth does not matter here, only that there are some.
        calibration = [ids] if _is_static(parsed) else None
        quantize_(model, parsed.scheme, skip=parsed.skip, calibration=calibration)
    print(explain(model, input_ids=ids, use_cache=False))


def _is_static(parsed: argparse.Namespace) -> bool:
    return parse_scheme(parsed.scheme).activation_quant == "static"


def _want_no_skip(parsed: argparse.Namespace, *, is_quantised: bool) -> None:
    """Refuse patterns for a checkpoint in which nothing is left to decide."""
    if parsed.skip and is_quantised:
        raise ValueError(
            f"--skip: wanted none for {parsed.model}, which is quantised already, got {parsed.skip}"
        )


def _quantize(parsed: argparse.Namespace) -> None:
    _want_usable(parsed.device)
    want_float(parsed.source, is_quantised=want_source(parsed.source))
    want_apart(parsed.source, parsed.target)
    is_local = Path(parsed.source).is_dir()
    if _is_static(parsed) or parsed.in_memory or parsed.calibration is not None or not is_local:
        _quantize_in_memory(parsed)
        return
    from .checkpoint_explain import explain_directory
    from .convert import convert_checkpoint

    if parsed.skip:
        layers = explain_directory(parsed.source, parsed.scheme, parsed.device)
        want_some_left((layer.name for layer in layers), parsed.skip)
    convert_checkpoint(
        parsed.source,
        parsed.target,
        parsed.scheme,
        skip=parsed.skip,
        device=parsed.device,
        verify=parsed.verify,
    )
    print(explain_directory(parsed.target, parsed.scheme, parsed.device))


def _quantize_in_memory(parsed: argparse.Namespace) -> None:
    from .api import explain, quantize_

    if parsed.verify:
        raise ValueError("--verify: wanted a conversion file by file, got one in memory")
    if parsed.target.exists() and (not parsed.target.is_dir() or any(parsed.target.iterdir())):
        raise ValueError(f"DST: wanted a new or empty folder, got {parsed.target}")
    if _is_static(parsed) and parsed.calibration is None:
        raise ValueError(f"--calibration: wanted a text with {parsed.scheme}, got none")
    tokenizer = _tokenizer(parsed.source)
    calibration = None
    if parsed.calibration is not None:
        if tokenizer is None:
            raise ValueError(
                f"--calibration: {parsed.source} has no tokenizer to read the text with"
            )
        calibration = _rows(tokenizer, parsed.calibration, parsed.device)
    model = load_model(parsed.source, parsed.device)
    want_float(parsed.source, is_quantised=getattr(model, "hf_quantizer", None) is not None)
    want_some_left((layer.name for layer in explain(model)), parsed.skip)
    quantize_(model, parsed.scheme, skip=parsed.skip, calibration=calibration)
    model.save_pretrained(parsed.target)
    if tokenizer is not None:
        tokenizer.save_pretrained(parsed.target)
    print(explain(model))


def _tokenizer(source: str) -> Any | None:
    """Return a checkpoint's tokenizer, None if it has none."""
    require_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None
    # Without files transformers makes an empty one, of special tokens alone.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None


def _rows(tokenizer: Any, text: Path, device: str) -> list[Tensor]:
    """Cut a text into rows of tokens for the calibration, the first of them."""
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--calibration: wanted a text in UTF-8, got {text}: {error}") from None
    if not content.strip():
        raise ValueError(f"--calibration: wanted a text, got {text}, which is empty")
    ids = tokenizer(content, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ValueError(f"--calibration: wanted a text with tokens, got {text}, without any")
    return list(ids.to(device).split(CALIBRATION_TOKENS, dim=1))[:CALIBRATION_ROWS]


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _want_usable(device: str) -> None:
    """Refuse a device that this machine or this torch cannot compute on."""
    reason = unusable(device)
    if reason is not None:
        raise ValueError(f"--device: {device} cannot be used here: {reason}")


def _device(text: str) -> str:
    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(
            f"wanted a device like cpu or cuda:0, got {text}"
        ) from None
    return text


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted a positive number, got {text}")
    return value
