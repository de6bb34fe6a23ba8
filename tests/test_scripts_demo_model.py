"""The leaves of the training script: what is held out, and what the range penalty counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from scripts import activation_range, demo_corpus


def test_tests_and_private_halves_share_their_modules_fate() -> None:
    names = ["queue.py", "_queue.py", "test/test_queue.py", "queue/__init__.py"]
    documents = [demo_corpus.Document(name, b"") for name in names]
    assert [document.held_out for document in documents] == [True] * 4, "the shipped text has it"
    assert [document.is_test for document in documents] == [False, False, True, False]
    assert not demo_corpus.Document("heapq.py", b"").held_out


def test_corpus_reads_modules_and_topics(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'for': 'A loop.\\n'}\n")
    (tmp_path / "queue.py").write_text("x = 1\n" * 100)
    (tmp_path / "broken.py").write_bytes(b"\xff")
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "table.py").write_text("y = 2\n")
    documents = demo_corpus.read_corpus(tmp_path)
    assert [document.name for document in documents] == ["topics/for", "queue.py"]
    assert documents[0].text == b"A loop.\n"
    (excerpt,) = demo_corpus.held_out_excerpts(documents, wanted=1000)
    assert excerpt.text == b"x = 1\n" * 100
    assert demo_corpus.held_out_excerpts(documents, wanted=500) == []
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SystemExit, match="--corpus: wanted a folder"):
        demo_corpus.read_corpus(tmp_path / "nothing")


class Experts(torch.nn.Module):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up


def test_range_penalty_by_hand() -> None:
    experts = Experts()
    penalty = activation_range.RangePenalty(experts, limit=1.5)
    values = torch.tensor([[1.0, 1.0], [1.0, 5.0]], requires_grad=True)
    # mean square (1+1+1+25)/4 = 7; only 5/sqrt(7) = 1.89 is over the limit; 2 contributions.
    assert experts._apply_gate(values) is values
    total = penalty.take()
    assert math.isclose(total.item(), (5 / 7**0.5 - 1.5) ** 2 / 2, rel_tol=1e-6)
    total.backward()
    assert values.grad is not None and values.grad[1, 1] > 0 > values.grad[0, 0]
    experts._apply_gate(1000 * values.detach())
    assert math.isclose(penalty.take().item(), total.item(), rel_tol=1e-5), "free of units"
    penalty.remove()
    assert "_apply_gate" not in vars(experts)
    with pytest.raises(ValueError, match="model: wanted gated experts modules"):
        activation_range.RangePenalty(torch.nn.Linear(1, 1), limit=1.0)
