"""`fovea compile`: a call's kernel, ahead of time and without a GPU.

Lives here: options in, a table and files out. Compiling and bundles are `compile/`'s.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import fovea
from fovea.api.explain import call_problem
from fovea.arch import ARCHS
from fovea.cli.console import output
from fovea.cli.kernel import compile_forward, resource_table
from fovea.cli.options import (
    BlockMask,
    Causal,
    MaskMod,
    ScoreMod,
    Softcap,
    Window,
    Words,
    read_arch,
    read_call,
    with_block_mask,
)
from fovea.cli.packing import Packed, PageSize, make_inputs
from fovea.compile.bundle import load_bundle
from fovea.errors import UnsupportedError
from fovea.plan import select

Arch = Annotated[str, typer.Option(metavar="NAME", help=" | ".join(ARCHS) + ".")]
CPU = torch.device("cpu")
Bundle = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Also write a bundle for machines without a compiler."),
]


def run(
    call: Words = None,
    causal: Causal = None,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    arch: Arch = "sm90",
    bundle: Bundle = None,
    block_mask: BlockMask = False,
    packed: Packed = False,
    page_size: PageSize = None,
) -> None:
    """Compile every kernel that calls like this one can run, and show what its own uses.

    Lengths, batch, heads, pages and scalars do not matter: they are arguments of the kernel.
    """
    chosen = read_arch(arch)
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    wanted = with_block_mask(wanted, CPU, block_mask)
    inputs = make_inputs(wanted, CPU, is_packed=packed, page_size=page_size)
    problem = call_problem(*inputs[:3], None, inputs.keywords)
    lack = select.unsupported(problem, chosen)
    if lack is not None:
        raise UnsupportedError(
            f"{wanted} has no kernel for {chosen}: {lack}; change the call, or give another --arch "
            "(fovea explain says what each takes)"
        )
    start = time.perf_counter()
    fovea.precompile(*inputs[:3], archs=(chosen.name,), bundle=bundle, **inputs.keywords)
    seconds = time.perf_counter() - start
    kernel = compile_forward(problem, chosen)  # in the cache by now
    console = output()
    record = kernel.artifact.record
    console.print(f"{record.name} for {record.target}, its variants too: {seconds:.1f} s")
    console.print(resource_table(kernel))
    if bundle is not None:
        console.print(f"bundle: {load_bundle(bundle).summary()} in {bundle}")
