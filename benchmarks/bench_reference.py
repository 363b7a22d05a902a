"""Time and peak memory of the reference on a CPU, beside torch's math attention.

    python -m benchmarks.bench_reference                      # the shape of the promise, full
    python -m benchmarks.bench_reference --causal --dtype bfloat16 --shape 2,16,2048,128
    python -m benchmarks.bench_reference --check              # fail beyond 3x time or 0.1x memory

From the repository's root, with `src` and `.` on PYTHONPATH. Forward and backward together, each
implementation in processes of its own that take turns: peak memory is what a process held at its
highest above what it held with the inputs made and torch warm; time is the best of all repeats,
since other work on the machine only ever adds to it. Writes reference.json, in TFLOP/s.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import protocol

TIME_LIMIT = 3.0  # times torch's math attention
MEMORY_LIMIT = 0.1  # of torch's math attention
REPEATS = 3


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
    for _ in range(REPEATS):
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
    command = [sys.executable, "-m", "benchmarks.bench_reference", "--run", name]
    done = subprocess.run(
        [*command, json.dumps(asdict(case))], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: Case, turns: int) -> dict[str, Any]:
    """Return a row: rates, seconds and peak memory of each implementation."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(turns):
        for name, samples in found.items():
            samples.append(measure_apart(name, case))
    # Two products forward, five backward.
    flops = 14 * case.batch * case.heads * case.seqlen**2 * case.head_dim
    row: dict[str, Any] = {
        "B": case.batch,
        "H": case.heads,
        "Hkv": case.heads,
        "S": case.seqlen,
        "D": case.head_dim,
        "causal": case.causal,
        "dtype": case.dtype,
        "threads": case.threads,
    }
    for name, samples in found.items():
        seconds = min(sample["seconds"] for sample in samples)
        row[name] = round(flops / (2 if case.causal else 1) / seconds / 1e12, 5)
        row[f"{name}_seconds"] = round(seconds, 3)
        row[f"{name}_added_mb"] = round(max(sample["megabytes"] for sample in samples), 1)
    return row


def ratios(row: dict[str, Any]) -> tuple[float, float]:
    """Return fovea's time and memory over torch's."""
    return (
        row["fovea_seconds"] / row["torch_math_seconds"],
        row["fovea_added_mb"] / row["torch_math_added_mb"],
    )


def write(options: argparse.Namespace, row: dict[str, Any]) -> Path:
    """Write the result file and return its path."""
    path = Path(options.out) if options.out else protocol.RESULTS / "cpu" / "reference.json"
    protocol.write_result(path, protocol.cpu_stamp(), "TFLOP/s", [row])
    return path


def main() -> int:
    """Run the benchmark as the command line says."""
    options = parse()
    if options.run:
        print(json.dumps(measure(options.run[0], Case(**json.loads(options.run[1])))))
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
    )
    row = compare(case, options.turns)
    for name in IMPLEMENTATIONS:
        print(f"{name:>12}: {row[f'{name}_seconds']:7.3f} s {row[f'{name}_added_mb']:9.1f} MB")
    time_ratio, memory_ratio = ratios(row)
    print(f"{'ratio':>12}: {time_ratio:7.3f}   {memory_ratio:9.3f}")
    print(f"wrote {write(options, row)}")
    return int(options.check and (time_ratio > TIME_LIMIT or memory_ratio > MEMORY_LIMIT))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1,8,4096,64", help="batch,heads,seqlen,head_dim")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2, help="processes of each implementation")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--check", action="store_true", help="return 1 beyond the limits")
    parser.add_argument("--out", help="result file (default: benchmarks/results/cpu/)")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
