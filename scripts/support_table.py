"""Write docs/families.md: what transformers has for experts, and what becomes of it.

    python scripts/support_table.py            # with the newest transformers; read the diff

Classes are discovered, built tiny, quantised and asked; nothing in the table is written by hand.
With an older transformers of TESTED, --check compares the rows that it has.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hf_models  # noqa: E402
import tiny_families  # noqa: E402
import transformers  # noqa: E402

from int8moe_compile.hf import reason_of, record_of  # noqa: E402
from int8moe_compile.hf.unsupported import PECULIARITIES  # noqa: E402
from int8moe_compile.quantization import quantize_  # noqa: E402
from int8moe_compile.schemes import SCHEMES  # noqa: E402
from int8moe_compile.structure import ExpertsStructure  # noqa: E402

TABLE = ROOT / "docs" / "families.md"

# Version -> classes with the decorator, those of them that become the operator, and the models for
# text (two where a folder has two) that are built of these.
TESTED = {"5.17.0": (55, 55, 55), "5.24.0": (68, 65, 65)}

HEAD = """\
# Supported families

Written by `scripts/support_table.py` with transformers {version}; do not edit. A supported class
that carries transformers' experts decorator is rewritten to one `int8moe.experts` a layer, from
`grouped_mm` and from `batched_mm`, with static and dynamic shapes and router weights in bfloat16
and float32 (tests/test_families_experts.py). A language model of it, two layers, compiles to one
graph with one operator a layer (tests/test_families_models.py). What was run: with 5.17.0 every
case of both; with 5.24.0 the fast tests of what is new in it. The classes are

{tested}
The newer version has all classes of the older one. In a version between or after them classes are
found the same way: supported if their code is one of the operator's structures, else refused with a
reason.

The structure is also the name of a snapshot in tests/test_families_snapshots.py, the graph that the
pass leaves. An intended change of the snapshots is accepted with `EXPECTTEST_ACCEPT=1 pytest
tests/test_families_snapshots.py`, one of this table by running the script; then read the
difference.

"""

OTHERS = """
## Experts without the decorator

`quantize_` leaves them in floating point with a warning, and `explain` lists them by name, class
and reason (tests/test_families_undecorated.py): what they lack first of all is transformers'
experts interface, by which an implementation can be chosen. The same goes for any other module that
holds experts in its own way (lists of modules, 2-D weights).

"""


def structure_id(structure: ExpertsStructure) -> str:
    """Name a structure after its gate and what is unusual about its weights."""
    gate, layout = structure.gate, structure.layout
    name = gate.activation if not gate.beta else "swiglu_oai"
    name += "_limited" * (gate.limit is not None and not gate.beta)
    name += "_interleaved" * layout.interleaved + "_bias" * layout.has_bias
    return name + "_not_gated" * (not gate.gated)


def described(structure: ExpertsStructure) -> str:
    """Write the gate's numbers and the layout of the weights."""
    gate, layout = structure.gate, structure.layout
    numbers = {"alpha": (gate.alpha, 1.0), "beta": (gate.beta, 0.0), "limit": (gate.limit, None)}
    parts = [f"{name} {value:g}" for name, (value, usual) in numbers.items() if value != usual]
    return ", ".join([*parts, *(["transposed"] if layout.transposed else [])])


def row(kind: hf_models.ExpertsClass) -> tuple[str, ...]:
    """Quantise one class in every scheme and describe it."""
    schemes, structure, reason = [], None, None
    for scheme in SCHEMES:
        experts = hf_models.build_experts(kind)
        calibration = [hf_models.routed()] if scheme == "w8a8_static" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_(experts, scheme, calibration=calibration)
        record = record_of(experts)
        if record is None:
            reason = reason_of(experts)
        else:
            schemes.append(scheme)
            structure = record.structure
    if structure is None:
        return kind.model, kind.name, f"refused: {reason}", "", ""
    every = "all" if len(schemes) == len(SCHEMES) else ", ".join(schemes)
    return kind.model, kind.name, structure_id(structure), described(structure), every


def as_table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Write rows as a Markdown table."""
    lines = [heading, ("---",) * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def counted(rows: list[tuple[str, ...]]) -> tuple[int, int, int]:
    """Count as TESTED does."""
    supported = sum(not line[2].startswith("refused") for line in rows)
    return len(rows), supported, len(tiny_families.supported())


def differences() -> list[str]:
    """Say what the page and the installed transformers disagree about."""
    rows = [row(kind) for kind in hf_models.experts_classes()]
    version, text = transformers.__version__, TABLE.read_text(encoding="utf-8")
    found = []
    if version in TESTED and counted(rows) != TESTED[version]:
        found.append(f"transformers {version}: {counted(rows)}, TESTED has {TESTED[version]}")
    if version == list(TESTED)[-1]:
        return [*found, *([] if text == render(rows) else ["the page is not as written"])]
    lines = text.splitlines()
    missing = [line for line in as_table(rows[0], rows[1:]).splitlines() if line not in lines]
    return [*found, *(line for line in missing if not line.startswith("| ---"))]


def render(rows: list[tuple[str, ...]]) -> str:
    """Return the whole page."""
    values: dict[str, Any] = {
        "version": transformers.__version__,
        "tested": as_table(
            ("transformers", "classes", "supported", "models"),
            [(version, *map(str, numbers)) for version, numbers in TESTED.items()],
        ),
    }
    heading = ("family", "class", "structure", "numbers and layout", "schemes")
    others = [(name, why) for name, why in PECULIARITIES.items()]
    return (
        HEAD.format(**values)
        + as_table(heading, rows)
        + OTHERS
        + as_table(("class", "and what else the operator does not do"), others)
    )


def main() -> None:
    """Write the page, or only compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not current")
    if parser.parse_args().check:
        found = differences()
        sys.exit(f"{TABLE} is stale:\n" + "\n".join(found) if found else None)
    rows = [row(kind) for kind in hf_models.experts_classes()]
    TABLE.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
