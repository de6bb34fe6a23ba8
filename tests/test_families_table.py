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


def test_every_structure_has_its_snapshots() -> None:
    assert set(structures().values()) == set(test_families_snapshots.STRUCTURES)
    for structure, name in test_families_snapshots.STRUCTURES.items():
        assert structures()[name] == structure
        for implementation in ("grouped_mm", "batched_mm"):
            assert hasattr(test_families_snapshots, f"test_{structure}_{implementation}")


@pytest.mark.skipif(
    f"transformers {transformers.__version__};" not in TEXT,
    reason="the page is for another version of transformers",
)
def test_page_is_current() -> None:
    assert set(structures()) == {kind.name for kind in hf_models.experts_classes()}
    assert support_table.render() == TEXT, "run scripts/support_table.py"
