"""Drawings of a modelled timeline: rows of letters for a terminal, a picture for a page.

Lives here: the drawing, and the line that says what it is. Not here: the model (`costs/`).
Invariant: whatever is shown says that it is a model's figure and gives the error it was found to
have where it could be checked.
"""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fovea.arch import Arch
from fovea.costs.calibration import frozen
from fovea.costs.drawing import MEANINGS, legend, letter_rows, mark_of, marks_of, title
from fovea.costs.engine import Span
from fovea.costs.launch import Call
from fovea.costs.machine import machine_of
from fovea.costs.predict import Kernel, Prediction, Predictor, kernel_of, no_figure
from fovea.costs.timeline import Timeline, timeline_of, write_perfetto
from fovea.errors import UnsupportedError, invalid
from fovea.plan import select
from fovea.problem import AttentionProblem

SHOWN_VISITS = 6  # KV tiles of a query tile in the drawing, at most
_WIDTH, _LEAST_WIDTH = 84, 40
_LANE_NAMES = 16  # columns that the names of lanes take


def show(
    problem: AttentionProblem, arch: Arch, output: Path | None, *, console: Console | None = None
) -> None:
    """Print the timeline of a call's kernel; with `output` write a picture and its JSON there.

    Raises:
        UnsupportedError: there is no kernel, or the model does not know it.
    """
    console = console or Console()
    call, kernel, told = predict(problem, arch)
    longest = max(call.walks(kernel.rows, kernel.tile_n))
    timeline = timeline_of(kernel, min(SHOWN_VISITS, longest))
    width = max(_LEAST_WIDTH, min(_WIDTH, console.width - _LANE_NAMES))
    console.print(drawing(timeline, width), soft_wrap=True)
    if longest > timeline.visits:
        console.print(
            f"{timeline.visits} KV tiles are drawn; query tiles of this call have up to {longest}",
            highlight=False,
        )
    visit = f"one more KV tile takes {timeline.visit_cycles:.0f} clocks, of which are busy"
    console.print(visit, highlight=False)
    console.print(unit_table(timeline))
    console.print("vector pipes: FMA, ALU and exponentials, which mostly wait for each other")
    console.print(statement(told, kernel), soft_wrap=True)
    if output is not None:
        trace = output.with_suffix(".json")
        write_perfetto(timeline, trace)
        if output != trace:
            picture(timeline, output)
            console.print(f"written: {output}, {trace}")
        else:
            console.print(f"written: {trace}")


def check_output(output: Path | None) -> None:
    """Raise before anything is made where the picture could not be written in the end.

    Raises:
        ValueError: no such folder, or matplotlib writes no such files.
        ModuleNotFoundError: there is no matplotlib.
    """
    if output is None:
        return
    if output.is_dir() or not output.absolute().parent.is_dir():
        remedy = "make it first, or name a file elsewhere"
        raise ValueError(invalid("--output", output, "a file in a folder that exists", remedy))
    if output.suffix == ".json":
        return
    from matplotlib.backend_bases import FigureCanvasBase as Canvas

    known = sorted(f".{name}" for name in (*Canvas.filetypes, "json"))
    if output.suffix.lower() not in known:
        allowed = f"a file that ends in {', '.join(known)}"
        raise ValueError(invalid("--output", output, allowed, f"name {output.stem}.png"))


def predict(problem: AttentionProblem, arch: Arch) -> tuple[Call, Kernel, Prediction]:
    """Return a problem as the model's call, its kernel and the model's figure.

    Raises:
        UnsupportedError: there is no kernel, or the model does not know it.
    """
    lack = select.unsupported(problem, arch)
    if lack is not None:
        raise UnsupportedError(f"no kernel for this call on {arch}: {lack}")
    # Kernels take some masks as limits, as of a causal call, but other pairs are visible.
    masks = {"mask_mod": problem.mask_mod, "block_mask": problem.block_lists}
    found = [name for name, mask in masks.items() if mask is not None]
    found += ["window"] if problem.window != (None, None) else []
    if found:
        raise no_figure(", ".join(found), arch.name)
    calibration, machine = frozen().calibration, machine_of(arch.name)
    kernel = kernel_of(select.forward_plan(problem, arch), machine, calibration)
    call = Call(
        batch=problem.batch,
        heads=problem.heads_q,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal is not None,
    )
    return call, kernel, Predictor(calibration)(call, kernel, machine.nominal_mhz)


def statement(told: Prediction, kernel: Kernel) -> str:
    """Return the model's figure for the call, and how far it may be off."""
    fit = frozen()
    machine = kernel.machine
    checked = f"on an H200, shapes held out, it was {100 * fit.mean_error:.1f} % off in the mean"
    if machine.name != "H200":
        checked += f" and {100 * fit.worst_error:.1f} % at worst; on a {machine.name} never checked"
    return (
        f"A model's figure, no measurement: {told.tflops:.0f} TFLOP/s at {told.mhz:.0f} MHz "
        f"({100 * told.peak_share:.0f} % of the {machine.name}'s tensor cores); {checked} "
        f"(latencies frozen {fit.date})."
    )


def drawing(timeline: Timeline, width: int = _WIDTH) -> Text:
    """Return the timeline's middle as a row of letters a lane."""
    text = Text(f"{title(timeline, width)}\n\n")
    for lane, marks in letter_rows(timeline, width):
        text.append(lane)
        for mark in marks:
            text.append(mark.letter, style=mark.colour)
        text.append("\n")
    text.append(f"\n{legend(timeline, width)}\n")
    return text


def unit_table(timeline: Timeline) -> Table:
    """Return what one more KV tile takes of each unit."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("unit of the SM")
    table.add_column("clocks", justify="right")
    table.add_column("share", justify="right")
    for use in timeline.units:
        table.add_row(use.unit, f"{use.cycles:.0f}", f"{100 * use.share:.0f} %")
    return table


def picture(timeline: Timeline, path: Path) -> None:
    """Draw the timeline's middle with matplotlib; the suffix of the path says in which format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as typed

    pyplot: Any = typed  # its own types are partly unknown
    figure, axes = pyplot.subplots(figsize=(12, 0.5 * len(timeline.lanes) + 1.2))
    for number, lane in enumerate(timeline.lanes):
        for span in timeline.spans:
            if span.lane == lane and span.end > timeline.begin and span.start < timeline.end:
                _bar(axes, number, span)
    axes.set_yticks(range(len(timeline.lanes)), timeline.lanes)
    axes.invert_yaxis()
    axes.set_xlim(timeline.begin, timeline.end)
    axes.set_xlabel("clocks of an SM, by the cost model (no measurement)")
    axes.set_title(f"{timeline.kernel}, a query tile of {timeline.visits} KV tiles", fontsize=10)
    _legend(axes, timeline)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _legend(axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = []
    labels: list[str] = []
    for mark in marks_of(timeline):
        label = f"{mark.letter}  {MEANINGS[mark.letter]}"
        if label not in labels:
            handles.append(Patch(color=mark.colour))
            labels.append(label)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "ncol": 2}
    axes.legend(handles, labels, fontsize=7, frameon=False, **place)


def _bar(axes: Any, number: int, span: Span) -> None:
    mark = mark_of(span.name)
    length = span.end - span.start
    axes.barh(number, length, left=span.start, color=mark.colour, edgecolor="white", linewidth=0.3)
    if length > 150:
        label = span.name if len(span.name) < 4 else mark.letter
        middle = span.start + length / 2
        axes.text(middle, number, label, ha="center", va="center", fontsize=7, clip_on=True)
