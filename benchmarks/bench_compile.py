"""Seconds of a cold compilation: tracing, PTX, machine code and launcher of one variant.

    python -m benchmarks.bench_compile                    # every call, Hopper and Blackwell
    python -m benchmarks.bench_compile --arch sm100 --word causal

From the repository's root, with `src` and `.` on PYTHONPATH. No GPU is needed. Every compilation
has a process of its own, with nothing cached; its processor time counts, which is what it takes on
an idle core, and of ROUNDS through all calls the least, since other work on the machine only ever
adds to it, for minutes sometimes. What importing torch and fovea takes before is a column of its
own; importing the compiler counts. Writes compile.json.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import fovea
from benchmarks import protocol
from fovea.arch import ARCHS
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.select import forward_plan
from fovea.problem import AttentionProblem, Request, make_dense

RESULT = protocol.RESULTS / "cpu" / "compile.json"
ROUNDS = 3
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def _problem(dims: tuple[int, int], seqlen_q: int = 8192, **options: Any) -> AttentionProblem:
    """Return a long call of four heads on two; nothing is ever read from its tensors."""
    q = torch.empty(1, seqlen_q, 4, dims[0], dtype=torch.bfloat16)
    k, v = (torch.empty(1, 8192, 2, columns, dtype=torch.bfloat16) for columns in dims)
    return make_dense(q, k, v, Request(wants_lse=True, **options))


def _document_blocks() -> AttentionProblem:
    """Return block lists whose mask divides integers for each key, in the lists' own order."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // 100 + kv_idx // 100) % 3 == 0

    lists = torch.nn.attention.flex_attention.create_block_mask(
        mask, None, None, 512, 512, device="cpu"
    )
    q, k, v = (torch.empty(1, 512, 2, 128, dtype=torch.bfloat16) for _ in "qkv")
    return make_dense(q, k, v, Request(block_mask=lists))


CALLS: dict[str, Callable[[], AttentionProblem]] = {
    **{
        f"D{d} {dv} {'causal' if causal else 'dense'}": (
            lambda dims=(d, dv), causal=causal: _problem(dims, causal=causal)
        )
        for d, dv in DIMS
        for causal in (False, True)
    },
    "one query": lambda: _problem((128, 128), 1),
    "alibi": lambda: _problem((128, 128), score_mod=fovea.mods.alibi(heads=4)),
    "softcap causal": lambda: _problem((128, 128), softcap=20.0, causal=True),
    "blocks": _document_blocks,
}


def _processor_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def compile_once(name: str, arch: str) -> None:
    """Compile in this process and print what it took."""
    plan = forward_plan(CALLS[name](), ARCHS[arch])
    target = CompileTarget(arch=ARCHS[arch].target, host_triple=native_host_triple())
    imported = _processor_seconds()
    compile_variant(ForwardVariant(plan), target)
    taken = {"kernel": plan.name, "compile": _processor_seconds() - imported, "import": imported}
    print(json.dumps(taken))


def measured(name: str, arch: str) -> dict[str, Any]:
    """Return one measurement, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_compile", "--once", name, "--arch", arch]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    seconds = {key: round(row[key], 2) for key in ("compile", "import")}
    return {"call": name, "arch": arch, "kernel": row["kernel"], **seconds}


def better(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the lesser times of two."""
    return row | {key: min(row[key], other[key]) for key in ("compile", "import")}


def main() -> None:
    """Measure and write, or with --once compile in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", action="append", choices=list(ARCHS), help="(default: all)")
    parser.add_argument("--word", default="", help="only calls whose name has it; nothing written")
    parser.add_argument("--once", choices=list(CALLS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    archs = options.arch or list(ARCHS)
    if options.once:
        compile_once(options.once, archs[0])
        return
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(ROUNDS):
        for place in itertools.product(archs, (name for name in CALLS if options.word in name)):
            row = measured(place[1], place[0])
            rows[place] = better(row, rows.get(place, row))
            print(rows[place], flush=True)
    if not options.word:
        found = list(rows.values())
        protocol.write_result(RESULT, protocol.cpu_stamp(), "processor seconds, cold", found)


if __name__ == "__main__":
    main()
