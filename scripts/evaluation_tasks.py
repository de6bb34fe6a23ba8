"""Tasks for lm-eval on a text file of one's own, and a tokenizer for models of bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CONTEXT, CONTINUATION, CHOICES = 400, 48, 4  # characters, characters, answers


def perplexity_rows(text: str, length: int = 8000) -> list[dict[str, str]]:
    """Cut a text into pages."""
    return [{"page": text[start : start + length]} for start in range(0, len(text), length)]


def choice_rows(text: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw places of a text, each with its true continuation among others of the same length.

    Raises ValueError if the text is too short for them.
    """
    if len(text) < 2 * (CONTEXT + CONTINUATION):
        raise ValueError(f"text: wanted {2 * (CONTEXT + CONTINUATION)} characters, got {len(text)}")
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        starts = [chance.randrange(CONTEXT, len(text) - CONTINUATION) for _ in range(CHOICES)]
        choices = [text[start : start + CONTINUATION] for start in starts]
        label = chance.randrange(CHOICES)
        context = text[starts[label] - CONTEXT : starts[label]]
        rows.append({"context": context, "choices": choices, "label": label})
    return rows


def local_tasks(text: Path, folder: Path, choices: int = 100) -> list[dict[str, Any]]:
    """Write the rows of a text file into a folder; return the definitions of both tasks."""
    words = text.read_text(encoding="utf-8", errors="replace")
    pages = _written(folder / "pages.jsonl", perplexity_rows(words))
    places = _written(folder / "places.jsonl", choice_rows(words, choices))
    return [
        {
            "task": "local_perplexity",
            **pages,
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [
                _metric("byte_perplexity", "weighted_perplexity", False),
                _metric("bits_per_byte", "bits_per_byte", False),
            ],
        },
        {
            "task": "local_continuation",
            **places,
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "target_delimiter": "",
            "metric_list": [_metric("acc", "mean", True)],
        },
    ]


def _metric(name: str, aggregation: str, higher_is_better: bool) -> dict[str, Any]:
    """Describe a metric."""
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _written(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows, one a line; return how lm-eval reads them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {"data_files": {"test": str(path)}}
    return {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}


def byte_tokenizer() -> Any:
    """Return a tokenizer whose ids are the bytes of UTF-8; 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level tokenizers write every byte as a visible character: those that are visible as
    # themselves, the others as the characters from 256 on, in order.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte): byte for byte in visible}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next(character for character, byte in vocabulary.items() if byte == 0)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, split_special_tokens=True
    )
