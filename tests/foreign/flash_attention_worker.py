"""flash-attn-4's own host code on this CPU, its compiled kernels on the emulator.

Lives here: a program that `flash_attention_runs.py` starts, because the compiler reads its target
from the environment when it is imported. Not here: what the results are compared with, and how the
package is made to run on a CPU (`emulated_compiler.py`).

Usage: python flash_attention_worker.py FOLDER/request.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import flash_attn.cute.interface as interface
import numpy as np
import torch
from emulated_compiler import EmulatingCompiler, claim, emulate_compiler, plain
from torch._subclasses.fake_tensor import FakeTensorMode

from fovea import emulator


def call(request: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Call the package once, forward or backward, and return its results by name."""
    q, k, v = (tensors[name] for name in "qkv")
    if not request["is_backward"]:
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=request["causal"], return_lse=True)
        return {"out": out, "lse": lse}
    gradients = interface._flash_attn_bwd(
        q, k, v, tensors["out"], tensors["do"], tensors["lse"], causal=request["causal"]
    )
    return dict(zip(("dq", "dk", "dv"), gradients))


def read_tensors(folder: Path, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of one call; 16-bit floats travel as integers: numpy has no bfloat16."""
    inputs = np.load(folder / f"{name}.npz")
    tensors = {key: torch.from_numpy(inputs[key]) for key in inputs.files}
    return {key: t.view(dtype) if t.dtype == torch.int16 else t for key, t in tensors.items()}


def run_call(
    request: dict[str, Any], name: str, compiler: EmulatingCompiler, folder: Path
) -> list[float]:
    """Run every seed of one call, write the results, return the seconds of each."""
    tensors = read_tensors(folder, name, getattr(torch, request["dtype"]))
    num_compiled = len(compiler.kernels)
    seconds: list[float] = []
    results: dict[str, np.ndarray] = {}
    for seed in range(request["calls"][name]):
        compiler.options = emulator.Options(seed=seed)
        start = time.perf_counter()
        found = call(request, {key: claim(tensor) for key, tensor in tensors.items()})
        seconds.append(time.perf_counter() - start)
        for key, tensor in found.items():
            array = plain(tensor)
            array = array.view(torch.int16) if array.element_size() == 2 else array
            results[f"{key}_{seed}"] = array.numpy()
    assert len(compiler.kernels) == num_compiled, "running compiled other kernels"
    np.savez(folder / f"{name}_results.npz", **results)
    return seconds


def run(request: dict[str, Any], folder: Path) -> None:
    """Compile under fake tensors, then run every call; write results and a report."""
    torch.set_num_threads(1)
    compiler = emulate_compiler(folder)
    for name in request["calls"]:
        tensors = read_tensors(folder, name, getattr(torch, request["dtype"]))
        with FakeTensorMode():
            call(
                request,
                {
                    key: torch.empty(t.shape, dtype=t.dtype, device="cuda")
                    for key, t in tensors.items()
                },
            )
    report: dict[str, Any] = {"seconds": {}, "error": ""}
    try:
        for name in request["calls"]:
            report["seconds"][name] = run_call(request, name, compiler, folder)
    except emulator.EmulatorError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report |= {
        "kernels": compiler.kernels,
        "compile_seconds": compiler.seconds,
        "warnings": sorted(compiler.warnings),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
