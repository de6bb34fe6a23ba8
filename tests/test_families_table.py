"""docs/families.md is what scripts/support_table.py writes, and names the snapshots there are."""

from __future__ import annotations

import sys
from pathlib import Path

import hf_models
import pytest
import test_families_snapshots
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import support_table

TEXT = support_table.TABLE.read_text(encoding="utf-8")


def structures() -> dict[str, str]:
    """Return class and structure of every row of the page."""
    cells = [line.split(" | ") for line in TEXT.splitlines() if line.count(" | ") == 4]
    return {row[1]: row[2] for row in cells if row[1].endswith("Experts")}


def supported() -> dict[str, str]:
    """Return those that are not refused."""
    return {name: text for name, text in structures().items() if not text.startswith("refused: ")}


def test_every_structure_has_its_snapshots() -> None:
    assert set(supported().values()) == set(test_families_snapshots.STRUCTURES)
    for structure, name in test_families_snapshots.STRUCTURES.items():
        assert structures()[name] == structure
        for implementation in ("grouped_mm", "batched_mm"):
            assert hasattr(test_families_snapshots, f"test_{structure}_{implementation}")


def test_only_what_is_known_to_be_refused_is() -> None:
    assert set(structures()) - set(supported()) == set(hf_models.REFUSALS)
    for name, reason in hf_models.REFUSALS.items():
        assert reason in structures()[name]


@pytest.mark.skipif(
    transformers.__version__ not in support_table.TESTED,
    reason="the page is for other versions of transformers",
)
def test_page_is_current() -> None:
    assert {kind.name for kind in hf_models.experts_classes()} <= set(structures())
    assert not support_table.differences(), "run scripts/support_table.py"
