"""Draw how near each layer comes to its floor, from the JSON of bench_experts.py, as a PNG."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STYLES = {
    "int8": ("w8a8", "o"),
    "hf bf16": ("HF bf16", "s"),
    "humming": ("humming", "^"),
}


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return tokens and percent of the floor of one contestant, where it was measured."""
    found = sorted((row["tokens"], row) for row in rows if row.get(name))
    return [tokens for tokens, _ in found], [100 * row["floor"] / row[name] for _, row in found]


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of several runs as one result: of a row in two of them, the later run's."""
    rows = {(row["shape"], row["tokens"]): row for result in results for row in result["rows"]}
    return {**results[-1], "rows": list(rows.values())}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write one panel for each shape: percent of the floor over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: list[dict[str, Any]] = result["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(2, -(-len(shapes) // 2), figsize=(13, 7), squeeze=False)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        own = [row for row in rows if row["shape"] == shape]
        for name, (label, marker) in STYLES.items():
            tokens, percent = series(own, name)
            if tokens:
                axis.plot(tokens, percent, marker=marker, label=label)
        targets = [row | {"goal": row["target"]} for row in own if row.get("target")]
        tokens, percent = series(targets, "goal")
        axis.plot(tokens, percent, "--", color="grey", label="target")
        axis.axhline(100, color="black", linewidth=0.8)
        axis.set(title=shape, xscale="log", xlabel="tokens", ylabel="% of the floor", ylim=(0, 110))
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    # Of all panels: a peer may be absent from the first.
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    shown = {name: line for name, line in lines.items() if not name.startswith("_")}
    axes.flat[0].legend(shown.values(), shown)
    versions = result.get("versions", {})
    words = (f"{key} {versions[key]}" for key in ("gpu", "torch", "triton") if key in versions)
    figure.suptitle("INT8 experts layer: floor / time (" + ", ".join(words) + ")")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read results and draw them as one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="of a row in two, the later counts")
    parser.add_argument("--output", type=Path, default=Path("roofline.png"))
    options = parser.parse_args()
    draw(merged([json.loads(path.read_text()) for path in options.results]), options.output)


if __name__ == "__main__":
    main()
