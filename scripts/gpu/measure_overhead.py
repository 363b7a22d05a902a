"""Measure what a warm call costs the host on a GPU, and capture calls into CUDA graphs.

On a machine with a compiler, from the repository's root:
    PYTHONPATH=src python scripts/gpu/measure_overhead.py --prepare .carry/overhead
On the GPU machine, which needs torch and apache-tvm-ffi alone:
    PYTHONPATH=src FOVEA_BUNDLE=.carry/overhead python3 scripts/gpu/measure_overhead.py

Times are the host's, in microseconds a call: medians over batches between which the device is
waited for, so that no call waits for a full queue. "raw" is the launcher with ready arguments. All
cases take turns, several times, and "above" is the median of what a turn's calls take beyond its
raw launch: other work on the host then disturbs one turn, not one case. A graph check captures the
first call that its process makes, and compares two replays on changed inputs with the reference.
The exit status is the number of checks that failed.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# `benchmarks` lies in the repository's root.
sys.path.insert(0, str(Path(__file__).parents[2]))

import fovea
from benchmarks import protocol
from fovea.problem import AttentionProblem, Request, make_dense

ROUNDS, BATCHES, CALLS = 9, 12, 50
_SMALL, _LARGE = (1, 256, 4, 128), (4, 1024, 16, 128)  # large: more tiles than CTAs
_TOLERANCE = 0.02  # of a bf16 output against the reference; a wrong tile is off by 0.1 and more


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def keywords_of(case: str, shape: tuple[int, int, int, int], device: str) -> dict[str, Any]:
    """Return the keyword arguments of a case."""
    _, seqlen, heads, _ = shape
    slopes = torch.linspace(0.01, 0.1, heads, device=device)
    slope, width = 0.05, 100
    shift = torch.tensor(0.25)  # one number on the host

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= width

    if case == "block_mask":
        mask = fovea.create_block_mask(sliding, 1, 1, seqlen, seqlen, device=device)
        return {"block_mask": mask}
    return {
        "dense": {},
        "causal": {"causal": True},
        "window, softcap": {"causal": True, "window": (width, 0), "softcap": 30.0},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s + slopes[h] * (j - i)},
        "captured float": {"score_mod": lambda s, b, h, i, j: s + slope * (j - i)},
        "number on the host": {"score_mod": lambda s, b, h, i, j: s + shift * (j - i)},
    }[case]


CASES = (
    *("dense", "causal", "window, softcap", "score_mod", "captured float", "number on the host"),
    "block_mask",
)


def tensors(shape: tuple[int, int, int, int], device: str) -> tuple[torch.Tensor, ...]:
    """Return q, k and v."""
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))


def problem_of(case: str, shape: tuple[int, int, int, int], device: str) -> AttentionProblem:
    """Return the problem of a case."""
    return make_dense(*tensors(shape, device), Request(**keywords_of(case, shape, device)))


def median_us(call: Callable[[], object]) -> float:
    """Return the host's median time of a call."""
    times: list[float] = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    return 1e6 * statistics.median(times[BATCHES // 3 :])


def raw_launch(case: str) -> Callable[[], object]:
    """Return the bare launch of a case."""
    from fovea.runtime import cuda

    launcher, arguments = cuda.arguments_of(problem_of(case, _SMALL, "cuda"))
    return lambda: launcher(*arguments)


def calls_of(case: str) -> dict[str, Callable[[], object]]:
    """Return what is timed of a case."""
    keywords = keywords_of(case, _SMALL, "cuda")
    calls = {"raw": raw_launch(case)}
    for name, needs_grad in (("no_grad", False), ("grad", True)):
        q, k, v = tensors(_SMALL, "cuda")
        q.requires_grad_(needs_grad)
        calls[name] = partial(fovea.attention, q, k, v, backend="cuda", **keywords)
    return calls


def measure(path: Path | None) -> None:
    """Print the table of times and write them, by default to benchmarks/results/<gpu>/."""
    board = protocol.Board()
    calls = {case: calls_of(case) for case in CASES}
    turns = [
        {
            case: {name: median_us(call) for name, call in made.items()}
            for case, made in calls.items()
        }
        for _ in range(ROUNDS)
    ]
    rows: list[dict[str, Any]] = []
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, B, S, H, D = {_SMALL}"
    say(f"{title}\n{'case':20}{'raw':>8}{'no grad':>10}{'above':>8}{'grad':>10}{'above':>8}")
    for case in CASES:
        taken = [turn[case] for turn in turns]
        row = {"case": case}
        row |= {name: round(statistics.median(t[name] for t in taken), 1) for name in taken[0]}
        for name in ("no_grad", "grad"):
            above = statistics.median(t[name] - t["raw"] for t in taken)
            row[f"{name}_above_raw"] = round(above, 1)
        rows.append(row)
        cells = "".join(
            f"{row[name]:10.1f}{row[f'{name}_above_raw']:8.1f}" for name in ("no_grad", "grad")
        )
        say(f"{case:20}{row['raw']:8.1f}{cells}")
    how = {"command": "python scripts/gpu/measure_overhead.py", "host": protocol.cpu_name()}
    stamp = {**protocol.stamp(board), **how, "B, S, H, D": _SMALL}
    out = protocol.result_path("overhead", None if path is None else str(path))
    protocol.write_result(out, stamp, "microseconds a call", rows)


def measure_parts() -> None:
    """Print what the parts of a dense call take."""
    from fovea import env
    from fovea.ops import warm
    from fovea.runtime import stream_memory

    q, k, v = tensors(_SMALL, "cuda")
    batch, seqlen, heads, _ = _SMALL
    passed = (q, k, v, tuple(Request()), "cuda")
    memory = stream_memory.stream_memory(q.device)
    assert memory is not None
    parts = {
        "output": partial(torch.empty_like, q),
        "lse": partial(torch.empty, (batch, heads, seqlen), device="cuda"),
        "memset of a counter": partial(torch.zeros, 1, dtype=torch.int32, device="cuda"),
        "counter of the stream": memory.counter,
        "memory of the stream": partial(stream_memory.stream_memory, q.device),
        "key of the call": partial(warm._key, passed, None),
        "environment": env.check,
    }
    for name, part in parts.items():
        say(f"{name:24}{median_us(part):8.2f}")


def check_graph(case: str) -> float:
    """Capture the first call of this process, replay it twice; return the largest error."""
    q, k, v = tensors(_LARGE, "cuda")
    keywords = keywords_of(case, _LARGE, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fovea.attention(q, k, v, backend="cuda", **keywords)
    error = 0.0
    for _ in range(2):
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
        # A call between capture and replay must not disturb the graph.
        eager = fovea.attention(q, k, v, backend="cuda", **keywords)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected = fovea.attention(q, k, v, backend="reference", **keywords)
        error = max(error, *((x - expected).abs().max().item() for x in (out, eager)))
    return error


def check_graphs() -> int:
    """Run each graph check in a process of its own; return how many failed."""
    failed = 0
    for case in CASES:
        command = [sys.executable, __file__, "--graph", case]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-1500:]
        is_good = done.returncode == 0 and float(text) < _TOLERANCE
        failed += not is_good
        say(f"graph {case:20} {'ok' if is_good else 'FAIL'}, error {text}")
    return failed


def prepare(folder: Path) -> None:
    """Compile the kernels of all cases into a bundle."""
    from fovea.arch import SM90
    from fovea.compile.aot import write_bundle
    from fovea.compile.target import CompileTarget
    from fovea.compile.variant import ForwardVariant
    from fovea.plan.select import forward_plan

    variants = [
        ForwardVariant(forward_plan(problem_of(case, shape, "cpu"), SM90))
        for case in CASES
        for shape in (_SMALL, _LARGE)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    bundle = write_bundle(
        dict.fromkeys(variants), [CompileTarget(arch=SM90.target)], folder, workers=1
    )
    say(f"{folder}: {bundle.summary()}")


def main() -> int:
    """Do what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile into this folder")
    parser.add_argument("--graph", metavar="CASE", help="one graph check, in this process")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--no-graphs", action="store_true", help="times alone")
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.prepare)
        return 0
    if options.graph is not None:
        say(str(check_graph(options.graph)))
        return 0
    measure(options.out)
    measure_parts()
    return 0 if options.no_graphs else check_graphs()


if __name__ == "__main__":
    sys.exit(main())
