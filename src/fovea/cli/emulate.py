"""`fovea emulate`: a call's own kernel on the emulator, under several schedules.

Lives here: options in, a table out. The run is `emulation.py`'s.
"""

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fovea.arch import ARCHS
from fovea.cli.call import EMULATED, Shape
from fovea.cli.console import output
from fovea.cli.kernel import compile_forward, resource_table
from fovea.cli.options import (
    Causal,
    MaskMod,
    ScoreMod,
    Softcap,
    Window,
    read_arch,
    read_call,
    words_argument,
)
from fovea.errors import invalid
from fovea.problem import Request, make_dense

Arch = Annotated[str, typer.Option(metavar="NAME", help=" | ".join(ARCHS) + ".")]
Seeds = Annotated[int, typer.Option(metavar="N", min=1, help="Random schedules to try.")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the first schedule as a trace for ui.perfetto.dev."),
]

TILE = 128
SECONDS_PER_TILE = 0.3  # an order of magnitude, on one core
LONG = 10


def estimate_seconds(shape: Shape, seeds: int) -> float:
    """Return roughly how long the emulator takes for a call without skipped tiles."""
    tiles = math.ceil(shape.seqlen_q / TILE) * math.ceil(shape.seqlen_kv / TILE)
    return SECONDS_PER_TILE * seeds * shape.batch * shape.heads_q * tiles


def _warn_of_length(call: str, seconds: float) -> None:
    """Say on stderr how long a long call takes."""
    if seconds > LONG:
        about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        sys.stderr.write(
            f"fovea: {call} takes the emulator about {about} if no tile is skipped; "
            "B1 H1 runs the same kernel, and S changes it only at short lengths\n"
        )


def _check_trace(trace: Path | None) -> None:
    """Raise where the trace could not be written in the end."""
    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        remedy = "make it first, or name a file elsewhere"
        raise ValueError(invalid("--trace", trace, "a file in a folder that exists", remedy))


def run(
    call: Annotated[list[str] | None, words_argument(EMULATED)] = None,
    causal: Causal = None,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    arch: Arch = "sm90",
    seeds: Seeds = 1,
    trace: Trace = None,
) -> None:
    """Run a call's compiled kernel on the CPU emulator and compare it with float64.

    A missing wait, fence or phase ends in a wrong value, a race report or a deadlock report.
    """
    # Here, so that the other commands run without numpy.
    from fovea.cli.emulation import emulate
    from fovea.emulator import Fault, PtxError

    _check_trace(trace)
    mods = (score_mod, mask_mod)
    wanted = read_call(call, causal, window, softcap, mods, default=EMULATED)
    problem = make_dense(
        *wanted.make_inputs(torch.device("cpu")), Request(**wanted.keywords, wants_lse=True)
    )
    console = output()
    _warn_of_length(str(wanted), estimate_seconds(wanted.shape, seeds))
    kernel = compile_forward(problem, read_arch(arch))
    console.print(f"{wanted}, kernel {kernel.artifact.record.name}", highlight=False)
    console.print(resource_table(kernel))
    table = Table(box=None, pad_edge=False)
    headings = ("seed", "max error", "plain", "instructions", "mma", "TMA KiB", "steps", "s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for seed in range(seeds):
        # Seen on a terminal alone.
        status = Console(stderr=True).status(f"seed {seed} of {seeds}")
        try:
            with status:
                done = emulate(problem, kernel.arch, seed=seed, trace=None if seed else trace)
        except (Fault, PtxError) as fault:
            console.print(table)
            console.print(f"[bold]seed {seed}: {type(fault).__name__}[/]")
            console.print(str(fault), markup=False)
            raise typer.Exit(1) from fault
        table.add_row(
            str(seed),
            f"{done.accuracy.error:.2e}",
            f"{done.accuracy.plain_error:.2e}",
            str(done.count("instructions.")),
            str(done.count("instructions.mma")),
            f"{done.count('tensor_load_bytes') / 1024:.0f}",
            str(done.steps),
            f"{done.seconds:.1f}",
        )
    console.print(table)
    console.print(
        "max error: the largest distance of the output from attention in float64; plain: that of "
        "unfused attention in the call's own dtype on the same inputs",
        highlight=False,
    )
