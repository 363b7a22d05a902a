"""Draw the committed benchmark results.

Lives here: the charts of README and docs/benchmarks.md. Not here: the figures, which are those of
`benchmarks/results/`. Invariant: a chart names the GPU and holds the digest of the file that it was
drawn from, so that a test can say when it is out of date.

Usage: python docs/charts.py    writes docs/pictures/charts/<suite>.png
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures" / "charts"
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DIGEST = "Results"  # the PNG's text that holds the digest

COLOURS = {
    "fovea": "#1f6f78",
    "fa3": "#d98e32",
    "cudnn": "#8a9ba8",
    "flex": "#b2482a",
    "dense": "#c9d3d9",
    "copy": "#c9d3d9",
}
NAMES = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "flex": "torch flex_attention"}

Row = dict[str, Any]


def of_shape(row: Row) -> str:
    """Return the label of a dense row."""
    kind = "causal" if row["causal"] else "full"
    heads = f"H{row['H']}" if row["H"] == row["Hkv"] else f"H{row['H']}/{row['Hkv']}"
    return f"D{row['D']} {kind} S{row['S']} B{row['B']} {heads}"


def of_packed(row: Row) -> str:
    """Return the label of a packed row."""
    return f"D{row['D']} {'causal' if row['causal'] else 'full'} H{row['H']}/{row['Hkv']}"


def of_decode(row: Row) -> str:
    """Return the label of a decode row."""
    pages = f", pages of {row['page']}" if row["page"] else ""
    return f"B{row['B']} S{row['S'] // 1024}k{pages}"


# By suite: title, peers, label of a row.
CHARTS: dict[str, tuple[str, tuple[str, ...], Callable[[Row], str]]] = {
    "forward": ("Forward", ("fovea", "fa3", "cudnn"), of_shape),
    "forward_mods": ("Forward with mods, S8192 D128", ("fovea", "flex"), lambda row: row["mod"]),
    "varlen": ("64 packed sequences", ("fovea", "fa3", "dense"), of_packed),
    "decode": ("One query a sequence, 32/8 heads", ("fovea", "fa3", "cudnn", "copy"), of_decode),
}


def digest(suite: str) -> str:
    """Return what says which results a chart shows."""
    return hashlib.sha256((RESULTS / f"{suite}.json").read_bytes()).hexdigest()


def draw(suite: str) -> Path:
    """Draw one suite; return the picture's path."""
    title, names, label = CHARTS[suite]
    result = json.loads((RESULTS / f"{suite}.json").read_text())
    rows: list[Row] = result["rows"]
    names = tuple(name for name in names if any(name in row for row in rows))
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.16 * len(rows) * (len(names) + 1)))
    for place, name in enumerate(names):
        places = [i + height * place for i, row in enumerate(rows) if name in row]
        values = [row[name] for row in rows if name in row]
        bars = axes.barh(places, values, height, color=COLOURS[name], label=NAMES.get(name, name))
        if name == "fovea":
            axes.bar_label(bars, fmt="%.0f", fontsize=6, padding=2)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], map(label, rows), fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"{result['unit']}, steady state")
    stamp = result["stamp"]
    axes.set_title(f"{title}: {stamp['gpu']}, bf16, {stamp['date']}", fontsize=10, loc="left")
    axes.legend(
        fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names)
    )
    path = PICTURES / f"{suite}.png"
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={DIGEST: digest(suite)})
    plt.close(figure)
    return path


def main() -> None:
    """Draw every suite."""
    for suite in CHARTS:
        sys.stdout.write(f"written: {draw(suite).relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
