"""Triton's kernels on the emulator: compile, load, launch.

Lives here: what the tests of Triton's kernels share. Not here: kernels (`triton_kernels.py`,
`more_triton_kernels.py`) and what is expected of them.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fovea import emulator
from fovea.emulator.layout.tensor_map import encode_tensor_map, make_tensor_map

WORKER = Path(__file__).parent / "triton_kernels.py"
CAPABILITIES = (90, 100)
SWIZZLES = (0, 32, 64, 128)  # by the number in Triton's metadata


@dataclass(frozen=True, slots=True)
class Compiled:
    """Triton's PTX and what its launcher would know."""

    module: emulator.Module
    launch: dict[str, Any]

    def run(
        self, grid: tuple[int, ...], args: list[Any], seed: int, **keywords: Any
    ) -> emulator.Result:
        """Launch with the scratch pointers that Triton appends: memory of each CTA, or none."""
        kernel, threads = self.launch["kernel"], self.launch["threads"]
        count = len(self.module.parameter_sizes(kernel))
        if self.launch["scratch_bytes"]:
            args = [*args, aligned((self.launch["scratch_bytes"] * math.prod(grid),), np.uint8)]
        return self.module.launch(
            kernel,
            grid,
            threads,
            args=args + [0] * (count - len(args)),
            shared_bytes=self.launch["shared_bytes"],
            options=emulator.Options(seed=seed),
            **keywords,
        )


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros at a multiple of 128 bytes, as tensor maps and what is made of them need."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + size].view(dtype).reshape(shape)


def compile_kernels(folder: Path, table: str) -> Callable[[str, int], Compiled]:
    """Compile the kernels of a module's `sources` in a process of their own; return a look-up."""
    done = subprocess.run(
        [sys.executable, WORKER, folder, table],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "kernels.json").read_text())

    def find(name: str, capability: int) -> Compiled:
        label = f"{name}_{capability}"
        module = emulator.load_ptx((folder / f"{label}.ptx").read_text())
        assert module.target == f"sm_{capability}a"
        return Compiled(module, report["launches"][label])

    return find


def tensor_arguments(array: np.ndarray, meta: dict[str, Any], element: str = "f16") -> list[Any]:
    """Return what Triton passes for a tensor descriptor: the map, then sizes, then strides."""
    assert not meta["is_im2col"]
    tensor = make_tensor_map(
        array.ctypes.data,
        element,
        tuple(reversed(array.shape)),
        (array.strides[0],),
        tuple(reversed(meta["block_size"])),
        swizzle=SWIZZLES[meta["swizzle"]],
    )
    strides = [stride // array.itemsize for stride in array.strides]
    return [encode_tensor_map(tensor), *array.shape, *strides]
