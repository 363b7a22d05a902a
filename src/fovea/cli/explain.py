"""`fovea explain`: what a call would run, and why.

Lives here: options in, text out. The answer is `fovea.explain`'s, the timeline `cli/timeline.py`'s.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

import fovea
from fovea.api.explain import request_of
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
)
from fovea.cli.timeline import show
from fovea.errors import invalid
from fovea.problem import make_dense


def run(
    call: Words = None,
    causal: Causal = None,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    backend: Backend = None,
    arch: Annotated[
        str | None, typer.Option(help="sm90 | sm100 | sm103, of the timeline (default: sm100).")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw what the cost model says of the kernel.")
    ] = False,
    block_mask: BlockMask = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Picture of the timeline; its Perfetto JSON lies beside it."),
    ] = None,
) -> None:
    """Say which backend and kernel a call would run, with its tiles, registers and FLOPs.

    Example: fovea explain B1 H16 Hkv4 S8192 D128 bf16 --causal --score-mod 'alibi(16)'
    Example: fovea explain S8192 D128 --arch sm100 --timeline --output timeline.png
    """
    if (arch is not None or output is not None) and not timeline:
        raise ValueError(
            invalid("--timeline", "not given", "given with --arch and --output", "add --timeline")
        )
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = wanted.with_block_mask(device) if block_mask else wanted
    q, k, v = wanted.make_inputs(device)
    if timeline:
        problem = make_dense(q, k, v, request_of(wanted.keywords, None))
        show(problem, read_arch(arch or "sm100"), output)
    else:
        print(fovea.explain(q, k, v, backend=backend, **wanted.keywords))
