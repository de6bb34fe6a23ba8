"""The command int8moe (also python -m int8moe_compile)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; return the process's exit status."""
    parsed = parser().parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(prog="int8moe", description="INT8 experts under torch.compile")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo", help="score a small trained model in bf16 and INT8, eager and compiled"
    )
    demo.add_argument("--all", action="store_true", help="every scheme, not w8a8 alone")
    demo.add_argument("--windows", type=_positive, help="how many 512-byte windows to score")
    demo.add_argument("--device", default=_default_device(), help="default: %(default)s")
    demo.set_defaults(run=_demo)


def _demo(parsed: argparse.Namespace) -> int:
    from .demo import Options, run

    chosen = {} if parsed.windows is None else {"windows": parsed.windows}
    run(Options(every_scheme=parsed.all, device=parsed.device, **chosen))
    return 0


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted a positive number, got {text}")
    return value
