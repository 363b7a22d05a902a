"""Time and peak memory of the reference on a CPU, beside torch's math attention.

    python benchmarks/bench_reference.py [--shape B,H,S,D] [--threads 2] [--causal] [--check]

Each measurement runs in a process of its own: peak memory is what the process held at its highest
above what it held with the inputs made and torch warm. Forward and backward are timed together,
the best of a few repeats, since other work on the machine only ever adds time.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TIME_LIMIT = 3.0  # times torch's math attention
MEMORY_LIMIT = 0.1  # of torch's math attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = False
    threads: int = 2
    repeats: int = 3


def _torch_math(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=case.causal
            )
        return out.transpose(1, 2)

    return run


def _fovea(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    import fovea

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fovea.attention(q, k, v, causal=case.causal, backend="reference")

    return run


IMPLEMENTATIONS = {"torch_math": _torch_math, "fovea": _fovea}


def measure(name: str, case: Case) -> dict[str, float]:
    """Return seconds of forward + backward and megabytes of peak memory, in this process."""
    torch.set_num_threads(case.threads)
    run = IMPLEMENTATIONS[name](case)
    dtype = getattr(torch, case.dtype)
    # A small call first: loading of libraries and pools of threads are not the call's memory.
    small = [torch.randn(1, 16, 1, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    run(*small).sum().backward()
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, dtype=dtype)
    before = _peak_megabytes()
    best = float("inf")
    for _ in range(case.repeats):
        for x in (q, k, v):
            x.grad = None
        start = time.perf_counter()
        run(q, k, v).backward(dout)
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "megabytes": _peak_megabytes() - before}


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_apart(name: str, case: Case) -> dict[str, float]:
    """Return `measure` run in a new process."""
    fields = {field: getattr(case, field) for field in Case.__slots__}
    command = [sys.executable, __file__, "--child", name, json.dumps(fields)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: Case) -> dict[str, Any]:
    """Return both measurements and the ratios fovea / torch."""
    found = {name: measure_apart(name, case) for name in IMPLEMENTATIONS}
    ours, theirs = found["fovea"], found["torch_math"]
    return {
        **found,
        "time_ratio": ours["seconds"] / theirs["seconds"],
        "memory_ratio": ours["megabytes"] / theirs["megabytes"],
    }


def main() -> int:
    """Print one comparison; return 1 if --check is given and a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1,8,4096,64", help="batch,heads,seqlen,head_dim")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail beyond 3x time or 0.1x memory")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child[0], Case(**json.loads(options.child[1])))))
        return 0
    batch, heads, seqlen, head_dim = (int(part) for part in options.shape.split(","))
    case = Case(
        batch=batch,
        heads=heads,
        seqlen=seqlen,
        head_dim=head_dim,
        dtype=options.dtype,
        causal=options.causal,
        threads=options.threads,
        repeats=options.repeats,
    )
    found = compare(case)
    print(f"B{batch} H{heads} S{seqlen} D{head_dim} {options.dtype} causal={options.causal}")
    for name in IMPLEMENTATIONS:
        row = found[name]
        print(f"{name:>12}: {row['seconds']:7.3f} s  {row['megabytes']:8.1f} MB")
    print(f"{'ratio':>12}: {found['time_ratio']:7.3f}    {found['memory_ratio']:8.3f}")
    is_within = found["time_ratio"] <= TIME_LIMIT and found["memory_ratio"] <= MEMORY_LIMIT
    return int(options.check and not is_within)


if __name__ == "__main__":
    sys.exit(main())
