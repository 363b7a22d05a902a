"""`fovea explain`: what a call would run, and why.

Lives here: options in, text out. The answer is `fovea.explain`'s, the timeline `cli/timeline.py`'s.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

import fovea
from fovea.api.explain import call_problem
from fovea.arch import ARCHS
from fovea.cli.options import (
    Backend,
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
from fovea.cli.timeline import check_output, show
from fovea.costs.coverage import coverage
from fovea.errors import invalid

TIMELINE_ARCH = "sm100"  # no GPU of it was there to measure on


def run(
    call: Words = None,
    causal: Causal = None,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    backend: Backend = None,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{' | '.join(ARCHS)}: say its kernel alone, not that of each; of a timeline "
            f"(default: {TIMELINE_ARCH}), which is drawn for one.",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Draw instead what the cost model says of the kernel. It knows "
            f"{coverage(*ARCHS)}.",
        ),
    ] = False,
    block_mask: BlockMask = False,
    packed: Packed = False,
    page_size: PageSize = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Picture of the timeline; its Perfetto JSON lies beside it."
        ),
    ] = None,
) -> None:
    """Say which backend and kernel a call would run, with its tiles, registers and FLOPs.

    Kernels of one name but for its last six digits differ in features, mods or numbers.

    Example: fovea explain B1 H16 Hkv4 S8192 D128 bf16 --causal --score-mod 'alibi(16)'
    Example: fovea explain B16 H32 Hkv8 S1 Skv8192 D128 --causal --page-size 16
    Example: fovea explain S8192 D128 --arch sm100 --timeline --output timeline.png
    """
    if output is not None and not timeline:
        raise ValueError(
            invalid("--timeline", "not given", "given with --output", "add --timeline")
        )
    check_output(output)
    chosen = None if arch is None else read_arch(arch)
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = with_block_mask(wanted, device, block_mask)
    q, k, v, keywords = make_inputs(wanted, device, is_packed=packed, page_size=page_size)
    if timeline:
        problem = call_problem(q, k, v, None, keywords)
        show(problem, chosen or ARCHS[TIMELINE_ARCH], output)
    else:
        archs = None if chosen is None else (chosen.name,)
        print(fovea.explain(q, k, v, backend=backend, archs=archs, **keywords))
