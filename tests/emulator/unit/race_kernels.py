"""Small kernels that race, or do not: what the tests of synchronisation share.

Not a test itself: they import it by name.
"""

from typing import Any

import numpy as np

from fovea import emulator
from fovea.emulator import Options

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def launch(
    body: str, *, seed: int = 0, block: int = 64, cluster: int = 1, args: Any = (), **more: Any
) -> emulator.Result:
    """Run a kernel with two pointer parameters a and b."""
    text = (
        f"{HEAD}.visible .entry k(.param .u64 a, .param .u64 b)\n{{\n"
        ".shared .align 128 .b8 s[1024]; .shared .align 8 .b8 m[16];\n"
        ".reg .b32 %t, %w, %s, %m, %v, %r; .reg .b64 %a, %b, %x; .reg .pred %p, %q, %e;\n"
        "ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;\n"
        "mov.u32 %s, s; mov.u32 %m, m; setp.eq.u32 %p, %w, 0; setp.eq.u32 %q, %t, 0;\n"
        f"{body}\nret;\n}}\n"
    )
    arrays = args or (np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32))
    return emulator.load_ptx(text).launch(
        "k", cluster, block, cluster, args=arrays, options=Options(seed=seed, **more)
    )


def races(body: str, **more: Any) -> int:
    """Return in how many of 20 seeds a fault is reported."""
    found = 0
    for seed in range(20):
        try:
            launch(body, seed=seed, **more)
        except emulator.Fault:
            found += 1
    return found


def check(body: str, needed: str, **more: Any) -> None:
    """Assert silence with `needed` in place of @@, and reports without it."""
    assert races(body.replace("@@", needed), **more) == 0
    assert races(body.replace("@@", ""), **more) >= 18
