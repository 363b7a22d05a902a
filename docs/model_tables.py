"""The parts of pages that show the cost model's committed results.

Lives here: their text, from `benchmarks/results/model/` and the frozen constants. Not here: where
it goes (`tables.py`), the model (`fovea.costs`). Invariant: nothing is simulated here; every figure
is one that was committed, and each table says that it is a model's.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from fovea.costs.calibration import Calibration, frozen
from fovea.costs.drawing import plain_text
from fovea.costs.timeline import read_timeline

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "model"
WIDTH = 96  # columns of a drawing
MEANINGS = {
    "serial_share": "of the FMA and ALU pipes' time, what does not overlap with exponentials",
    "product_gap": "clocks that the tensor cores lose from one product to the next",
    "handoff": "clocks from a signal to the first instruction of who waited",
    "softmax_stall": "clocks of a KV tile's softmax beyond what its pipes need",
    "ends": "clocks of a query tile's first tile and way out beyond what their pipes need",
    "launch_us": "microseconds of a launch's start and end",
    "copy_latency": "clocks from a copy's request to its first bytes, from the L2 cache",
    "memory_latency": "clocks more where they come from memory",
}


def read(name: str) -> dict[str, Any]:
    """Return a committed result of the model."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def constants() -> str:
    """Return the table of the frozen latencies."""
    told = frozen()
    lines = [f"Frozen on {told.date}.", "", "| constant | value | |", "|---|---|---|"]
    for field in fields(Calibration):
        value = getattr(told.calibration, field.name)
        lines.append(f"| `{field.name}` | {value:g} | {MEANINGS[field.name]} |")
    return "\n".join(lines)


def errors() -> str:
    """Return model beside measurement on the H200."""
    result = read("calibration")
    summary = result["stamp"]["errors"]
    told = frozen()
    lines = [f"Latencies frozen on {told.date}, measurements and kernels of {told.checked}.", ""]
    for use in ("fitted", "held out"):
        error = summary[use]
        lines.append(
            f"{error['shapes']} shapes {use}: {100 * error['mean_error']:.1f} % off in the mean, "
            f"{100 * error['worst_error']:.1f} % at worst."
        )
    lines += ["", "| shape | | SM clock | measured | model | error |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        heads = f"H{row['H']}" + (f"/{row['Hkv']}" if row["Hkv"] != row["H"] else "")
        mask = "causal" if row["causal"] else "full"
        shape = f"B{row['B']} {heads} S{row['S']} D{row['D']} {mask}"
        lines.append(
            f"| {shape} | {row['use']} | {row['mhz']} MHz | {row['measured']:.0f} | "
            f"{row['model']:.0f} | {100 * row['error']:+.1f} % |"
        )
    return "\n".join(lines)


def predictions() -> str:
    """Return the model's figures of both Blackwell kernels, beside what others measured."""
    result = read("forward")
    stamp = result["stamp"]
    low, high = 100 * stamp["held_out_mean_error"], 100 * stamp["held_out_worst_error"]
    lines = [
        f"**A model's figures, no measurement.** TFLOP/s on a {stamp['model_of']} at "
        f"{stamp['clock_mhz']:.0f} MHz, latencies frozen {stamp['frozen']}; on an H200 the model "
        f"is {low:.1f} % off in the mean and {high:.1f} % at worst (shapes held out), on a B200 it "
        "was never checked. In brackets the same with pipes that overlap fully. Published: of "
        "flash-attn-4, measured by others at a clock of their own.",
        "",
        "| head dims | S | fovea | flash-attn-4 | fovea / flash-attn-4 | published |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        dims = f"{row['D']}" if row["D"] == row["Dv"] else f"({row['D']}, {row['Dv']})"
        mask = "causal" if row["causal"] else "full"
        published = ", ".join(f"{each['tflops']:.0f}" for each in row["published_fa4"])
        ours, ratio = "**not built yet**", ""
        if row["fovea"] is not None:
            ours = f"{row['fovea']:.0f} ({row['fovea_if_pipes_overlap']:.0f})"
            ratio = f"{row['fovea_over_fa4']:.2f}"
        theirs = f"{row['fa4']:.0f} ({row['fa4_if_pipes_overlap']:.0f})"
        lines.append(f"| {dims} {mask} | {row['S']} | {ours} | {theirs} | {ratio} | {published} |")
    sources = dict.fromkeys(
        each["source"] for row in result["rows"] for each in row["published_fa4"]
    )
    return "\n".join([*lines, "", f"Published: {'; '.join(sources)}."])


def timelines() -> str:
    """Return a query tile of both kernels as rows of letters, and what each unit has to do."""
    parts: list[str] = []
    for row in read("timelines")["rows"]:
        timeline = read_timeline(row)
        parts += ["```text", plain_text(timeline, WIDTH), "```", ""]
    return "\n".join(parts).strip()


def units() -> str:
    """Return the clocks of each unit for a KV tile of both kernels."""
    rows = [read_timeline(row) for row in read("timelines")["rows"]]
    names = list(dict.fromkeys(use.unit for timeline in rows for use in timeline.units))
    lines = [
        f"| clocks for a KV tile | {' | '.join(timeline.kernel for timeline in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for name in names:
        cells: list[str] = []
        for timeline in rows:
            use = next((use for use in timeline.units if use.unit == name), None)
            cells.append("" if use is None else f"{use.cycles:.0f} ({100 * use.share:.0f} %)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    total = " | ".join(f"{timeline.visit_cycles:.0f}" for timeline in rows)
    return "\n".join([*lines, f"| the tile takes | {total} |"])
