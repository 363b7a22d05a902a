"""`fovea compile`: a call's kernel, ahead of time and without a GPU.

Lives here: options in, a table and files out. Compiling and bundles are `compile/`'s.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fovea.arch import arch_named
from fovea.cli.kernel import compile_forward, resource_table
from fovea.cli.options import Causal, MaskMod, ScoreMod, Softcap, Window, Words, read_call
from fovea.compile import artifact as artifacts
from fovea.problem import Request, make_dense

Arch = Annotated[str, typer.Option(help="sm90 | sm100.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Also write its launcher, PTX, cubin and record there."),
]


def run(
    call: Words = None,
    causal: Causal = False,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    arch: Arch = "sm90",
    out: Out = None,
) -> None:
    """Compile a call's forward kernel into the disk cache and show what it uses.

    Lengths, batch, heads and scalars do not matter: they are arguments of the kernel.
    """
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    problem = make_dense(*wanted.make_inputs(torch.device("cpu")), Request(**wanted.keywords))
    kernel = compile_forward(problem, arch_named(arch))
    record = kernel.artifact.record
    console = Console()
    how = "from the cache" if kernel.was_cached else "compiled"
    console.print(f"{record.name} for {record.target}: {how} in {kernel.seconds:.2f} s")
    console.print(resource_table(kernel))
    if out is not None:
        kernel.artifact.write(out)
        console.print(f"written to {out}: {', '.join((artifacts.RECORD, *artifacts.FILES))}")
