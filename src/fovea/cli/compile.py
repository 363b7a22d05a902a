"""`fovea compile`: a call's kernel, ahead of time and without a GPU.

Lives here: options in, a table and files out. Compiling and bundles are `compile/`'s.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import fovea
from fovea.arch import ARCHS, arch_named
from fovea.cli.kernel import compile_forward, resource_table
from fovea.cli.options import Causal, MaskMod, ScoreMod, Softcap, Window, Words, read_call
from fovea.compile.bundle import load_bundle
from fovea.problem import Request, make_dense

Arch = Annotated[str, typer.Option(help=" | ".join(ARCHS) + ".")]
Bundle = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Also write a bundle for machines without a compiler."),
]


def run(
    call: Words = None,
    causal: Causal = False,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    arch: Arch = "sm90",
    bundle: Bundle = None,
) -> None:
    """Compile every kernel that calls like this one can run, and show what its own uses.

    Lengths, batch, heads and scalars do not matter: they are arguments of the kernel.
    """
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    q, k, v = wanted.make_inputs(torch.device("cpu"))
    start = time.perf_counter()
    fovea.precompile(q, k, v, archs=(arch,), bundle=bundle, **wanted.keywords)
    seconds = time.perf_counter() - start
    problem = make_dense(q, k, v, Request(**wanted.keywords))
    kernel = compile_forward(problem, arch_named(arch))  # in the cache by now
    console = Console(highlight=False)
    record = kernel.artifact.record
    console.print(f"{record.name} for {record.target}, its variants too: {seconds:.1f} s")
    console.print(resource_table(kernel))
    if bundle is not None:
        console.print(f"bundle: {load_bundle(bundle).summary()} in {bundle}")
