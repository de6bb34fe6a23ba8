"""Judge and load the checkpoint that a command names; what is wrong with it is a ValueError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .checkpoint_files import nesting, read_header, read_json
from .compat import require_transformers
from .errors import CheckpointError
from .skip import matching_pattern

_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def want_source(source: str) -> bool:
    """Refuse what is no checkpoint folder and no hub name; say whether its config has it quantised.

    A hub name's is not known before it is loaded: False.
    """
    folder = Path(source)
    if folder.is_dir():
        config = read_json(folder / "config.json")
        found = config.get("quantization_config")
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization_config: wanted a mapping, got {found!r}"
            )
        return found is not None
    if folder.exists():
        raise ValueError(f"{source}: wanted a checkpoint folder, got a file")
    if _HUB_NAME.fullmatch(source) is None:
        raise ValueError(f"{source}: wanted a checkpoint folder, got none: there is no such folder")
    return False


def want_float(source: str, *, is_quantised: bool) -> None:
    """Refuse to quantise what is quantised already."""
    if is_quantised:
        raise ValueError(f"{source}: wanted a float checkpoint, got one with a quantization_config")


def want_apart(source: str, target: Path) -> None:
    """Refuse to write into the source's folder, or to write around it."""
    if Path(source).is_dir() and nesting(target, Path(source)) is not None:
        raise ValueError(f"DST: wanted a folder apart from SRC, got {target} for {source}")


def want_some_left(names: Iterable[str], skip: Sequence[str]) -> None:
    """Refuse patterns that leave no experts module to quantise."""
    found = list(names)
    if found and all(matching_pattern(name, skip) is not None for name in found):
        shown = ", ".join(repr(pattern) for pattern in skip)
        raise ValueError(
            f"--skip: wanted some experts left to quantise, got {shown}, which leaves out all of "
            f"them ({len(found)}, as {found[0]})"
        )


def load_model(source: str, device: str) -> Any:
    """Load a checkpoint in its own dtype."""
    require_transformers()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from . import hf  # noqa: F401  so that INT8 checkpoints load too

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    except SafetensorError as error:
        for path in sorted(Path(source).glob("*.safetensors")):
            read_header(path)  # names the file
        raise CheckpointError(f"{source}: its safetensors files are corrupt: {error}") from error
    except OSError as error:
        if Path(source).is_dir():
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source}: there is no such folder; taken for a hub name: {reason}"
        ) from error
    except RuntimeError as error:
        # What transformers (5.10-5.23) raises for tensors of other shapes than the config's.
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise CheckpointError(
            f"{source}: wanted tensors of the shapes that its config.json implies, got others, "
            "listed above"
        ) from error
    return model.to(device).eval()
