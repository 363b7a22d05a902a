"""Runs of flash-attn-4 on the emulator: requests, inputs, results as torch tensors.

Lives here: what a test asks the worker for and gets back. Not here: the worker, which imports the
package (`flash_attention_worker.py`). Invariant: a run's results are those of its own inputs, each
seed's apart.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fovea.problem import AttentionProblem, Request, make_dense
from fovea.reference.dense import oracle
from fovea.testing.inputs import Shape, dense_qkv, normal

WORKER = Path(__file__).parent / "flash_attention_worker.py"
LARGE = Shape(seqlen_q=256, seqlen_kv=512)
RAGGED = Shape(seqlen_q=130, seqlen_kv=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of the package."""

    arch: str
    head_dim: int
    causal: bool
    is_backward: bool = False
    takes_over: bool = False  # clusters that have not started, by cluster launch control

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        return f"{self.arch}-d{self.head_dim}-{mask}{'-clc' if self.takes_over else ''}"

    def problem(self, shape: Shape) -> AttentionProblem:
        """Return the problem that a call of this shape poses, with its tensors."""
        sizes = Shape(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, head_dim=self.head_dim)
        request = Request(causal=self.causal, wants_lse=True)
        return make_dense(*dense_qkv(sizes, dtype=torch.bfloat16), request)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What came back: results by call and seed, or the emulator's report."""

    problems: dict[str, AttentionProblem]
    dout: dict[str, Tensor]
    results: dict[str, list[dict[str, Tensor]]]
    kernels: list[str]
    error: str
    warnings: list[str]


def run(kernel: Kernel, calls: dict[str, tuple[Shape, int]], folder: Path) -> Run:
    """Run each call (shape, number of seeds) of one kernel in a process of its own."""
    problems = {name: kernel.problem(shape) for name, (shape, _) in calls.items()}
    dout: dict[str, Tensor] = {}
    for name, problem in problems.items():
        tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
        if kernel.is_backward:
            forward = oracle(problem)
            dout[name] = normal(problem.q.shape, seed=9, dtype=torch.bfloat16)
            tensors |= {"do": dout[name], "out": forward.out.bfloat16()}
            tensors |= {"lse": forward.lse.float().contiguous()}
        np.savez(folder / f"{name}.npz", **{key: _to_numpy(t) for key, t in tensors.items()})
    request = {
        "causal": kernel.causal,
        "is_backward": kernel.is_backward,
        "dtype": "bfloat16",
        "calls": {name: seeds for name, (_, seeds) in calls.items()},
    }
    (folder / "request.json").write_text(json.dumps(request))
    _start(kernel, folder)
    report = json.loads((folder / "report.json").read_text())
    results: dict[str, list[dict[str, Tensor]]] = {}
    for name in report["seconds"]:
        arrays = np.load(folder / f"{name}_results.npz")
        results[name] = [{} for _ in range(calls[name][1])]
        for key in arrays.files:
            tensor, _, seed = key.rpartition("_")
            results[name][int(seed)][tensor] = _from_numpy(arrays[key])
    seconds = {name: f"{sum(of) / len(of):.2f} s a seed" for name, of in report["seconds"].items()}
    compiled = f"{report['compile_seconds']:.1f} s to compile"
    sys.stdout.write(f"{kernel}: {compiled} {len(report['kernels'])} kernels; {seconds}\n")
    return Run(
        problems=problems,
        dout=dout,
        results=results,
        kernels=report["kernels"],
        error=report["error"],
        warnings=report["warnings"],
    )


def _start(kernel: Kernel, folder: Path) -> None:
    environment = os.environ | {
        "CUTE_DSL_ARCH": kernel.arch,
        "FLASH_ATTENTION_ARCH": kernel.arch.removesuffix("a"),
        "FLASH_ATTENTION_NUM_SMS": "132",
        "FA_CLC": str(int(kernel.takes_over)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", WORKER, folder / "request.json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, f"the worker of {kernel} failed:\n{done.stdout}{done.stderr}"


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()


def _from_numpy(array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
