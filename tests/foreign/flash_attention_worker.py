"""flash-attn-4's own host code on this CPU, its compiled kernels on the emulator.

Lives here: a program that `flash_attention_runs.py` starts, because the compiler reads its target
from the environment when it is imported. Not here: what the results are compared with. Invariant:
the package is unchanged but for what a CPU lacks: `cute.compile` hands out emulated launchers, the
occupancy query has a fixed answer, and the tensors say that they are on a GPU.

Usage: python flash_attention_worker.py FOLDER/request.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hardware_info as hardware
import flash_attn.cute.interface as interface
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fovea import emulator

NUM_SMS = 132


class GpuClaim(torch.Tensor):
    """A CPU tensor that the package's checks take for one on a GPU."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


class EmulatingCompiler:
    """Stands in for `cute.compile`: compiles for real, returns what runs on the emulator."""

    def __init__(self, folder: Path):
        self._compile = cute.compile
        self._folder = folder
        self.options = emulator.Options()
        self.seconds = 0.0
        self.kernels: list[str] = []
        self.warnings: set[str] = set()

    def __call__(self, *arguments: Any, options: str = "", **keywords: Any) -> Any:
        start = time.perf_counter()
        number = len(self.kernels)
        options = f"{options} --keep-ptx --dump-dir {self._folder}"
        compiled = self._compile(*arguments, options=options, **keywords)
        path = self._folder / f"launcher{number}.o"
        compiled.export_to_c(str(path), function_name="foreign")
        ptx = compiled.artifacts.PTX.rstrip("\0")
        (self._folder / f"kernel{number}.ptx").write_text(ptx)
        launcher = emulator.load_launcher(path.read_bytes(), ptx)
        self.kernels.append(type(arguments[0]).__name__)
        self.seconds += time.perf_counter() - start

        def run(*values: Any) -> None:
            for result in launcher(*map(plain, values), options=self.options):
                self.warnings.update(result.warnings)

        return run


def plain(value: Any) -> Any:
    """Return the value with tensors as they are: the claim is for the package alone."""
    return value.as_subclass(torch.Tensor) if isinstance(value, GpuClaim) else value


def answer_occupancy() -> None:
    """Give the answers that otherwise need a device."""
    info: Any = hardware.HardwareInfo
    info.__init__ = lambda self, *_, **__: None
    info.get_max_active_clusters = lambda self, cluster_size, **_: NUM_SMS // cluster_size
    info.get_device_multiprocessor_count = lambda self, **_: NUM_SMS


def claim(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one of the package's GPU."""
    return tensor.as_subclass(GpuClaim)


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
    answer_occupancy()
    cute.compile = compiler = EmulatingCompiler(folder)
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
