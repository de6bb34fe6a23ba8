"""Read the Python standard library as training text, with whole subjects held out by a hash.

A document is held out when the hash of its subject says so: test_x.py, _x.py and x.py share a
subject, so a held-out module's tests are not trained on either. The documentation topics behind
help() are documents of their own.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}  # the last: tables
LARGEST_DOCUMENT = 400_000  # bytes; above are generated tables
HELD_OUT_ONE_IN = 16
HELD_OUT_EXCERPT = (
    12_000  # bytes of one held-out document that ship: many subjects, not a few long files
)
TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    name: str
    text: bytes

    @property
    def digest(self) -> bytes:
        """Return the hash of the subject, by which documents are held out and ordered."""
        return hashlib.sha256(subject(self.name).encode()).digest()

    @property
    def held_out(self) -> bool:
        """Whether the model must not see it."""
        return self.digest[0] % HELD_OUT_ONE_IN == 0

    @property
    def is_test(self) -> bool:
        """Whether it belongs to a test suite: trained on, but no part of the shipped text."""
        return any(part in ("test", "tests", "idle_test") for part in self.name.split("/"))


def subject(name: str) -> str:
    """Name what a document is about, the same for a module, its tests and its private half."""
    path = Path(name)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    return stem.removeprefix("test_").removeprefix("_").lower()


def topic_documents(source: bytes) -> Iterator[Document]:
    """Yield each documentation topic of pydoc_data/topics.py as plain text."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            for topic, text in ast.literal_eval(node.value).items():
                yield Document(f"topics/{topic}", text.encode())


def read_corpus(root: Path) -> list[Document]:
    """Read the library's Python files below root and its documentation topics, sorted by name."""
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")):
            continue
        text = path.read_bytes()
        if name == TOPICS:
            documents.extend(topic_documents(text))
        elif 0 < len(text) <= LARGEST_DOCUMENT and is_text(text):
            documents.append(Document(name, text))
    if not documents:
        raise SystemExit(f"--corpus: wanted a folder of Python sources, found none in {root}")
    return documents


def is_text(content: bytes) -> bool:
    """Tell UTF-8 from the test suite's deliberately broken files."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def held_out_excerpts(documents: list[Document], *, wanted: int) -> list[Document]:
    """Take held-out documents in hash order, each cut to whole lines, up to wanted bytes."""
    chosen: list[Document] = []
    size = 0
    for document in sorted(documents, key=lambda document: (document.digest, document.name)):
        if not document.held_out or document.is_test:
            continue
        excerpt = document.text[:HELD_OUT_EXCERPT]
        excerpt = excerpt[: excerpt.rfind(b"\n") + 1]
        if len(excerpt) >= 200 and size + len(excerpt) <= wanted:
            chosen.append(Document(document.name, excerpt))
            size += len(excerpt)
    return chosen
