"""`fovea explain`: what a call would run, and why.

Lives here: options in, text out. The answer is `fovea.explain`'s.
"""

import torch

import fovea
from fovea.cli.options import (
    Backend,
    Causal,
    MaskMod,
    ScoreMod,
    Softcap,
    Window,
    Words,
    read_call,
)


def run(
    call: Words = None,
    causal: Causal = False,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    backend: Backend = None,
) -> None:
    """Say which backend and kernel a call would run, with its tiles, registers and FLOPs.

    Example: fovea explain B1 H16 Hkv4 S8192 D128 bf16 --causal --score-mod 'alibi(16)'
    """
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    q, k, v = wanted.make_inputs(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(fovea.explain(q, k, v, backend=backend, **wanted.keywords))
